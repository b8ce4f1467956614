// A team: four consumer warps that run one task, and the producer warp that fills their ring.
#pragma once

#include "core/sync.cuh"

namespace cuk {

// Of sizes, which are not negative: unsigned, a division by a power of two is a shift.
__host__ __device__ constexpr int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<u32>(a) + static_cast<u32>(b) - 1) / static_cast<u32>(b));
}
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * kWarpSize;
constexpr int kThreadsPerTeam = kTeamThreads + kWarpSize;  // with its producer warp
constexpr int kMaxTeams = 6;                               // 960 threads, and named barriers to spare

struct Team {
  int index;   // in the CTA
  u32 thread;  // 0 … 127
  __device__ int warp() const { return static_cast<int>(thread / kWarpSize); }
  __device__ int lane() const { return static_cast<int>(thread % kWarpSize); }
  // Barrier 0 is the whole CTA's, 1 that of a crew of several teams; team i takes barrier 2 + i.
  __device__ int barrier() const { return 2 + index; }
  __device__ void sync() const { named_barrier_sync(barrier(), kTeamThreads); }
};

// The consumer threads that stage an op's small operands together: those of all the teams of a CTA, or of one.
struct Crew {
  int thread;
  int num_threads;
  int barrier = 1;
  __device__ void sync() const { named_barrier_sync(barrier, num_threads); }
};

// Two values in a word that can be posted: never the empty one.
__device__ __forceinline__ u64 word_of(u32 low, u32 high) {
  const u64 word = static_cast<u64>(high) << 32 | low;
  return word == kEmptyWord ? word ^ 0x80000000u : word;  // one NaN for another
}
__device__ __forceinline__ u64 word_of(float low, float high) { return word_of(__float_as_uint(low), __float_as_uint(high)); }
__device__ __forceinline__ float2 floats_of(u64 word) {
  return make_float2(__uint_as_float(static_cast<u32>(word)), __uint_as_float(static_cast<u32>(word >> 32)));
}

// Four neighbouring columns of a row, held by threads 4 i … 4 i + 3 of a warp, all of whose threads call: as a word to the next op, posted by
// the first of the four. `at`: the element. All bits set is no bf16 that was rounded from a float.
template <class Policy>
__device__ __forceinline__ void post_columns(const Policy& policy, bf16 element, int at, bool active) {
  const int bits = element.bits;
  const u32 pair = static_cast<u32>(bits | __shfl_xor_sync(kFullMask, bits, 1) << 16);
  const u32 next = static_cast<u32>(__shfl_xor_sync(kFullMask, static_cast<int>(pair), 2));
  if (active && (at & 3) == 0) policy.post(at / 4, static_cast<u64>(next) << 32 | pair);
}

// Waits for what a first look did not find, in each lane of a warp that wants it: full() tells, peek() looks again. The lowest lane that misses
// something looks alone until it has it, then once all that miss something: 32 lanes of every warp of every SM asking for the same lines
// would take a good part of L2's bandwidth.
template <class Full, class Peek>
__device__ __forceinline__ void await(bool wanted, const Full& full, const Peek& peek) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int leader = kWarpSize;
#pragma unroll 1
  for (Patience patience;; patience.check()) {
    const u32 missing = __ballot_sync(kFullMask, wanted && !full());
    if (missing == 0) return;
    const bool all = leader < kWarpSize && (missing >> leader & 1) == 0;
    leader = __ffs(missing) - 1;
    if (lane == leader || (all && (missing >> lane & 1) != 0)) peek();
  }
}
// Two words from the op before, of which `words` is what a first look gave.
__device__ __forceinline__ void take_two(Vec16& words, const void* from, bool wanted) {
  await(wanted, [&] { return both_full(words); }, [&] { words = peek_two(from); });
}

// Words on their way to one thread: `count` of them, at most kCount, `stride` apart. peek() asks for what has come by now, take() waits
// for the rest and leaves the words empty.
template <int kCount>
struct Inbox {
  u64* words;
  int count, stride;
  u64 content[kCount];

  __device__ __forceinline__ void peek() {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < count) content[i] = cuk::peek(words + i * stride);
  }
  __device__ __forceinline__ void take() {
    for (Patience patience; !full(); patience.check()) peek();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < count) post(words + i * stride, kEmptyWord);
  }

 private:
  __device__ __forceinline__ bool full() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) all = all && (i >= count || content[i] != kEmptyWord);
    return all;
  }
};

}  // namespace cuk
