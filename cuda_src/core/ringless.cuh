// What a task inherits when it loads nothing through the ring and stages nothing for its CTA.
#pragma once

#include "core/ring.cuh"
#include "core/team.cuh"

namespace cuk {

struct Ringless {
  static constexpr bool kHasDependentLoads = false;
  using Tile = int;  // its index
  template <class Args>
  static __device__ Tile tile(const Args&, int task) {
    return task;
  }
  template <class Args>
  static __device__ int num_chunks(const Args&, int) {
    return 0;
  }
  template <class Args>
  static __device__ u32 chunk_bytes(const Args&, int, int) {
    return 0;
  }
  template <class Args>
  static __device__ void load_independent(const Args&, int, int, const Filling&) {}
  template <class Args>
  static __device__ void load_dependent(const Args&, int, int, const Filling&) {}
  template <class Args, class Policy>
  static __device__ void prepare(const Args&, const Crew&, const Team&, char*, char*, Policy& policy) {
    policy.wait();
  }
};

}  // namespace cuk
