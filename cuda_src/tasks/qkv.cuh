// [q; k; v][b, :] = w @ RmsNorm(x[b, :]);  q and k rotated by RoPE at position p = positions[b];  k and v appended to the cache
// at p. x: [batch, k]   w: [(heads + 2 kv_heads) * kHeadDim, k]   rope: [capacity, kHeadDim / 2] (cos, sin)
// q: [batch, heads * kHeadDim]   k_cache, v_cache: [batch, kv_heads, capacity, kHeadDim].
// One task: rows i … i + 3 and i + kHeadDim / 2 … of one head (the pairs that RoPE turns), 16 * k bytes.
#pragma once

#include "core/matvec.cuh"

namespace cuk {

template <int kSlots, bool kStreamX, int kChunkK, bool kNorm, int kHeadDim>
struct Qkv : Matvec<kSlots, kStreamX, kChunkK> {
  static_assert(kHeadDim % 8 == 0, "a tile takes four rows from each half of a head");
  using Base = Matvec<kSlots, kStreamX, kChunkK>;
  static constexpr int kTilesPerHead = kHeadDim / kTileRows;

  struct Args {
    const TensorMap* w;
    const bf16 *x, *norm;
    const float2* rope;
    const int* positions;
    bf16 *q, *k_cache, *v_cache;
    int batch, k, heads, kv_heads, capacity;
    float eps;
  };

  static __device__ int dim(int task, int row) { return task % kTilesPerHead * 4 + row % 4 + row / 4 * (kHeadDim / 2); }
  // Shared memory after x: rows of the rope table [batch, kHeadDim / 2], positions [batch]; room for whole warps, which take four of each.
  static __device__ int* positions_in(const Args& a, char* shared) {
    return reinterpret_cast<int*>(shared + Base::x_bytes(a.batch, a.k) + a.batch * kHeadDim * 4);
  }
  static __device__ void load_independent(const Args& a, int task, int chunk, const Filling& filling) {
    Base::load_weights(filling, a.w, task % kTilesPerHead * 4, task / kTilesPerHead, chunk);
  }

  template <class Policy>
  static __device__ void prepare(const Args& a, const Crew& crew, const Team&, char* shared, char*, Policy& policy) {
    // Positions and their rows of the table: no kernel of this step writes them, so they are fetched before the wait.
    int* positions = positions_in(a, shared);
    float2* turns = reinterpret_cast<float2*>(shared + Base::x_bytes(a.batch, a.k));
    constexpr int kHalf = kHeadDim / 2;
#pragma unroll 1
    for (int i = crew.thread; i < a.batch * kHalf; i += crew.num_threads) {
      const int position = a.positions[i / kHalf];
      turns[i] = a.rope[static_cast<size_t>(position) * kHalf + i % kHalf];
      if (i % kHalf == 0) positions[i / kHalf] = position;
    }
    Base::template prepare_x<kNorm>(a, crew, shared, policy);
  }

  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer& ring, const Team& team, char* shared, char* scratch,
                                 int iteration, Policy& policy) {
    float y = Base::sums(ring, team, a.batch, a.k, shared, scratch, iteration);
    const int row = team.thread % kTileRows, b = team.thread / kTileRows;
    const int d = dim(task, row), head = task / kTilesPerHead;
    const bool rotated = head < a.heads + a.kv_heads;
    if (team.warp() * 4 >= a.batch) return;  // whole warps leave: the pair is exchanged within one
    if (kNorm && b < a.batch) y *= Base::inverse_rms(a, team, shared, scratch, iteration);
    const float pair = __shfl_xor_sync(kFullMask, y, 4);
    if (!Policy::kPosts && b >= a.batch) return;
    const bool mine = b < a.batch;
    const float2* turns = reinterpret_cast<const float2*>(shared + Base::x_bytes(a.batch, a.k));
    const float2 turn =
        turns[b * (kHeadDim / 2) + d % (kHeadDim / 2)];  // of a warp's four b, whatever stands there past the batch
    if (rotated) y = fmaf(y, turn.x, row < 4 ? -(pair * turn.y) : pair * turn.y);
    const bf16 result = to_bf16(y);
    if constexpr (Policy::kPosts) post_columns(policy, result, (b * (a.heads + 2 * a.kv_heads) + head) * kHeadDim + d, mine);
    if constexpr (Policy::kPolls) policy.wait();
    if (!mine) return;
    if (head < a.heads) {
      a.q[(static_cast<size_t>(b) * a.heads + head) * kHeadDim + d] = result;
    } else {
      const int kv_head = rotated ? head - a.heads : head - a.heads - a.kv_heads;
      const int position = positions_in(a, shared)[b];
      bf16* cache = rotated ? a.k_cache : a.v_cache;
      cache[((static_cast<size_t>(b) * a.kv_heads + kv_head) * a.capacity + position) * kHeadDim + d] = result;
    }
  }
};

}  // namespace cuk
