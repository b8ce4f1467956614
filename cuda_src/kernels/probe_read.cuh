// Readers of a large buffer, whose best time over many grids is the read bandwidth that floors are computed from.
// sums[cta, warp] = the wrapping 32-bit sum of the words that this warp read, so that no load can be left out, and so that
// a word left out or read twice shows. data: [words] of 16 bytes; 16 * words bytes are read, once.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

// data[i] = a hash of i: no stretch of it looks like another one, so that reading one twice in another's place shows in the sum.
// (The mixing is lowbias32, C. Wellons' hash-prospector.) data: [count] words of 32 bits.
__device__ inline void fill_hashed(u32* data, long long count) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    u32 h = static_cast<u32>(i) + static_cast<u32>(i >> 32) * 0x9e3779b9u;
    h = (h ^ (h >> 16)) * 0x21f0aaadu;
    h = (h ^ (h >> 15)) * 0x735a2d97u;
    data[i] = h ^ (h >> 15);
  }
}

__device__ inline u32 sum_of(const Vec16& v) { return v.x + v.y + v.z + v.w; }

__device__ inline void store_sum(u32 sum, u32* sums) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2)
    sum += static_cast<u32>(__shfl_xor_sync(kFullMask, static_cast<int>(sum), step));
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize, thread = static_cast<int>(threadIdx.x);
  if (thread % kWarpSize == 0) sums[blockIdx.x * num_warps + thread / kWarpSize] = sum;
}

// Vector loads, kUnroll in flight a thread. kBlocked: a CTA takes kUnroll * blockDim.x words in one piece, the next CTA the
// next piece; otherwise all CTAs together take one piece after another.
template <int kUnroll, bool kBlocked>
__device__ void read_plain(const Vec16* data, long long words, u32* sums) {
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long hop = kBlocked ? static_cast<long long>(blockDim.x) : threads;
  long long i = static_cast<long long>(blockIdx.x) * (kBlocked ? kUnroll : 1) * blockDim.x + threadIdx.x;
  u32 sum = 0;
#pragma unroll 1
  for (; i + (kUnroll - 1) * hop < words; i += kUnroll * threads) {
    Vec16 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_constant(data + i + u * hop);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += sum_of(v[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll - 1; ++u)  // what is left of the last round
    if (i + u * hop < words) sum += sum_of(load_constant(data + i + u * hop));
  store_sum(sum, sums);
}

// Bulk copies into a ring of kStages stages of kStageBytes: one lane of warp 0 issues, the other warps sum what has landed.
// Dynamic shared memory: kStages * (kStageBytes + 16) bytes, two mbarriers a stage behind the stages.
template <int kStages, int kStageBytes>
__device__ void read_bulk(const Vec16* data, long long words, u32* sums) {
  static_assert(kStageBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
  constexpr long long kStageWords = kStageBytes / 16;
  extern __shared__ __align__(1024) char smem[];
  u64* full = reinterpret_cast<u64*>(smem + kStages * kStageBytes);
  u64* empty = full + kStages;
  const int thread = static_cast<int>(threadIdx.x), consumers = static_cast<int>(blockDim.x) - kWarpSize;
  if (thread == 0) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], consumers / kWarpSize);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  u32 sum = 0, phase = 0;
  int stage = 0;
#pragma unroll 1
  for (long long start = blockIdx.x * kStageWords; start < words; start += gridDim.x * kStageWords) {
    const int count = static_cast<int>(min(kStageWords, words - start));
    char* buffer = smem + stage * kStageBytes;
    if (thread < kWarpSize) {
      mbarrier_wait(&empty[stage], phase ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(&full[stage], count * 16);
        bulk_load(buffer, data + start, count * 16, &full[stage]);
      }
      __syncwarp();
    } else {
      mbarrier_wait(&full[stage], phase);
#pragma unroll 4
      for (int w = thread - kWarpSize; w < count; w += consumers) sum += sum_of(reinterpret_cast<const Vec16*>(buffer)[w]);
      __syncwarp();
      if (thread % kWarpSize == 0) mbarrier_arrive(&empty[stage]);
    }
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  store_sum(sum, sums);
}

}  // namespace cuk
