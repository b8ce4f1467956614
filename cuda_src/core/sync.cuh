// Everything about memory order between CTAs: no other file names a scope or an order.
//
// An edge between two kernels. griddepcontrol.wait returns once all prerequisite grids have completed and their writes are
// visible; a full edge (stream or graph order) gives the same before the kernel starts. launch_dependents orders nothing.
//
// Words that are their own flag (post, peek): how the tasks of one output hand their partial results to the last of them. A
// 64-bit word is empty while all its bits are set. One relaxed store fills it and one relaxed load finds it full, and nothing is
// read but what the word itself carries, so there is nothing for a release or an acquire to order: no fence, whose wait for
// everything in flight on the SM an atomic counter's acq_rel costs. 64 bits, because the PTX model treats a wider access as
// several. Who takes a word empties it; the next step's post to it is ordered after that by an edge between kernels. A word has
// one taker. Unless all tasks of an op run at once, only a task of a higher index waits for one of a lower, so tasks taken in order
// cannot wait in a circle.
//
// Words between two kernels (arrivals): what a kernel posts, all CTAs of the next one peek at, before the first has ended. The word proves
// itself, as above. It proves nothing else, so that nothing but words is read, and no other memory written, before
// griddepcontrol.wait. A word serves one edge of the program, once a step. The kernel after the reader empties it after its own wait,
// when every reader has ended, and the full edge between two steps stands between that and the next post and the next peek.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

constexpr u64 kEmptyWord = ~0ull;

__device__ __forceinline__ void post(u64* word, u64 content) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(content) : "memory");
}

// What the word holds now, perhaps nothing.
__device__ __forceinline__ u64 peek(const u64* word) {
  u64 content;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(content) : "l"(word) : "memory");
  return content;
}

// Two words side by side: a single access of two, which the model treats as one for each.
__device__ __forceinline__ Vec16 peek_two(const void* words) {
  u64 low, high;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(words) : "memory");
  return {static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)};
}
__device__ __forceinline__ bool both_full(const Vec16& words) {
  constexpr u32 kEmptyHalf = static_cast<u32>(kEmptyWord);
  return (words.x & words.y) != kEmptyHalf && (words.z & words.w) != kEmptyHalf;
}

// ---- counters, of a persistent run ----
// A task's signal: its four warps have met at a barrier, and one thread adds one. kRelease: what any of them wrote before that barrier is visible
// to whoever observes the count and reads after (the barrier orders the others before the release, which is cumulative). kRelaxed: nothing is;
// for studies of what the release costs.
enum class Ordering { kRelease, kRelaxed };

template <Ordering kOrdering>
__device__ __forceinline__ void signal(u32* counter) {
  if constexpr (kOrdering == Ordering::kRelease)
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  else
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
template <Ordering kOrdering>
__device__ __forceinline__ u32 observe(const u32* counter) {
  u32 count;
  if constexpr (kOrdering == Ordering::kRelease)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  else
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

}  // namespace cuk
