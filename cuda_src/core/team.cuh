// A team: four consumer warps that run one task, and the producer warp that fills their ring.
#pragma once

#include "core/sync.cuh"

namespace cuk {

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * kWarpSize;
constexpr int kThreadsPerTeam = kTeamThreads + kWarpSize;  // with its producer warp
constexpr int kMaxTeams = 6;                               // 960 threads, and named barriers to spare

struct Team {
  int index;   // in the CTA
  int thread;  // 0 … 127
  __device__ int warp() const { return thread / kWarpSize; }
  __device__ int lane() const { return thread % kWarpSize; }
  // Barrier 0 belongs to __syncthreads; team i takes barrier 2 + i.
  __device__ void sync() const { named_barrier_sync(2 + index, kTeamThreads); }
};

// The consumer threads of all the teams of a CTA, which stage an op's small operands together.
struct Crew {
  int thread;
  int num_threads;
  __device__ void sync() const { named_barrier_sync(1, num_threads); }
};

// True, for every thread of the team, in the team that arrives last of `count`. `flag` is one word of team scratch.
__device__ __forceinline__ bool last_arrival(const Team& team, u32* counter, int count, u32* flag) {
  team.sync();
  if (team.thread == 0) *flag = atomic_inc_wrap_acq_rel(counter, static_cast<u32>(count - 1)) == static_cast<u32>(count - 1);
  team.sync();
  return *flag != 0;
}

}  // namespace cuk
