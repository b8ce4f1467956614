// The nucleus of a row: the most probable tokens, as few as have `keep` * 2^-64 of the mass (core/draw.cuh), those as probable as the last
// of them included. Two ops find its last key, eleven bits each:
//   high: high[b, bin] += the mass of the keys whose upper bits are `bin`;  low = 0
//   low:  found[b] = (bin, rest): where the running sum of high[b] passes keep's share, and how far into the bin;
//         low[b, i] += the number of tokens with key (bin, i)
// logits: [batch, vocab] float   best: [batch], an index of each row's largest   scale: [batch], 0: nothing is drawn   keep: [batch]
// high, low: [batch, 2048]   found: [batch, 2].   One task: `segment` logits of one row. 4 * vocab bytes and about 20 * vocab integer
// operations a row and op. Sums of integers by atomics: their order does not matter.
#pragma once

#include "core/draw.cuh"
#include "core/ringless.cuh"

namespace cuk {

template <bool kLow>
struct Nucleus : Ringless {
  static constexpr u64 kKeepAll = ~0ull;

  struct Args {
    const float* logits;
    const int* best;
    const float* scale;
    const u64* keep;
    u64* high;
    u32* low;
    u64* found;
    int vocab, segments, segment;
  };

  // Scratch: the task's own bins, two of 32 bits each or one, then six words.
  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer&, const Team& team, char*, char* scratch, int, Policy&) {
    const int row = task / a.segments, segment = task - row * a.segments, thread = static_cast<int>(team.thread);
    u32* low = a.low + static_cast<size_t>(row) * kBins;
    u64* high = a.high + static_cast<size_t>(row) * kBins;
    if (!kLow)
#pragma unroll 1
      for (int i = segment * kTeamThreads + thread; i < kBins; i += a.segments * kTeamThreads) low[i] = 0;
    const float scale = a.scale[row];
    const u64 keep = a.keep[row];
    const bool drawn = scale > 0.f && keep != kKeepAll;
    u32 wanted = 0;
    if (kLow) {
      Crossing bin{kBins - 1, 0};
      u64 rest = 0;
      if (drawn)
        bin = crossing(
            kBins, [=](int i) { return high[i]; },
            [&](u64 total) {
              rest = share_of(total, keep);
              return rest;
            },
            team, reinterpret_cast<u64*>(scratch + kBins * 8));
      wanted = static_cast<u32>(bin.index);
      if (segment == 0 && thread == 0) {
        a.found[row * 2] = wanted;
        a.found[row * 2 + 1] = rest - bin.before;
      }
    }
    if (!drawn) return;

    u32* bins = reinterpret_cast<u32*>(scratch);
    team.sync();  // the task before may still read its bins
#pragma unroll 4
    for (int i = thread; i < (kLow ? 1 : 2) * kBins; i += kTeamThreads) bins[i] = 0;
    team.sync();
    const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
    const float top = logits[a.best[row]];
    const int end = min(a.vocab, (segment + 1) * a.segment);
#pragma unroll 4
    for (int i = segment * a.segment + thread; i < end; i += kTeamThreads) {
      const u32 key = key_of(logits[i], top, scale);
      if (key == kNoKey) continue;
      if (kLow) {
        if (key >> kBinBits == wanted) atomicAdd(bins + (key & (kBins - 1)), 1u);
      } else {  // in halves: shared memory adds 32 bits at once, 64 only by comparing and swapping
        const u32 mass = mass_of(key);
        atomicAdd(bins + (key >> kBinBits), mass & 0xffff);
        atomicAdd(bins + kBins + (key >> kBinBits), mass >> 16);
      }
    }
    team.sync();
#pragma unroll 4
    for (int i = thread; i < kBins; i += kTeamThreads) {
      if (kLow) {
        if (bins[i]) atomicAdd(low + i, bins[i]);
      } else {
        const u64 mass = bins[i] + (static_cast<u64>(bins[kBins + i]) << 16);
        if (mass) atomicAdd(high + i, mass);
      }
    }
  }
};

}  // namespace cuk
