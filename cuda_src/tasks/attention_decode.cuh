// out[b, h, :] = softmax(q[b, h, :] . K[b, h / group, :p + 1, :] / sqrt(kHeadDim)) @ V[b, h / group, :p + 1, :],  p = positions[b].
// q, out: [batch, kv_heads * group * kHeadDim] bf16   k_cache, v_cache: [batch, kv_heads, capacity, kHeadDim] bf16.
// One task: up to eight query heads of one KV head over one of `splits` ranges of the context (flash decoding).
// 4 * kHeadDim bytes and 4 * group * kHeadDim flops a position.
//
// With kMerge, each range's result is posted, pair of columns by pair, and whoever merges a pair takes it from all ranges: every
// sibling its share of the pairs where all tasks run at once, else the last sibling all of them. Without, each range leaves its own
// normalised output and the logarithm of its sum, for the next op to merge (tasks/merge_linear.cuh).
//
// The p old positions come through the ring, without waiting for any kernel of this step: they were written in earlier steps.
// The new position, which this step's Qkv appends, is read from global memory after the wait, by the last range's task, where it
// counts as a fifth warp's: its score is that warp's maximum, its V that warp's output.
//
// A ring stage holds kPositions positions of K, in one piece, then of V as four blocks of rows padded by 32 bytes: column pair t of the
// score tile is two rows of block t, which makes the transposed reads of V free of bank conflicts. (Padding K the same way would not
// spare it its two-way conflict, and each copy costs its issuer about 100 cycles.) Each warp keeps its own running maximum, sum and
// output over two rows of each block; the warps merge in index order at the end of the task.
#pragma once

#include "core/ring.cuh"
#include "core/team.cuh"

namespace cuk {

template <int kHeadDim, bool kMerge>
struct AttentionDecode {
  static_assert(kHeadDim == 64 || kHeadDim == 128, "a lane reads 16 bytes of 64 or 128 columns");
  static constexpr bool kHasDependentLoads = false;
  static constexpr bool kStagesByChunk = false;
  static constexpr int kHeads = 8;                       // of one task, at most
  static constexpr int kPositions = 64 * 64 / kHeadDim;  // of one stage
  static constexpr int kBlockRows = kPositions / 4;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kKeyBytes = kPositions * kRowBytes;
  static constexpr int kBlockPitch = kBlockRows * kRowBytes + 32;  // of V
  static constexpr int kOctets = kPositions / 32;                  // groups of eight positions that a warp takes from a stage
  static constexpr int kWidths = kHeadDim / 64;
  static constexpr int kWays = kTeamWarps + 1;  // the warps, and the new position
  static constexpr int kPairs = kHeadDim / 2;

