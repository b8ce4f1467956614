// y[b, :] = x[b, :] * w * rsqrt(mean(x[b, :]^2) + eps).   x, y: [batch, k] bf16   w: [k] bf16.   4 * k bytes a row.
// The squares are summed as Matvec stages them: eight in order, a warp's butterfly over 256 columns, segments in index order.
#pragma once

#include "core/matvec.cuh"
#include "core/ringless.cuh"

namespace cuk {

struct RmsNorm : Ringless {
  struct Args {
    const bf16 *x, *w;
    bf16* y;
    int k;
    float eps;
  };

  // Scratch: the sums of squares [segments].
  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer&, const Team& team, char*, char* scratch, int, Policy&) {
    const bf16* x = a.x + static_cast<size_t>(task) * a.k;
    float* squares = reinterpret_cast<float*>(scratch);
    const int segments = ceil_div(a.k, kSegmentK);
    team.sync();  // the task before may still read the sums
#pragma unroll 1
    for (int unit = team.thread; unit < segments * kWarpSize; unit += kTeamThreads) {
      float sum = 0.f;
      if (unit * 8 < a.k) {
        const Vec16 v = *reinterpret_cast<const Vec16*>(x + unit * 8);
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum = fmaf(low_to_float(pairs[i]), low_to_float(pairs[i]), sum);
          sum = fmaf(high_to_float(pairs[i]), high_to_float(pairs[i]), sum);
        }
      }
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
      if (team.lane() == 0) squares[unit / kWarpSize] = sum;
    }
    team.sync();
    float total = 0.f;
#pragma unroll 4
    for (int i = 0; i < segments; ++i) total += squares[i];
    const float scale = rsqrt_approx(fmaf(total, __frcp_rn(static_cast<float>(a.k)), a.eps));
#pragma unroll 1
    for (int i = team.thread * 2; i < a.k; i += kTeamThreads * 2) {
      const u32 v = *reinterpret_cast<const u32*>(x + i), w = *reinterpret_cast<const u32*>(a.w + i);
      *reinterpret_cast<u32*>(a.y + static_cast<size_t>(task) * a.k + i) =
          pack_bf16(low_to_float(v) * scale * low_to_float(w), high_to_float(v) * scale * high_to_float(w));
    }
  }
};

}  // namespace cuk
