// next[b] = the lowest i with logits[b, i] = max_j logits[b, j].   logits: [batch, vocab] float   next: [batch].   4 * vocab bytes a row.
// One task: 1024 logits of one row; the last of a row's tasks takes the winners of the others. NaN never wins;
// a row of nothing but NaN or -inf gives 0.
#pragma once

#include "core/ringless.cuh"

namespace cuk {

struct Argmax : Ringless {
  static constexpr int kSegment = 1024;

  struct Args {
    const float* logits;
    u64* words;  // [batch, segments - 1]: a task's winner and its index
    int* next;
    int vocab, segments;
  };

  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer&, const Team& team, char*, char* scratch, int, Policy&) {
    const int row = task / a.segments, first = (task - row * a.segments) * kSegment;
    const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
    const int end = min(first + kSegment, a.vocab);
    float best = -infinity();
    int index = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < kSegment / kTeamThreads; ++i) {
      const int at = first + i * kTeamThreads + team.thread;
      if (at < end) take(best, index, logits[at], at);
    }
    reduce(best, index, team, scratch);
    const int segment = task - row * a.segments;
    u64* words = a.words + static_cast<size_t>(row) * (a.segments - 1);
    if (segment < a.segments - 1) {
      if (team.thread == 0) post(words + segment, word_of(__float_as_uint(best), static_cast<u32>(index)));
      return;
    }
#pragma unroll 1
    for (int i = team.thread; i < a.segments - 1; i += kTeamThreads) {
      Inbox<1> winner{words + i, 1, 0};
      winner.peek();
      winner.take();
      take(best, index, __uint_as_float(static_cast<u32>(winner.content[0])), static_cast<int>(winner.content[0] >> 32));
    }
    reduce(best, index, team, scratch);
    if (team.thread == 0) a.next[row] = index == 0x7fffffff ? 0 : index;
  }

 private:
  static __device__ void take(float& best, int& index, float value, int at) {
    if (value > best || (value == best && at < index)) {
      best = value;
      index = at;
    }
  }
  // The winner of the team, in every thread of warp 0. A total order decides, so the shape of the tree does not matter.
  static __device__ void reduce(float& best, int& index, const Team& team, char* scratch) {
    float* values = reinterpret_cast<float*>(scratch);
    int* indices = reinterpret_cast<int*>(scratch + 16);
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2)
      take(best, index, __shfl_xor_sync(kFullMask, best, step), __shfl_xor_sync(kFullMask, index, step));
    team.sync();
    if (team.lane() == 0) {
      values[team.warp()] = best;
      indices[team.warp()] = index;
    }
    team.sync();
#pragma unroll
    for (int i = 0; i < kTeamWarps; ++i) take(best, index, values[i], indices[i]);
  }
};

}  // namespace cuk
