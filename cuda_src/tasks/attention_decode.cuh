// out[b, h, :] = softmax(q[b, h, :] . K[b, h / group, :p + 1, :] / sqrt(kHeadDim)) @ V[b, h / group, :p + 1, :],  p = positions[b].
// q, out: [batch, kv_heads * group * kHeadDim] bf16   k_cache, v_cache: [batch, kv_heads, capacity, kHeadDim] bf16.
// One task: up to eight query heads of one KV head over one of `splits` ranges of the context (flash decoding); the last
// of an output's tasks to arrive merges the ranges in index order. 4 * kHeadDim bytes and 4 * group * kHeadDim flops a position.
//
// The p old positions come through the ring, without waiting for any kernel of this step: they were written in earlier steps.
// The new position, which this step's Qkv appends, is read from global memory after the wait, by the last range.
//
// A ring stage holds kPositions positions of K, in one piece, then of V as four blocks of rows padded by 32 bytes: column pair t of the
// score tile is two rows of block t, which makes the transposed reads of V free of bank conflicts. (Padding K the same way would not
// spare it its two-way conflict, and each copy costs its issuer about 100 cycles.) Each warp keeps its own running maximum, sum and
// output over two rows of each block; the warps merge in index order at the end of the task.
#pragma once

#include "core/ring.cuh"
#include "core/team.cuh"

namespace cuk {

template <int kHeadDim>
struct AttentionDecode {
  static_assert(kHeadDim == 64 || kHeadDim == 128, "a lane reads 16 bytes of 64 or 128 columns");
  static constexpr bool kMerges = true;
  static constexpr bool kHasDependentLoads = false;
  static constexpr int kHeads = 8;                       // of one task, at most
  static constexpr int kPositions = 64 * 64 / kHeadDim;  // of one stage
  static constexpr int kBlockRows = kPositions / 4;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kKeyBytes = kPositions * kRowBytes;
  static constexpr int kBlockPitch = kBlockRows * kRowBytes + 32;  // of V
  static constexpr int kOctets = kPositions / 32;                  // groups of eight positions that a warp takes from a stage
  static constexpr int kWidths = kHeadDim / 64;
  static constexpr int kFreshOffset = 16, kMergeOffset = 16 + 6 * kRowBytes;

  struct Args {
    const bf16 *q, *k_cache, *v_cache;
    const int* positions;
    float* partial;      // [batch, kv_heads, head_blocks, splits, heads_per_task, kHeadDim]
    float2* partial_ml;  // [batch, kv_heads, head_blocks, splits, heads_per_task]: running maximum and sum
    u32* arrivals;       // [batch, kv_heads, head_blocks]
    bf16* out;
    int kv_heads, group, heads_per_task, capacity, splits;
    float scale_log2;  // log2(e) / sqrt(kHeadDim)
  };

  // Stages of the old context go to the splits in equal runs, the last ones getting less.
  struct Tile {
    int task, split, output;    // output: of [batch, kv_heads, head_blocks]
    int num_heads, query;       // query: the first element of its heads in q and out
    int position, first, last;  // of the stages
    size_t cache;               // the first element of its KV head in the caches
  };
  static __device__ Tile tile(const Args& a, int task) {
    Tile w;
    w.task = task;
    w.output = task / a.splits;
    w.split = task - w.output * a.splits;
    const int head_blocks = (a.group + a.heads_per_task - 1) / a.heads_per_task;
    const int kv = w.output / head_blocks, first_head = (w.output - kv * head_blocks) * a.heads_per_task;
    w.num_heads = min(a.heads_per_task, a.group - first_head);
    w.query = (kv * a.group + first_head) * kHeadDim;
    w.cache = static_cast<size_t>(kv) * a.capacity * kHeadDim;
    w.position = a.positions[kv / a.kv_heads];
    const int stages = (w.position + kPositions - 1) / kPositions;
    const int each = (stages + a.splits - 1) / a.splits;
    w.first = min(stages, w.split * each);
    w.last = min(stages, w.first + each);
    return w;
  }

