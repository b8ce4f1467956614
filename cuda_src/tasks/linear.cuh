// y[b, n] = sum_k f(x[b, :])[k] * w[n, k] (+ residual[b, n]), f the identity or RmsNorm.
// x: [batch, k] bf16   w: [n, k] bf16   norm: [k] bf16   residual, y: [batch, n]   one task: 8 rows of w, 16 * k bytes.
#pragma once

#include "core/projection.cuh"

namespace cuk {

template <int kSlots, bool kStreamX, int kChunkK, bool kNorm, bool kResidual, class Out>
struct Linear : Projection<kSlots, kStreamX, kChunkK, kNorm, !kNorm && !kStreamX, kResidual, Out> {
  using Base = Matvec<kSlots, kStreamX, kChunkK>;
  struct Args {
    const TensorMap* w;
    const bf16 *x, *norm, *residual;
    Out* y;
    int batch, n, k;
    float eps;
  };

  template <class Policy>
  static __device__ void prepare(const Args& a, const Crew& crew, const Team&, char* shared, char*, Policy& policy) {
    if constexpr (!(Policy::kStagers && Linear::kStagesByChunk)) Base::template prepare_x<kNorm>(a, crew, shared, policy);
  }
};

}  // namespace cuk
