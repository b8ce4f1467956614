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

}  // namespace cuk
