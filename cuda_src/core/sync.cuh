// Everything about memory order between CTAs: no other file names a scope or an order.
//
// An edge between two kernels. griddepcontrol.wait returns once all prerequisite grids have completed and their writes are
// visible; a full edge (stream or graph order) gives the same before the kernel starts. launch_dependents orders nothing.
//
// Arrival of sibling tasks (last_arrival). Every thread of a team stores its partial result, then the team's barrier orders
// those stores before thread 0's atomic (bar.sync is morally strong at CTA scope, and causality order is transitive). The
// atomic is acq_rel at GPU scope: its release half publishes the team's stores, its acquire half makes visible the stores
// of every team that arrived before in the counter's modification order (each an RMW, hence one release sequence).
// The second barrier hands that on to the rest of the last team. The counter wraps to zero on the last arrival, so no
// launch resets it: the next step's first arrival is ordered after it by the edge between the kernels.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

__device__ __forceinline__ u32 atomic_inc_wrap_acq_rel(u32* counter, u32 last) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
  return old;
}

}  // namespace cuk
