// q[b, h, :] = rope(RmsNorm(qkv[b, h, :]) * norm_q, p),  p = positions[b];  keys likewise with norm_k, into the cache at p;  values as they are.
// qkv: [batch, heads + 2 kv_heads, kHeadDim] bf16   rope: [capacity, kHeadDim / 2] (cos, sin)   q: [batch, heads * kHeadDim]
// k_cache, v_cache: [batch, kv_heads, capacity, kHeadDim]. One task: four heads, a warp each. The squares are summed in a lane's columns
// in order, then in a butterfly.
#pragma once

#include "core/ringless.cuh"

namespace cuk {

template <int kHeadDim>
struct QkNorm : Ringless {
  static_assert(kHeadDim % 64 == 0, "a lane takes whole pairs of columns");
  static constexpr int kPairs = kHeadDim / 2 / kWarpSize;  // of RoPE, a lane

  struct Args {
    const bf16 *qkv, *norm_q, *norm_k;
    const float2* rope;
    const int* positions;
    bf16 *q, *k_cache, *v_cache;
    int batch, heads, kv_heads, capacity;
    float eps;
  };

  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer&, const Team& team, char*, char*, int, Policy&) {
    const int heads = a.heads + 2 * a.kv_heads, lane = team.lane();
    const int index = task * kTeamWarps + team.warp(), b = index / heads, head = index - b * heads;
    if (b >= a.batch) return;
    const bool is_query = head < a.heads, is_key = !is_query && head < a.heads + a.kv_heads;
    const int position = a.positions[b];
    const bf16* from = a.qkv + static_cast<size_t>(index) * kHeadDim + lane;
    float low[kPairs], high[kPairs], sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      low[i] = to_float(from[i * kWarpSize]);
      high[i] = to_float(from[kHeadDim / 2 + i * kWarpSize]);
      sum = fmaf(low[i], low[i], sum);
      sum = fmaf(high[i], high[i], sum);
    }
    bf16* to = is_query
                   ? a.q + (static_cast<size_t>(b) * a.heads + head) * kHeadDim
                   : (is_key ? a.k_cache : a.v_cache) +
                         ((static_cast<size_t>(b) * a.kv_heads + (head - a.heads - (is_key ? 0 : a.kv_heads))) * a.capacity +
                          position) *
                             kHeadDim;
    if (is_query || is_key) {
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
      const float scale = rsqrt_approx(fmaf(sum, 1.f / kHeadDim, a.eps));
      const bf16* norm = (is_query ? a.norm_q : a.norm_k) + lane;
      const float2* turns = a.rope + static_cast<size_t>(position) * (kHeadDim / 2) + lane;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 turn = turns[i * kWarpSize];
        const float x = low[i] * scale * to_float(norm[i * kWarpSize]);
        const float y = high[i] * scale * to_float(norm[kHeadDim / 2 + i * kWarpSize]);
        low[i] = fmaf(x, turn.x, -(y * turn.y));
        high[i] = fmaf(y, turn.x, x * turn.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      to[lane + i * kWarpSize] = to_bf16(low[i]);
      to[lane + kHeadDim / 2 + i * kWarpSize] = to_bf16(high[i]);
    }
  }
};

}  // namespace cuk