  // ---- producer ----
  static __device__ int num_chunks(const Args&, const Tile& w) { return w.last - w.first; }
  static __device__ u32 chunk_bytes(const Args&, const Tile& w, int chunk) {
    return static_cast<u32>(min(kPositions, w.position - (w.first + chunk) * kPositions)) * (2 * kRowBytes);
  }
  static __device__ void load_independent(const Args& a, const Tile& w, int chunk, const Filling& filling) {
    const int first = (w.first + chunk) * kPositions, left = w.position - first;
    const size_t at = w.cache + static_cast<size_t>(first) * kHeadDim;
    filling.copy(0, a.k_cache + at, static_cast<u32>(min(kPositions, left)) * kRowBytes);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int row = block * kBlockRows, rows = min(kBlockRows, left - row);
      if (rows > 0)
        filling.copy(kKeyBytes + block * kBlockPitch, a.v_cache + at + row * kHeadDim, static_cast<u32>(rows) * kRowBytes);
    }
  }
  static __device__ void load_dependent(const Args&, const Tile&, int, const Filling&) {}

  // ---- team ----
  template <class Policy>
  static __device__ void prepare(const Args&, const Crew&, const Team&, char*, char*, Policy&) {}

  // What a warp carries along the context. Scores have query head g = lane / 4 in their rows, so the running maximum and this
  // lane's share of the sum belong to head g; outputs are kept transposed: out[m] holds columns 8 g + 2 (m % 4) and the next
  // (of the 64-column width m / 4) for heads 2 t and 2 t + 1, t = lane % 4. The weights come out of the score tile in just the
  // layout that the second product takes, and no accumulator is spent on padding heads.
  struct State {
    Vec16 q[kWidths][2];
    float maximum = -infinity(), sum = 0.f;
    float out[kWidths * 4][4] = {};
  };

  // Folds kOctets octets of positions into the state. k_row: this lane's K row of the first octet (position lane / 4), at column 8 t;
  // v_row: its first V row (positions 2 t and 2 t + 1), at column 8 g. Position e of this lane's in octet o counts where
  // offset + 2 * o + e < left.
  static __device__ void fold(State& s, float scale_log2, int lane, const char* k_row, const char* v_row, int offset,
                              int left) {
    constexpr int kCount = kOctets;
    const auto valid = [=](int o, int e) { return offset + 2 * o + e < left; };
    float score[kCount][2];
    float top = -infinity();
#pragma unroll
    for (int o = 0; o < kCount; ++o) {
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int width = 0; width < kWidths; ++width)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Vec16 q = s.q[width][half];
          const Vec16 k = *reinterpret_cast<const Vec16*>(k_row + o * 2 * kRowBytes + width * 128 + half * 64);
          mma_k16(even, q.x, 0u, q.y, 0u, k.x, k.y);
          mma_k16(odd, q.z, 0u, q.w, 0u, k.z, k.w);
        }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        score[o][e] = valid(o, e) ? (even[e] + odd[e]) * scale_log2 : -infinity();
        top = fmaxf(top, score[o][e]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
    const float maximum = fmaxf(s.maximum, top);
    const float base = maximum == -infinity() ? 0.f : maximum;  // nothing counted yet: every weight below is 0
    const float keep = exp2_approx(s.maximum - base);
    s.maximum = maximum;
    s.sum *= keep;
    const float keep_even = __shfl_sync(kFullMask, keep, lane % 4 * 8),
                keep_odd = __shfl_sync(kFullMask, keep, lane % 4 * 8 + 4);
#pragma unroll
    for (int m = 0; m < kWidths * 4; ++m) {
      s.out[m][0] *= keep_even;
      s.out[m][1] *= keep_odd;
      s.out[m][2] *= keep_even;
      s.out[m][3] *= keep_odd;
    }
#pragma unroll
    for (int o = 0; o < kCount; ++o) {
      const float first = exp2_approx(score[o][0] - base), second = exp2_approx(score[o][1] - base);
      s.sum += first + second;
      const u32 weights = pack_bf16(first, second);
#pragma unroll
      for (int width = 0; width < kWidths; ++width) {
        // A position that does not count has weight 0, but its bytes may be NaN.
        const char* v = v_row + o * 2 * kRowBytes + width * 128;
        Vec16 v0{}, v1{};
        if (valid(o, 0)) v0 = *reinterpret_cast<const Vec16*>(v);
        if (valid(o, 1)) v1 = *reinterpret_cast<const Vec16*>(v + kRowBytes);
        float (*out)[4] = s.out + width * 4;
        mma_k8(out[0], pack_low(v0.x, v1.x), pack_high(v0.x, v1.x), weights);
        mma_k8(out[1], pack_low(v0.y, v1.y), pack_high(v0.y, v1.y), weights);
        mma_k8(out[2], pack_low(v0.z, v1.z), pack_high(v0.z, v1.z), weights);
        mma_k8(out[3], pack_low(v0.w, v1.w), pack_high(v0.w, v1.w), weights);
      }
    }
  }

