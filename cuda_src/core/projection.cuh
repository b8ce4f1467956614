// What follows x in a projection whose task is eight rows of w, shared by the tasks that differ in how they make x.
// w: [n, k] bf16   residual, y: [batch, n]   Args: w, residual, y, batch, n, k.
//
// Where x arrives as words, the kernel before may still run while the sums are made: the residual is read, and y written, after the wait.
#pragma once

#include "core/matvec.cuh"

namespace cuk {

// kByChunk: an x that arrives as words is used chunk by chunk, as core/matvec.cuh stages it.
template <int kSlots, bool kStreamX, int kChunkK, bool kNorm, bool kByChunk, bool kResidual, class Out>
struct Projection : Matvec<kSlots, kStreamX, kChunkK> {
  using Base = Matvec<kSlots, kStreamX, kChunkK>;
  static constexpr bool kStagesByChunk = kByChunk;

  template <class Args>
  static __device__ void load_independent(const Args& a, int task, int chunk, const Filling& filling) {
    Base::load_weights(filling, a.w, task * kTileRows, 0, chunk);
  }

  template <class Args, class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer& ring, const Team& team, char* shared, char* scratch,
                                 int iteration, Policy& policy) {
    const int row = task * kTileRows + team.thread % kTileRows, b = team.thread / kTileRows;
    const bool mine = b < a.batch && row < a.n;
    const size_t at = static_cast<size_t>(b) * a.n + row;
    bf16 residual{};  // kept as it was loaded: widening it here would wait for it
    u64 word = 0;     // or the word that holds it, where it comes so
    if (kResidual && mine) {
      if constexpr (Policy::kResidualWords)
        word = peek(policy.residuals() + at / 4);
      else if constexpr (!Policy::kPolls)
        residual = a.residual[at];
    }
    const int last = Base::chunks_of(a.k) - 1;
    float y = Base::sums(ring, team, a.batch, a.k, shared, scratch, iteration, [&](int chunk) {
      if constexpr (Policy::kPolls) {
        if (Policy::kStagers && kByChunk && iteration == 0) policy.wait_staged(chunk);
        if (chunk == last) {
          policy.wait();
          if (!Policy::kResidualWords && kResidual && mine) residual = a.residual[at];
        }
      }
    });
    if constexpr (Policy::kPosts || Policy::kResidualWords) {
      if (team.warp() * 4 >= a.batch) return;  // whole warps leave: a word is put together, and waited for, within one
    } else {
      if (!mine) return;
    }
    if constexpr (kResidual && Policy::kResidualWords) {
      await(mine, [&] { return word != kEmptyWord; }, [&] { word = peek(policy.residuals() + at / 4); });
      residual.bits = static_cast<u16>(word >> at % 4 * 16);
    }
    if constexpr (kNorm)
      if (mine) y *= Base::inverse_rms(a, team, shared, scratch, iteration);
    if (kResidual) y += to_float(residual);
    const Out result = round(y);
    if constexpr (Policy::kPosts) post_columns(policy, result, static_cast<int>(at), mine);
    if (mine) a.y[at] = result;
  }

 private:
  static __device__ Out round(float y) {
    if constexpr (sizeof(Out) == 4)
      return y;
    else
      return to_bf16(y);
  }
};

}  // namespace cuk
