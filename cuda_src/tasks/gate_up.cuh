// y[b, i] = silu(g[i]) * u[i],  g = w[:n] @ f(x[b, :]),  u = w[n:] @ f(x[b, :]),  silu(z) = z / (1 + exp(-z)), f RmsNorm or identity.
// x: [batch, k] bf16   w: [2 n, k] bf16 (gate rows, then up rows)   y: [batch, n] bf16.
// One task: gate and up rows i … i + 3, 16 * k bytes.
#pragma once

#include "core/matvec.cuh"

namespace cuk {

template <int kSlots, bool kStreamX, int kChunkK, bool kNorm>
struct GateUp : Matvec<kSlots, kStreamX, kChunkK> {
  using Base = Matvec<kSlots, kStreamX, kChunkK>;

  struct Args {
    const TensorMap* w;
    const bf16 *x, *norm;
    bf16* y;
    int batch, n, k;
    float eps;
  };

  static __device__ void load_independent(const Args& a, int task, int chunk, const Filling& filling) {
    Base::load_weights(filling, a.w, task * 4, 0, chunk);
  }

  template <class Policy>
  static __device__ void prepare(const Args& a, const Crew& crew, const Team&, char* shared, char*, Policy& policy) {
    Base::template prepare_x<kNorm>(a, crew, shared, policy);
  }

  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer& ring, const Team& team, char* shared, char* scratch,
                                 int iteration, Policy& policy) {
    float z = Base::sums(ring, team, a.batch, a.k, shared, scratch, iteration);
    if (team.warp() * 4 >= a.batch) return;  // whole warps leave: gate and up meet within one
    const int row = team.thread % kTileRows, b = team.thread / kTileRows;
    if (kNorm && b < a.batch) z *= Base::inverse_rms(a, team, shared, scratch, iteration);
    const float up = __shfl_xor_sync(kFullMask, z, 4);
    const int i = task * 4 + row;
    const bool mine = row < 4 && b < a.batch && i < a.n;
    if (!Policy::kPosts && !mine) return;
    const float silu = __fdiv_rn(z, 1.f + exp2_approx(z * -1.4426950408889634f));
    const size_t at = static_cast<size_t>(b) * a.n + i;
    const bf16 y = to_bf16(silu * up);
    if constexpr (Policy::kPosts) post_columns(policy, y, static_cast<int>(at), mine);
    if constexpr (Policy::kPolls) policy.wait();
    if (mine) a.y[at] = y;
  }
};

}  // namespace cuk
