// chosen[b] = a token drawn from the nucleus of row b, each as likely as its mass (core/draw.cuh): the first whose running sum, in the order
// of tokens, passes r * 2^-64 of the whole, r = 64 bits of Philox with key `seed` and counter (positions[b], b). Where scale[b] is 0, or no
// token has a mass, best[b].
// logits: [batch, vocab] float   best, positions, chosen: [batch]   scale, keep: [batch]   found: [batch, 2]   low: [batch, 2048]
// high: [batch, 2048], which is left 0.   One task: `segment` logits of one row; the last of a row's tasks takes the sums of the others and
// reads the segment that was hit again. 4 * vocab bytes a row.
#pragma once

#include "core/draw.cuh"
#include "core/ringless.cuh"

namespace cuk {

struct Sample : Ringless {
  static constexpr u64 kKeepAll = ~0ull;

  struct Args {
    const float* logits;
    const int* best;
    const float* scale;
    const u64 *keep, *found;
    const u32* low;
    const u64* seed;
    const int* positions;
    u64* high;
    u64* words;  // [batch, segments - 1]: a task's sum
    int* chosen;
    int vocab, segments, segment;
  };

  // Scratch: six words, then the sums of a row's segments.
  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer&, const Team& team, char*, char* scratch, int, Policy&) {
    const int row = task / a.segments, segment = task - row * a.segments, thread = static_cast<int>(team.thread);
    u64 *search = reinterpret_cast<u64*>(scratch), *sums = search + 6;
    const float scale = a.scale[row];
    const int best = a.best[row];
    const bool last = segment == a.segments - 1;
    if (!(scale > 0.f)) {
      if (last && thread == 0) a.chosen[row] = best;
      return;
    }
    u64* high = a.high + static_cast<size_t>(row) * kBins;
#pragma unroll 1
    for (int i = segment * kTeamThreads + thread; i < kBins; i += a.segments * kTeamThreads) high[i] = 0;

    u32 end_key = (1u << kKeyBits) - 1;  // of the nucleus
    if (a.keep[row] != kKeepAll) {
      const u32* low = a.low + static_cast<size_t>(row) * kBins;
      const u32 bin = static_cast<u32>(a.found[row * 2]) << kBinBits;
      const u64 rest = a.found[row * 2 + 1];
      const auto mass_at = [=](int i) { return static_cast<u64>(low[i]) * mass_of(bin + static_cast<u32>(i)); };
      end_key = bin + static_cast<u32>(crossing(kBins, mass_at, [=](u64) { return rest; }, team, search).index);
    }

    const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
    const float top = logits[best];
    const auto mass_in_nucleus = [=](int i) {
      const u32 key = key_of(logits[i], top, scale);
      return key <= end_key ? static_cast<u64>(mass_of(key)) : 0;
    };
    const int end = min(a.vocab, (segment + 1) * a.segment);
    u64 sum = 0;
#pragma unroll 4
    for (int i = segment * a.segment + thread; i < end; i += kTeamThreads) sum += mass_in_nucleus(i);
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    team.sync();  // the search may still read its scratch, or the task before the sums
    if (team.lane() == 0) search[team.warp()] = sum;
    team.sync();
    sum = search[0] + search[1] + search[2] + search[3];
    u64* words = a.words + static_cast<size_t>(row) * (a.segments - 1);
    if (!last) {
      if (thread == 0) post(words + segment, sum);
      return;
    }
    if (thread == 0) sums[segment] = sum;
#pragma unroll 1
    for (int i = thread; i < segment; i += kTeamThreads) {
      Inbox<1> inbox{words + i, 1, 0};
      inbox.peek();
      inbox.take();
      sums[i] = inbox.content[0];
    }
    team.sync();
    const u64 bits = random_bits(*a.seed, static_cast<u32>(a.positions[row]), static_cast<u32>(row));
    u64 target = 0, whole = 0;
    const Crossing hit = crossing(
        a.segments, [=](int i) { return sums[i]; },
        [&](u64 total) {
          whole = total;
          target = share_of(total, bits);
          return target;
        },
        team, search);
    const int first = hit.index * a.segment, count = min(a.segment, a.vocab - first);
    const u64 rest = target - hit.before;
    const Crossing token =
        crossing(count, [=](int i) { return mass_in_nucleus(first + i); }, [=](u64) { return rest; }, team, search);
    if (thread == 0) a.chosen[row] = whole == 0 ? best : first + token.index;
  }
};

}  // namespace cuk
