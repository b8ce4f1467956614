// What follows x in a projection whose task is eight rows of w, shared by the tasks that differ in how they make x.
// w: [n, k] bf16   residual, y: [batch, n]   Args: w, residual, y, batch, n, k.
#pragma once

#include "core/matvec.cuh"

namespace cuk {

template <int kSlots, bool kStreamX, int kChunkK, bool kNorm, bool kResidual, class Out>
struct Projection : Matvec<kSlots, kStreamX, kChunkK> {
  using Base = Matvec<kSlots, kStreamX, kChunkK>;

  template <class Args>
  static __device__ void load_independent(const Args& a, int task, int chunk, const Filling& filling) {
    Base::load_weights(filling, a.w, task * kTileRows, 0, chunk);
  }

  template <class Args, class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer& ring, const Team& team, char* shared, char* scratch,
                                 int iteration, Policy&) {
    const int row = task * kTileRows + team.thread % kTileRows, b = team.thread / kTileRows;
    const bool mine = b < a.batch && row < a.n;
    const size_t at = static_cast<size_t>(b) * a.n + row;
    bf16 residual{};  // kept as it was loaded: widening it here would wait for it
    if (kResidual && mine) residual = a.residual[at];
    float y = Base::sums(ring, team, a.batch, a.k, shared, scratch, iteration);
    if (!mine) return;
    if constexpr (kNorm) y *= Base::inverse_rms(a, team, shared, scratch, iteration);
    if (kResidual) y += to_float(residual);
    store(a.y + at, y);
  }

 private:
  static __device__ void store(bf16* p, float y) { *p = to_bf16(y); }
  static __device__ void store(float* p, float y) { *p = y; }
};

}  // namespace cuk
