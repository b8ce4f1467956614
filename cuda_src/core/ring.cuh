// The ring: a FIFO of shared-memory stages between one producer warp and one team, running on across tasks.
//
// Each stage has two mbarriers. `full` completes when the producer has announced the stage's bytes and they have landed;
// `empty` completes when the team's four warps have given the stage back. Each side is one agent that takes the stages in
// order, so a waiter is never more than one phase behind and the parity test is sound for any number of stages.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

struct Ring {
  char* stages;
  u64* full;
  u64* empty;
  int num_stages;
  int stage_bytes;

  __device__ void init(int num_consumer_warps) {
#pragma unroll 1  // code that runs once only pushes other code out of the instruction caches
    for (int i = 0; i < num_stages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], num_consumer_warps);
    }
  }
};

// Where one side of the ring stands.
struct RingCursor {
  int stage = 0;
  u32 phase = 0;
  __device__ void advance(int num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct RingConsumer {
  const Ring& ring;
  RingCursor at;

  __device__ const char* wait() {
    mbarrier_wait(&ring.full[at.stage], at.phase);
    return ring.stages + at.stage * ring.stage_bytes;
  }
  // Called by every lane of a warp that has read all that it needs of the stage.
  __device__ void release(int lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.empty[at.stage]);
    at.advance(ring.num_stages);
  }
};

// One stage being filled, by one lane: a task adds its copies through this.
struct Filling {
  char* stage;
  u64* full;
  u64 policy;  // evict_first_policy(), made once
  __device__ void copy(int offset, const void* source, u32 bytes) const { bulk_load(stage + offset, source, bytes, full); }
  __device__ void tile(const TensorMap* map, int c1, int c2, int c3, int c4) const {
    tensor_load(stage, map, 0, c1, c2, c3, c4, full, policy);
  }
};

struct RingProducer {
  const Ring& ring;
  RingCursor at;
  u64 policy = evict_first_policy();

  // The stage that comes next. The whole producer warp waits for it to be free.
  __device__ void wait() { mbarrier_wait(&ring.empty[at.stage], at.phase ^ 1); }
  __device__ Filling here() const { return {ring.stages + at.stage * ring.stage_bytes, &ring.full[at.stage], policy}; }
  // By the lane that fills: the bytes that will come.
  __device__ void announce(u32 bytes) const { mbarrier_arrive_expect_tx(&ring.full[at.stage], bytes); }
  __device__ void advance() { at.advance(ring.num_stages); }
};

}  // namespace cuk
