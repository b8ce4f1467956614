// x[b, :] = table[tokens[b], :].   table: [vocab, hidden] bf16   tokens: [batch]   x: [batch, hidden].   4 * hidden bytes a row.
#pragma once

#include "core/ringless.cuh"

namespace cuk {

struct Embed : Ringless {
  struct Args {
    const int* tokens;
    const bf16* table;
    bf16* x;
    int hidden;
  };

  template <class Policy>
  static __device__ void consume(const Args& a, int task, RingConsumer&, const Team& team, char*, char*, int, Policy& policy) {
    const bf16* row = a.table + static_cast<size_t>(a.tokens[task]) * a.hidden;
    policy.wait();
    bf16* x = a.x + static_cast<size_t>(task) * a.hidden;
#pragma unroll 4
    for (int i = team.thread * 8; i < a.hidden; i += kTeamThreads * 8) {
      const Vec16 v = load_constant(row + i);
      if constexpr (Policy::kPosts) {
        const int at = (task * a.hidden + i) / 4;
        policy.post(at, word_of(v.x, v.y));
        policy.post(at + 1, word_of(v.z, v.w));
      }
      *reinterpret_cast<Vec16*>(x + i) = v;
    }
  }
};

}  // namespace cuk