  struct Args {
    const bf16 *q, *k_cache, *v_cache;
    const int* positions;
    u64* words;  // [batch, kv_heads, head_blocks, heads_per_task * kPairs, splits, 2]: two columns; the head's maximum and sum
    bf16* out;
    bf16* partials;  // [batch, splits, kv_heads * group * kHeadDim]
    float* lse;      // [batch, kv_heads * group, splits]: log2 of the sum of 2^score, -infinity for an empty range
    int kv_heads, group, heads_per_task, capacity, splits;
    int lanes;         // that merge a pair: a power of two, splits or more of them up to 32
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
    Vec16 q[kWidths][2] =
        {};  // elements 2, 3 and 4, 5 of each eight exchanged: one product takes the first and last two, one the others
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
          mma_k16(even, q.x, q.y, q.z, q.w, k.x, k.y);
          mma_k16(odd, q.x, q.y, q.z, q.w, k.z, k.w);
        }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        score[o][e] = valid(o, e) ? (even[e] + odd[2 + e]) * scale_log2 : -infinity();
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
    const bool is_last = w.split == a.splits - 1;
    team.sync();  // the task before may still read the scratch
    const Fresh fresh = take_fresh(a, w, team, scratch, policy);
    State s;
    const bf16* q = fresh.q + g * kHeadDim + t * 8;
#pragma unroll
    for (int width = 0; width < kWidths; ++width)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (g < w.num_heads) {
          const Vec16 v = *reinterpret_cast<const Vec16*>(q + width * 64 + half * 32);
          s.q[width][half] = Vec16{v.x, v.z, v.y, v.w};
        }
    u32 new_v = 0;  // the columns of V that this thread will merge
    if (is_last) {
      new_v = *reinterpret_cast<const u32*>(fresh.v + team.thread % kPairs * 2);
      score_new(a, w, fresh, team, scratch);
    }
#pragma unroll 1
    for (int chunk = w.first; chunk < w.last; ++chunk) {
      const char* stage = ring.wait();
      fold(s, a.scale_log2, lane, stage + (g / 2 * kBlockRows + warp * kOctets * 2 + g % 2) * kRowBytes + t * 16,
           stage + kKeyBytes + t * kBlockPitch + warp * kOctets * 2 * kRowBytes + g * 16, t * kBlockRows + warp * kOctets * 2,
           w.position - chunk * kPositions);
      ring.release(lane);
    }
    float* ml = reinterpret_cast<float*>(scratch);
    float* outs = ml + kWays * 2 * kHeads;
    float sum = s.sum;
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    if (t == 0) {
      ml[warp * 2 * kHeads + g] = s.maximum;
      ml[(warp * 2 + 1) * kHeads + g] = sum;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * t + e >= w.num_heads) continue;
      float* out = outs + (warp * a.heads_per_task + 2 * t + e) * kHeadDim + g * 8;
#pragma unroll
      for (int m = 0; m < kWidths * 4; ++m)
        *reinterpret_cast<float2*>(out + m / 4 * 64 + m % 4 * 2) = make_float2(s.out[m][e], s.out[m][2 + e]);
    }
    team.sync();
    if constexpr (kMerge)
      merge(a, w, new_v, team, scratch, policy.together());
    else
      store_range(a, w, new_v, team, scratch, policy);
  }

 private:
  // What the kernel before made for this task: the rows of its heads of q; of its KV head's k and v, for the last range, the new position's.
  struct Fresh {
    const bf16 *q, *k, *v;
  };
  template <class Policy>
  static __device__ Fresh take_fresh(const Args& a, const Tile& w, const Team& team, char* scratch, Policy& policy) {
    if constexpr (!Policy::kPolls) {
      policy.wait();
      const size_t row = w.cache + static_cast<size_t>(w.position) * kHeadDim;
      return {a.q + w.query, a.k_cache + row, a.v_cache + row};
    } else {
      // As words: [batch, heads of q, of k, of v, kHeadDim]. They go to the end of the scratch, where all warps find them.
      constexpr int kUnits = kHeadDim / 8, kRounds = (kHeads + 2) * kUnits / kTeamThreads + 1;
      const int width = a.kv_heads * a.group * kHeadDim, kv_width = a.kv_heads * kHeadDim, b = w.query / width;
      const int column = w.query - b * width, kv_column = column / (a.group * kHeadDim) * kHeadDim;
      const bf16* row = policy.arrivals() + static_cast<size_t>(b) * (width + 2 * kv_width);
      const int heads = w.num_heads, all = (w.split == a.splits - 1 ? heads + 2 : heads) * kUnits;
      bf16* taken = reinterpret_cast<bf16*>(scratch) + 2 * (kWays * 2 * kHeads + kTeamWarps * a.heads_per_task * kHeadDim);
      const auto source = [&](int unit) {
        const int head = unit / kUnits, from = head < heads    ? column + head * kHeadDim
                                               : head == heads ? width + kv_column
                                                               : width + kv_width + kv_column;
        return row + from + unit % kUnits * 8;
      };
      Vec16 v[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int unit = team.thread + i * kTeamThreads;
        if (unit < all) v[i] = peek_two(source(unit));
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int unit = team.thread + i * kTeamThreads;
        take_two(v[i], source(unit), unit < all);
        if (unit < all) *reinterpret_cast<Vec16*>(taken + unit * 8) = v[i];
      }
      team.sync();
      return {taken, taken + heads * kHeadDim, taken + (heads + 1) * kHeadDim};
    }
  }

  // Scratch: maximum and sum [way][2][kHeads]; outputs [warp][heads_per_task][kHeadDim].
  struct Partial {
    float maximum = -infinity(), sum = 0.f;
    float2 out{0.f, 0.f};  // of one pair of columns
    __device__ void add(float weight, float other_sum, float2 other_out) {
      sum = fmaf(weight, other_sum, sum);
      out.x = fmaf(weight, other_out.x, out.x);
      out.y = fmaf(weight, other_out.y, out.y);
    }
    __device__ void scale_to(float top) {
      const float weight = weight_of(maximum, top);
      maximum = top;
      sum *= weight;
      out.x *= weight;
      out.y *= weight;
    }
    __device__ u32 normalised() const {
      const float scale = __frcp_rn(sum);
      return pack_bf16(out.x * scale, out.y * scale);
    }
  };
  // What counted nothing has maximum -inf and weight 0, also where nothing has counted.
  static __device__ float weight_of(float maximum, float top) {
    return exp2_approx(maximum - (top == -infinity() ? 0.f : top));
  }

  // The new position's scores, a warp taking every fourth head.
  static __device__ void score_new(const Args& a, const Tile& w, const Fresh& fresh, const Team& team, char* scratch) {
    constexpr int kWords = kHeadDim / 64;  // of two columns, a lane
    float* ml = reinterpret_cast<float*>(scratch) + kTeamWarps * 2 * kHeads;
    const int lane = team.lane();
#pragma unroll
    for (int i = 0; i < kHeads / kTeamWarps; ++i) {
      const int head = team.warp() + i * kTeamWarps;
      if (head >= w.num_heads) break;
      float score = 0.f;
#pragma unroll
      for (int c = 0; c < kWords; ++c) {
        const int at = (c * kWarpSize + lane) * 2;
        const u32 q_pair = *reinterpret_cast<const u32*>(fresh.q + head * kHeadDim + at);
        const u32 k_pair = *reinterpret_cast<const u32*>(fresh.k + at);
        score = fmaf(low_to_float(q_pair), low_to_float(k_pair), score);
        score = fmaf(high_to_float(q_pair), high_to_float(k_pair), score);
      }
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) score += __shfl_xor_sync(kFullMask, score, step);
      if (lane == 0) {
        ml[head] = score * a.scale_log2;
        ml[kHeads + head] = 1.f;
      }
    }
  }

  // This task's range of one pair of columns: the ways in index order.
  static __device__ Partial merge_ways(const Args& a, int pair, int ways, u32 new_v, const char* scratch) {
    const float* ml = reinterpret_cast<const float*>(scratch) + pair / kPairs;
    const float* outs = reinterpret_cast<const float*>(scratch) + kWays * 2 * kHeads + pair * 2;
    float maxima[kWays];
    Partial merged;
#pragma unroll
    for (int way = 0; way < kWays; ++way) {
      maxima[way] = way < ways ? ml[way * 2 * kHeads] : -infinity();
      merged.maximum = fmaxf(merged.maximum, maxima[way]);
    }
#pragma unroll
    for (int way = 0; way < kWays; ++way) {
      if (way >= ways) break;
      const float2 out = way < kTeamWarps ? *reinterpret_cast<const float2*>(outs + way * a.heads_per_task * kHeadDim)
                                          : make_float2(low_to_float(new_v), high_to_float(new_v));
      merged.add(weight_of(maxima[way], merged.maximum), ml[(way * 2 + 1) * kHeads], out);
    }
    return merged;
  }

  template <class Policy>
  static __device__ void store_range(const Args& a, const Tile& w, u32 new_v, const Team& team, const char* scratch,
                                     Policy& policy) {
    const int pairs = w.num_heads * kPairs, ways = w.split == a.splits - 1 ? kWays : kTeamWarps;
    const int width = a.kv_heads * a.group * kHeadDim, b = w.query / width, column = w.query - b * width;
    u32* out = reinterpret_cast<u32*>(a.partials + (static_cast<size_t>(b) * a.splits + w.split) * width + column);
    float* lse = a.lse + static_cast<size_t>(w.query / kHeadDim) * a.splits + w.split;
    if constexpr (Policy::kPolls) policy.wait();
#pragma unroll 1
    for (int pair = team.thread; pair < pairs; pair += kTeamThreads) {
      const Partial mine = merge_ways(a, pair, ways, new_v, scratch);
      out[pair] = mine.sum == 0.f ? 0u : mine.normalised();
      if (pair % kPairs == 0) lse[pair / kPairs * a.splits] = mine.maximum + log2_approx(mine.sum);
    }
  }

  // Posts this task's range, then merges its share of the pairs over all ranges.
  static __device__ void merge(const Args& a, const Tile& w, u32 new_v, const Team& team, const char* scratch, bool together) {
    const int pairs = w.num_heads * kPairs, ways = w.split == a.splits - 1 ? kWays : kTeamWarps;
    u32* out = reinterpret_cast<u32*>(a.out + w.query);
    u64* words = a.words + static_cast<size_t>(w.output) * (a.heads_per_task * kPairs * 2) * a.splits;
#pragma unroll 1
    for (int pair = team.thread; pair < pairs; pair += kTeamThreads) {
      const Partial mine = merge_ways(a, pair, ways, new_v, scratch);
      if (a.splits == 1) {
        out[pair] = mine.normalised();
        continue;
      }
      u64* to = words + (pair * a.splits + w.split) * 2;
      post(to, word_of(mine.out.x, mine.out.y));
      post(to + 1, word_of(mine.maximum, mine.sum));
    }
    const int readers = together ? a.splits : 1, reader = w.split - (a.splits - readers);
    if (a.splits == 1 || reader < 0) return;
    const int each = ceil_div(pairs, readers), end = min(pairs, (reader + 1) * each);
    const int lane = team.thread % a.lanes;
#pragma unroll 1
    for (int first = reader * each; first < end; first += kTeamThreads / a.lanes) {
      const int pair = first + team.thread / a.lanes;
      Partial all;
#pragma unroll 1
      for (int split = lane; split < a.splits && pair < end; split += a.lanes) {
        Inbox<2> inbox{words + (pair * a.splits + split) * 2, 2, 1};
        inbox.peek();
        inbox.take();
        const float2 ml = floats_of(inbox.content[1]);
        all.scale_to(fmaxf(all.maximum, ml.x));
        all.add(weight_of(ml.x, all.maximum), ml.y, floats_of(inbox.content[0]));
      }
      float top = all.maximum;
#pragma unroll 1
      for (int step = a.lanes / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
      all.scale_to(top);
#pragma unroll 1
      for (int step = a.lanes / 2; step > 0; step /= 2) {
        all.sum += __shfl_xor_sync(kFullMask, all.sum, step);
        all.out.x += __shfl_xor_sync(kFullMask, all.out.x, step);
        all.out.y += __shfl_xor_sync(kFullMask, all.out.y, step);
      }
      if (lane == 0 && pair < end) out[pair] = all.normalised();
    }
  }
};

}  // namespace cuk
