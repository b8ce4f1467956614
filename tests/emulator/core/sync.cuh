// In place of cuda_src/core/sync.cuh: CTAs run one after another here, so an atomic is a read and a write.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

inline u32 atomic_inc_wrap_acq_rel(u32* counter, u32 last) {
  const u32 old = *counter;
  *counter = old >= last ? 0 : old + 1;
  return old;
}

}  // namespace cuk