  template <class Policy>
  static __device__ void consume(const Args& a, const Tile& w, RingConsumer& ring, const Team& team, char*, char* scratch, int,
                                 Policy& policy) {
    const int lane = team.lane(), warp = team.warp(), g = lane / 4, t = lane % 4;
    policy.wait();
    // The new position's K and V go through scratch, and are folded last, as a stage of one position.
    char* fresh = scratch + kFreshOffset;
    const bool has_fresh = w.split == a.splits - 1;
    if (has_fresh && team.thread < 2 * kRowBytes / 16) {
      const int unit = team.thread % (kRowBytes / 16);
      const bf16* cache = team.thread < kRowBytes / 16 ? a.k_cache : a.v_cache;
      *reinterpret_cast<Vec16*>(fresh + team.thread * 16) =
          *reinterpret_cast<const Vec16*>(cache + w.cache + static_cast<size_t>(w.position) * kHeadDim + unit * 8);
    }
    State s;
    const bf16* q = a.q + w.query + g * kHeadDim + t * 8;
#pragma unroll
    for (int width = 0; width < kWidths; ++width)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        s.q[width][half] = g < w.num_heads ? *reinterpret_cast<const Vec16*>(q + width * 64 + half * 32) : Vec16{};
    team.sync();
#pragma unroll 1
    for (int chunk = w.first; chunk < w.last + has_fresh; ++chunk) {
      const char *k_row, *v_row;
      int offset, left;
      if (chunk < w.last) {
        const char* stage = ring.wait();
        k_row = stage + (g / 2 * kBlockRows + warp * kOctets * 2 + g % 2) * kRowBytes + t * 16;
        v_row = stage + kKeyBytes + t * kBlockPitch + warp * kOctets * 2 * kRowBytes + g * 16;
        offset = t * kBlockRows + warp * kOctets * 2;
        left = w.position - chunk * kPositions;
      } else {  // only position 0 of warp 0 counts
        k_row = fresh + t * 16;
        v_row = fresh + kRowBytes + g * 16;
        offset = warp + t;
        left = offset == 0 ? 1 : 0;
      }
      fold(s, a.scale_log2, lane, k_row, v_row, offset, left);
      if (chunk < w.last) ring.release(lane);
    }
    merge_warps(a, w, s, team, scratch);
  }

