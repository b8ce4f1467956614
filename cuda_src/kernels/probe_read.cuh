// Readers of a large buffer, whose best time over many grids is the read bandwidth that floors are computed from.
// Each returns the wrapping 32-bit sum of what it read, so that no load can be left out. No two CTAs read the same bytes.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

// sums[cta] += the words that this CTA read. `words`: 16-byte words; kUnroll of them are in flight a thread.
template <int kUnroll>
__device__ void read_plain(const Vec16* data, long long words, u32* sums) {
  u32 sum = 0;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (; i + (kUnroll - 1) * stride < words; i += kUnroll * stride) {
    Vec16 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_constant(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += v[u].x + v[u].y + v[u].z + v[u].w;
  }
#pragma unroll 1
  for (; i < words; i += stride) {
    const Vec16 v = load_constant(data + i);
    sum += v.x + v.y + v.z + v.w;
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
  if (threadIdx.x % kWarpSize == 0) atomicAdd(sums + blockIdx.x, sum);
}

// The same through a ring of kStages bulk copies of kStageBytes: warp 0 produces, the others sum what has landed.
template <int kStages, int kStageBytes>
__device__ void read_bulk(const char* data, long long num_stages, u32* sums) {
  extern __shared__ __align__(128) char smem[];
  __shared__ u64 full[kStages], empty[kStages];
  const int consumers = static_cast<int>(blockDim.x) - kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], consumers / kWarpSize);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  u32 sum = 0;
  int stage = 0;
  u32 phase = 0;
#pragma unroll 1
  for (long long i = blockIdx.x; i < num_stages; i += gridDim.x) {
    if (threadIdx.x < kWarpSize) {
      mbarrier_wait(&empty[stage], phase ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(&full[stage], kStageBytes);
        bulk_load(smem + stage * kStageBytes, data + i * kStageBytes, kStageBytes, &full[stage]);
      }
      __syncwarp();
    } else {
      mbarrier_wait(&full[stage], phase);
      const Vec16* words = reinterpret_cast<const Vec16*>(smem + stage * kStageBytes);
#pragma unroll 4
      for (int w = static_cast<int>(threadIdx.x) - kWarpSize; w < kStageBytes / 16; w += consumers) {
        const Vec16 v = words[w];
        sum += v.x + v.y + v.z + v.w;
      }
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&empty[stage]);
    }
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
  if (threadIdx.x >= kWarpSize && threadIdx.x % kWarpSize == 0) atomicAdd(sums + blockIdx.x, sum);
}

}  // namespace cuk
