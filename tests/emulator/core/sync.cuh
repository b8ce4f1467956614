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
}  // namespace cuk