  // Scratch: 16 bytes for the arrival flag; the new position's K and V, with room for what its octets reach past them; maximum
  // and sum [warp][2][kHeads]; output [warp][heads_per_task][kHeadDim].
  static __device__ void merge_warps(const Args& a, const Tile& w, const State& s, const Team& team, char* scratch) {
    const int lane = team.lane(), warp = team.warp(), g = lane / 4, t = lane % 4;
    float* ml = reinterpret_cast<float*>(scratch + kMergeOffset);
    float* outs = ml + kTeamWarps * 2 * kHeads;
    const int out_stride = a.heads_per_task * kHeadDim;
    float sum = s.sum;
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    team.sync();  // the task before may still read the scratch
    if (t == 0) {
      ml[(warp * 2) * kHeads + g] = s.maximum;
      ml[(warp * 2 + 1) * kHeads + g] = sum;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * t + e >= w.num_heads) continue;
      float* out = outs + warp * out_stride + (2 * t + e) * kHeadDim + g * 8;
#pragma unroll
      for (int m = 0; m < kWidths * 4; ++m)
        *reinterpret_cast<float2*>(out + m / 4 * 64 + m % 4 * 2) = make_float2(s.out[m][e], s.out[m][2 + e]);
    }
    team.sync();
    float* partial = a.partial + static_cast<size_t>(w.task) * out_stride;
    float2* partial_ml = a.partial_ml + static_cast<size_t>(w.task) * a.heads_per_task;
#pragma unroll 1
    for (int i = team.thread; i < w.num_heads * kHeadDim; i += kTeamThreads) {
      const int head = i / kHeadDim;
      Merge merge;
#pragma unroll
      for (int v = 0; v < kTeamWarps; ++v)
        merge.add(ml[(v * 2) * kHeads + head], ml[(v * 2 + 1) * kHeads + head], outs[v * out_stride + i]);
      partial[i] = merge.out;
      if (i % kHeadDim == 0) partial_ml[head] = make_float2(merge.maximum, merge.sum);
    }
  }

  static __device__ u32* arrivals(const Args& a, const Tile& w) { return a.arrivals + w.output; }
  static __device__ int num_siblings(const Args& a) { return a.splits; }

  // Scratch: maxima, then sums [splits][heads_per_task], behind the arrival flag.
  static __device__ void merge(const Args& a, const Tile& w, const Team& team, char* scratch) {
    const int first = w.task - w.split, stride = a.heads_per_task * kHeadDim;
    float2* ml = reinterpret_cast<float2*>(scratch + 16);
    const float2* partial_ml = a.partial_ml + static_cast<size_t>(first) * a.heads_per_task;
    bf16* out = a.out + w.query;
    const float2* partial = reinterpret_cast<const float2*>(a.partial + static_cast<size_t>(first) * stride);
    const int pairs = w.num_heads * (kHeadDim / 2);
    // The first partials' loads are under way before anything waits for the maxima.
    float2 ahead[kMergeDepth];
    load_partials(ahead, partial, team.thread < pairs ? a.splits : 0, team.thread, stride / 2);
#pragma unroll 1
    for (int i = team.thread; i < a.splits * a.heads_per_task; i += kTeamThreads) ml[i] = partial_ml[i];
    team.sync();
#pragma unroll 1
    for (int pair = team.thread; pair < pairs; pair += kTeamThreads) {
      const float2* mine = ml + pair / (kHeadDim / 2);
      if (pair != team.thread) load_partials(ahead, partial, a.splits, pair, stride / 2);
      float top = -infinity();
#pragma unroll 4
      for (int s = 0; s < a.splits; ++s) top = fmaxf(top, mine[s * a.heads_per_task].x);
      float sum = 0.f;
      float2 y = make_float2(0.f, 0.f);
#pragma unroll
      for (int s = 0; s < kMergeDepth; ++s)
        if (s < a.splits) add_partial(y, sum, mine[s * a.heads_per_task], top, ahead[s]);
#pragma unroll 4
      for (int s = kMergeDepth; s < a.splits; ++s)
        add_partial(y, sum, mine[s * a.heads_per_task], top, partial[s * (stride / 2) + pair]);
      const float scale = __frcp_rn(sum);
      *reinterpret_cast<u32*>(out + 2 * pair) = pack_bf16(y.x * scale, y.y * scale);
    }
  }

 private:
  static constexpr int kMergeDepth = 8;

  static __device__ void load_partials(float2 (&to)[kMergeDepth], const float2* partial, int splits, int pair, int stride) {
#pragma unroll
    for (int s = 0; s < kMergeDepth; ++s)
      if (s < splits) to[s] = partial[s * stride + pair];
  }

  static __device__ void add_partial(float2& y, float& sum, float2 ml, float top, float2 partial) {
    const float weight = exp2_approx(ml.x - top);  // top is finite: some range holds the new position
    sum = fmaf(weight, ml.y, sum);
    y.x = fmaf(weight, partial.x, y.x);
    y.y = fmaf(weight, partial.y, y.y);
  }

  // The warps' partial softmaxes into one, in the order of add().
  struct Merge {
    float maximum = -infinity(), sum = 0.f, out = 0.f;
    __device__ void add(float other_maximum, float other_sum, float other_out) {
      const float top = fmaxf(maximum, other_maximum);
      const float base = top == -infinity() ? 0.f : top;
      const float keep = exp2_approx(maximum - base), weight = exp2_approx(other_maximum - base);
      sum = fmaf(sum, keep, weight * other_sum);
      out = fmaf(out, keep, weight * other_out);
      maximum = top;
    }
  };
};

}  // namespace cuk
