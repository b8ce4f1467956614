// When a CTA did what: its first consumer thread writes a time for each event. NoTrace compiles to nothing.
#pragma once

#include "core/ptx.cuh"

namespace cuk {

enum class Event { kStart, kWaited, kPrepared, kFirstTask, kEnd, kSm, kCount };

struct NoTrace {
  static constexpr bool kOn = false;
  __device__ void begin(bool) {}
  __device__ void mark(Event) const {}
};

// events: [CTAs, Event::kCount] of this op, nanoseconds of the global timer, and the SM's number.
struct Trace {
  static constexpr bool kOn = true;
  u64* events;
  bool mine = false;
  __device__ void begin(bool is_first_consumer) {
    mine = is_first_consumer;
    if (mine) events[static_cast<int>(blockIdx.x) * static_cast<int>(Event::kCount) + static_cast<int>(Event::kSm)] = sm_id();
    mark(Event::kStart);
  }
  __device__ void mark(Event event) const {
    if (mine)
      events[static_cast<int>(blockIdx.x) * static_cast<int>(Event::kCount) + static_cast<int>(event)] = global_nanoseconds();
  }
};

}  // namespace cuk
