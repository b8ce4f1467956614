// Draws that every run makes alike: probabilities as integers, whose sums have no order, and random bits by counter.
//
// A logit's key is how far it lies below the row's largest, in steps of 2^-17 of a factor of two; its mass is 2^31 * 2^-(key * 2^-17), an
// integer made by integer arithmetic alone. From logits of the same bits come the same draws, on a GPU and in NumPy (cuk/tasks/nucleus.py).
#pragma once

#include "core/team.cuh"

namespace cuk {

constexpr int kOctaveBits = 17, kBinBits = 11, kKeyBits = 2 * kBinBits;  // 32 factors of two: what is less likely has no mass
constexpr int kBins = 1 << kBinBits;
constexpr u32 kNoKey = ~0u;

// 2^-t on [0, 1), alternating signs, times 2^31: interpolation at Chebyshev's points, error 1.2e-8.
__device__ __forceinline__ u32 mass_of(u32 key) {
  constexpr u32 kTerms[] = {246789u, 2773769u, 20609476u, 119183688u, 515881603u, 1488522224u, 2147483648u};
  const u32 t = key & ((1u << kOctaveBits) - 1);
  u32 value = kTerms[0];
#pragma unroll
  for (int i = 1; i < 7; ++i) value = kTerms[i] - static_cast<u32>(static_cast<u64>(value) * t >> kOctaveBits);
  return value >> (key >> kOctaveBits);
}

// scale: 2^17 log2(e) / temperature. kNoKey for what has no mass: too far below `top`, or a NaN.
__device__ __forceinline__ u32 key_of(float logit, float top, float scale) {
  const float distance = (top - logit) * scale;
  return distance < static_cast<float>(1 << kKeyBits) ? static_cast<u32>(distance) : kNoKey;
}

// Where the running sum of masses 0 … count - 1 passes `target`: the first index whose sum, itself included, is above it, and the sum before
// it. Without such an index, the last one, and everything.
struct Crossing {
  int index;
  u64 before;
};

// get(i): mass i. target_of(total): the target. All threads of a team; scratch: 6 words.
template <class Get, class Target>
__device__ Crossing crossing(int count, Get get, Target target_of, const Team& team, u64* scratch) {
  const int each = ceil_div(count, kTeamThreads), first = min(count, static_cast<int>(team.thread) * each),
            last = min(count, first + each);
  u64 mine = 0;
#pragma unroll 4
  for (int i = first; i < last; ++i) mine += get(i);
  u64 up_to = mine;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const u64 below = __shfl_up_sync(kFullMask, up_to, step);
    if (team.lane() >= step) up_to += below;
  }
  team.sync();  // the search before may still read the scratch
  if (team.lane() == kWarpSize - 1) scratch[team.warp()] = up_to;
  team.sync();
  u64 total = 0, before = up_to - mine;
#pragma unroll
  for (int warp = 0; warp < kTeamWarps; ++warp) {
    if (warp < team.warp()) before += scratch[warp];
    total += scratch[warp];
  }
  const u64 target = target_of(total);
  if (target >= total && team.thread == 0) {
    scratch[4] = static_cast<u64>(count - 1);
    scratch[5] = total;
  }
  if (before <= target && target < before + mine) {
    int i = first;
#pragma unroll 1
    for (; i < last; ++i) {
      const u64 here = get(i);
      if (target < before + here) break;
      before += here;
    }
    scratch[4] = static_cast<u64>(i);
    scratch[5] = before;
  }
  team.sync();
  return {static_cast<int>(scratch[4]), scratch[5]};
}

// floor(total * share / 2^64): below the total.
__device__ __forceinline__ u64 share_of(u64 total, u64 share) { return __umul64hi(total, share); }

// 64 random bits of a counter: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011).
__device__ __forceinline__ u64 random_bits(u64 seed, u32 c0, u32 c1) {
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = static_cast<u64>(c0) * 0xD2511F53u, b = static_cast<u64>(c2) * 0xCD9E8D57u;
    const u32 x0 = static_cast<u32>(b >> 32) ^ c1 ^ k0, x2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<u32>(b);
    c3 = static_cast<u32>(a);
    c0 = x0;
    c2 = x2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<u64>(c1) << 32 | c0;
}

}  // namespace cuk
