// In place of cuda_src/core/sync.cuh: all fibers run on one thread, so a word is an ordinary one.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

constexpr u64 kEmptyWord = ~0ull;

inline void post(u64* word, u64 content) {
  *word = content;
  emulator::event();
}
inline u64 peek(const u64* word) { return *word; }
inline Vec16 peek_two(const void* words) { return *static_cast<const Vec16*>(words); }
inline bool both_full(const Vec16& words) { return (words.x & words.y) != kFullMask && (words.z & words.w) != kFullMask; }

enum class Ordering { kRelease, kRelaxed };
template <Ordering kOrdering>
void signal(u32* counter) {
  ++*counter;
  emulator::event();
}
template <Ordering kOrdering>
u32 observe(const u32* counter) {
  return *counter;
}

}  // namespace cuk
