// y[b, n] = sum_k f(x[b, :])[k] * w[n, k] (+ residual[b, n]), f the identity or RmsNorm.
// x: [batch, k] bf16   w: [n, k] bf16   norm: [k] bf16   residual, y: [batch, n]   one task: 8 rows of w, 16 * k bytes.
#pragma once

#include "core/matvec.cuh"

namespace cuk {

template <int kBatchHalves, bool kStreamX, int kChunkK, bool kNorm, bool kResidual, class Out>
struct Linear : Matvec<kBatchHalves, kStreamX, kChunkK> {
  using Base = Matvec<kBatchHalves, kStreamX, kChunkK>;

  struct Args {
    const TensorMap* w;
    const bf16 *x, *norm, *residual;
    Out* y;
    int batch, n, k;
    float eps;
  };

  static __device__ void load_independent(const Args& a, int task, int chunk, const Filling& filling) {
    Base::load_weights(filling, a.w, task * kTileRows, 0, chunk);
  }

  template <class Policy>
  static __device__ void prepare(const Args& a, const Crew& crew, const Team& team, char* shared, char* scratch,
                                 Policy& policy) {
    Base::template prepare_x<kNorm>(a, crew, team, shared, scratch, policy);
  }

  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer& ring, const Team& team, char* shared, char* scratch,
                                 int iteration, Policy&) {
    const int row = task * kTileRows + team.thread % kTileRows, b = team.thread / kTileRows;
    const bool mine = b < a.batch && row < a.n;
    const size_t at = static_cast<size_t>(b) * a.n + row;
    bf16 residual{};  // kept as it was loaded: widening it here would wait for it
    if (kResidual && mine) residual = a.residual[at];
    float y = Base::sums(ring, team, a.batch, a.k, shared, scratch, iteration);
    if (!mine) return;
    if (kNorm) y *= Base::inverse_rms(scratch)[b];
    if (kResidual) y += to_float(residual);
    store(a.y + at, y);
  }

 private:
  static __device__ void store(bf16* p, float y) { *p = to_bf16(y); }
  static __device__ void store(float* p, float y) { *p = y; }
};

}  // namespace cuk
