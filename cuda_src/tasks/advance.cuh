// p = positions[b];  if p + 1 < ends[b]:  p += 1;  if p >= lengths[b]: history[p, b] = chosen[b];  positions[b] = p;  tokens[b] = history[p, b].
// history: [columns, batch]   the others: [batch], all int.   One task: all sequences, a thread each; 28 bytes a sequence.
//
// The last op of a step: no kernel of this step reads positions or tokens after it, and the next step starts with a full edge.
#pragma once

#include "core/ringless.cuh"

namespace cuk {

struct Advance : Ringless {
  struct Args {
    const int *chosen, *lengths, *ends;
    int *history, *positions, *tokens;
    int batch;
  };

  template <class Policy>
  static __device__ void consume(const Args& a, int, RingConsumer&, const Team& team, char*, char*, int, Policy&) {
    const int b = static_cast<int>(team.thread);
    if (b >= a.batch) return;
    const int end = a.ends[b], length = a.lengths[b], chosen = a.chosen[b];
    int p = a.positions[b];
    const bool goes_on = p + 1 < end;
    if (goes_on) ++p;
    int* at = a.history + static_cast<size_t>(p) * a.batch + b;
    const int token = goes_on && p >= length ? chosen : *at;
    *at = token;
    a.positions[b] = p;
    a.tokens[b] = token;
  }
};

}  // namespace cuk
