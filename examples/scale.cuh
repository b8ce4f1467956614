// y[i] = factor * x[i].   x, y: [n] float.   8 bytes and one flop an element. One task: 1024 elements, 128 threads.
#pragma once

#include "core/ringless.cuh"

namespace example {

struct Scale : cuk::Ringless {
  static constexpr int kElements = 1024;

  struct Args {
    const float* x;
    float* y;
    int n;
    float factor;
  };

  template <class Policy>
  static __device__ void consume(const Args& a, int task, cuk::RingConsumer&, const cuk::Team& team, char*, char*, int,
                                 Policy&) {
    const int end = min(a.n, (task + 1) * kElements);
#pragma unroll 1
    for (int i = task * kElements + team.thread; i < end; i += cuk::kTeamThreads) a.y[i] = a.factor * a.x[i];
  }
};

}  // namespace example
