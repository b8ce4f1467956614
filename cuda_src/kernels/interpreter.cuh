// A whole program as one kernel: the driver of the runs persistent and loop.
//
// One CTA an SM, kTeams teams in it, each with four consumer warps, a producer warp and a ring that runs on across tasks. The instructions of an
// SM's queue go to its teams in turn: instruction j to team j % kTeams. A team's producer fetches them ahead of need, each with its op's record,
// into slots of shared memory, and fills the ring with their loads; so the weights of later ops come while the consumers still
// wait for earlier ones. The consumers take the slots in order: they wait for what an instruction depends on where its task first needs it, run
// the task, and signal.
//
// Nothing is reset between steps. Words and counters (core/sync.cuh) are in two sets, used by steps in turn; a step leaves the other set
// as the next one wants it: who posts a word empties the same word there, and each CTA clears its share of the other counters. The full edge
// between two launches orders this before the next step, and after the last.
#pragma once

#include "core/ring.cuh"
#include "core/team.cuh"
#include "core/trace.cuh"

namespace cuk {

struct InterpreterArgs {
  const int*
      instructions;     // [queues, per_queue, kWords]: opcode, op, task, signal, (counter, threshold)…; -1 where there is none
  const char* records;  // [ops, kRecordBytes]
  u32* counters;        // two sets
  u32* epochs;          // [CTAs]: the number of the step
  u64* events;          // [queues, per_queue, kInstructionEvents], where traced
  u64 words_of_set;     // from a word to the same word of the other set
  int per_queue, num_counters, num_stages, stage_bytes, shared_bytes, scratch_bytes;
};

// What all instructions of an op have in common; its Args follow.
struct alignas(16) Record {
  u64* postings;
  const u64* arrivals;
  const u64* residuals;
  u64 unused;
  template <class Args>
  __device__ const Args& args() const {
    return *reinterpret_cast<const Args*>(this + 1);
  }
};

constexpr int kHeadWords = 4;  // of an instruction: opcode, op, task, signal
constexpr int kSlots = 4;      // instructions that a team's producer fetches ahead
constexpr int kInstructionEvents = 4;
enum class InstructionEvent { kStart, kPrepared, kEnd, kOp };

// A kind of instruction: a task type, whether it posts its output as words, takes its input as words, and its residual.
template <class T, bool posts, bool polls, bool takes_residual>
struct Entry {
  using Task = T;
  static constexpr bool kPosts = posts, kPolls = polls, kResidualWords = takes_residual;
};

// ---- what a team's warps share ----
template <int kWords, int kRecordBytes>
struct alignas(16) Slot {
  int words[kWords];
  alignas(16) char record_bytes[kRecordBytes];
  __device__ int opcode() const { return words[0]; }
  __device__ int op() const { return words[1]; }
  __device__ int task() const { return words[2]; }
  __device__ int signal() const { return words[3]; }
  __device__ const Record& record() const { return *reinterpret_cast<const Record*>(record_bytes); }
};

// The sets of this step and the other one.
struct Step {
  u32* counters;
  u64 words, other_words;  // offsets
};

template <class Slot, Ordering kOrdering>
__device__ __forceinline__ void wait_for_counters(const Slot& slot, const Step& step) {
  constexpr int kMost = (sizeof(slot.words) / sizeof(int) - kHeadWords) / 2;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int counter = lane < kMost ? slot.words[kHeadWords + 2 * lane] : -1;
  const int threshold = lane < kMost ? slot.words[kHeadWords + 2 * lane + 1] : 0;
#pragma unroll 1
  for (Patience patience;; patience.check()) {
    const bool short_of = counter >= 0 && static_cast<int>(observe<kOrdering>(step.counters + counter)) < threshold;
    if (__ballot_sync(kFullMask, short_of) == 0) return;  // what one lane acquired, its warp has from here on
  }
}

template <class Entry, class Slot, Ordering kOrdering>
struct InterpreterPolicy {
  static constexpr bool kPosts = Entry::kPosts, kPolls = Entry::kPolls, kResidualWords = Entry::kResidualWords;
  static constexpr bool kStagers = false;
  const Slot& slot;
  const Step& step;
  bool waited = false;
  __device__ __forceinline__ void wait() {
    if (!waited) wait_for_counters<Slot, kOrdering>(slot, step);
    waited = true;
  }
  __device__ bool together() const { return false; }
  __device__ void post(int index, u64 content) const {
    u64* word = slot.record().postings + index;
    cuk::post(word + step.words, content);
    cuk::post(word + step.other_words, kEmptyWord);
  }
  __device__ const bf16* arrivals() const { return reinterpret_cast<const bf16*>(slot.record().arrivals + step.words); }
  __device__ const u64* residuals() const { return slot.record().residuals + step.words; }
  __device__ void wait_staged(int) const {}
};

// ---- producer ----
template <class Task, class Wait>
__device__ void produce_task(const typename Task::Args& args, int task, RingProducer& producer, bool elected,
                             const Wait& wait) {
  const typename Task::Tile tile = Task::tile(args, task);
  const int chunks = Task::num_chunks(args, tile);
  int chunk = 0;
  if constexpr (Task::kHasDependentLoads) {
    // The independent halves of the first stages, the wait, then their dependent halves.
    RingProducer late = producer;
    const int early = min(chunks, producer.ring.num_stages);
#pragma unroll 1
    for (; chunk < early; ++chunk, producer.advance()) {
      producer.wait();
      if (elected) {
        producer.announce(Task::chunk_bytes(args, tile, chunk));
        Task::load_independent(args, tile, chunk, producer.here());
      }
      __syncwarp();
    }
    wait();
#pragma unroll 1
    for (int behind = 0; behind < early; ++behind, late.advance())
      if (elected) Task::load_dependent(args, tile, behind, late.here());
    __syncwarp();
  }
#pragma unroll 1
  for (; chunk < chunks; ++chunk, producer.advance()) {
    producer.wait();
    if (elected) {
      producer.announce(Task::chunk_bytes(args, tile, chunk));
      Task::load_independent(args, tile, chunk, producer.here());
      if constexpr (Task::kHasDependentLoads) Task::load_dependent(args, tile, chunk, producer.here());
    }
    __syncwarp();
  }
}

template <class Slot, Ordering kOrdering>
struct Produce {
  const Slot& slot;
  const Step& step;
  RingProducer& producer;
  bool elected;
  template <class Entry>
  __device__ __forceinline__ void run() {
    using Task = typename Entry::Task;
    produce_task<Task>(slot.record().template args<typename Task::Args>(), slot.task(), producer, elected, [&] {
      wait_for_counters<Slot, kOrdering>(slot, step);
      fence_proxy_async();  // what was waited for was written through the generic proxy
    });
  }
};

// ---- consumers ----
struct Consumers {
  RingConsumer ring;
  Team team;
  char *shared, *scratch;
  int prepared = -1, iteration = 0;  // the op whose operands are staged, and how many of its tasks this team has run
};

template <class Slot, Ordering kOrdering>
struct Consume {
  const Slot& slot;
  const Step& step;
  Consumers& at;
  u64* events;
  template <class Entry>
  __device__ __forceinline__ void run() {
    using Task = typename Entry::Task;
    const auto& args = slot.record().template args<typename Task::Args>();
    InterpreterPolicy<Entry, Slot, kOrdering> policy{slot, step};
    if (slot.op() != at.prepared) {
      at.prepared = slot.op();
      at.iteration = 0;
      at.team.sync();  // the op before may still read what it staged
      Task::prepare(args, Crew{static_cast<int>(at.team.thread), kTeamThreads, at.team.barrier()}, at.team, at.shared,
                    at.scratch, policy);
    } else {
      policy.wait();
    }
    if (events && at.team.thread == 0) events[static_cast<int>(InstructionEvent::kPrepared)] = global_nanoseconds();
    Task::consume(args, Task::tile(args, slot.task()), at.ring, at.team, at.shared, at.scratch, at.iteration++, policy);
    if (slot.signal() >= 0) {
      at.team.sync();
      if (at.team.thread == 0) signal<kOrdering>(step.counters + slot.signal());
    }
  }
};

template <class Action>
__device__ __forceinline__ void dispatch(int, Action&) {}
template <class First, class... Rest, class Action>
__device__ __forceinline__ void dispatch(int opcode, Action& action) {
  if (opcode == 0)
    action.template run<First>();
  else if constexpr (sizeof...(Rest) > 0)
    dispatch<Rest...>(opcode - 1, action);
}

// kWords: of an instruction. kRecordBytes: of an op's record.
template <int kTeams, int kWords, int kRecordBytes, Ordering kOrdering, bool kTrace, class... Entries>
__device__ void interpret(const InterpreterArgs& launch) {
  static_assert(kTeams >= 1 && kTeams <= kMaxTeams, "more teams than a CTA has threads for");
  static_assert(kRecordBytes % 16 == 0 && kRecordBytes <= 16 * kWarpSize && kWords <= kWarpSize,
                "a lane fetches a word, and 16 bytes");
  using InstructionSlot = Slot<kWords, kRecordBytes>;
  extern __shared__ __align__(1024) char smem[];
  constexpr int kConsumers = kTeams * kTeamThreads;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const bool is_consumer = thread < kConsumers;
  const int index = is_consumer ? thread / kTeamThreads : (thread - kConsumers) / kWarpSize;

  // Shared memory: the rings' stages; staged operands and scratch of each team; slots; barriers of rings and slots.
  const int ring_bytes = launch.num_stages * launch.stage_bytes;
  char* shared = smem + kTeams * ring_bytes + index * (launch.shared_bytes + launch.scratch_bytes);
  char* after = smem + kTeams * (ring_bytes + launch.shared_bytes + launch.scratch_bytes);
  InstructionSlot* slots = reinterpret_cast<InstructionSlot*>(after) + index * kSlots;
  u64* barriers =
      reinterpret_cast<u64*>(after + kTeams * kSlots * sizeof(InstructionSlot)) + index * 2 * (launch.num_stages + kSlots);
  u64 *fetched = barriers, *taken = barriers + kSlots, *full = taken + kSlots;
  const Ring ring{smem + index * ring_bytes, full, full + launch.num_stages, launch.num_stages, launch.stage_bytes};

  const u32 epoch = launch.epochs[blockIdx.x], set = epoch & 1;
  const Step step{launch.counters + set * static_cast<u32>(launch.num_counters), set * launch.words_of_set,
                  (set ^ 1) * launch.words_of_set};
  const int* queue = launch.instructions + static_cast<size_t>(blockIdx.x) * static_cast<size_t>(launch.per_queue * kWords);

  if (!is_consumer) {
    if (lane == 0) {
      Ring(ring).init(kTeamWarps);
#pragma unroll 1
      for (int i = 0; i < kSlots; ++i) {
        mbarrier_init(&fetched[i], 1);
        mbarrier_init(&taken[i], kTeamWarps);
      }
      fence_mbarrier_init();
    }
    __syncwarp();
    named_barrier_arrive(0, kTeams * kThreadsPerTeam);
    const u32 other = (set ^ 1) * static_cast<u32>(launch.num_counters);
    const int producers = static_cast<int>(gridDim.x) * kTeams * kWarpSize;
#pragma unroll 1
    for (int i = (static_cast<int>(blockIdx.x) * kTeams + index) * kWarpSize + lane; i < launch.num_counters; i += producers)
      launch.counters[other + static_cast<u32>(i)] = 0;

    // Two fetches ahead: an instruction's words, then, when they have come, its op's record.
    const auto words_at = [&](int place) {
      return place < launch.per_queue && lane < kWords ? queue[place * kWords + lane] : -1;
    };
    const auto record_of = [&](int words) {
      const int op = __shfl_sync(kFullMask, words, 1);
      Vec16 part{};
      if (op >= 0 && lane * 16 < kRecordBytes)
        part = load_constant(launch.records + static_cast<size_t>(op) * kRecordBytes + lane * 16);
      return part;
    };
    RingProducer producer{ring, {}};
    const bool elected = elect_one();
    RingCursor slot;
    int words = words_at(index), next_words = words_at(index + kTeams);
    Vec16 record = record_of(words);
#pragma unroll 1
    for (int place = index; true; place += kTeams) {
      mbarrier_wait(&taken[slot.stage], slot.phase ^ 1);
      InstructionSlot& here = slots[slot.stage];
      if (lane < kWords) here.words[lane] = words;
      if (lane * 16 < kRecordBytes) reinterpret_cast<Vec16*>(here.record_bytes)[lane] = record;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&fetched[slot.stage]);
      const int opcode = __shfl_sync(kFullMask, words, 0);
      if (opcode < 0) break;
      words = next_words;
      record = record_of(words);
      next_words = words_at(place + 2 * kTeams);
      Produce<InstructionSlot, kOrdering> produce{here, step, producer, elected};
      dispatch<Entries...>(opcode, produce);
      slot.advance(kSlots);
    }
    return;
  }
  Consumers at{RingConsumer{ring, {}}, Team{index, threadIdx.x % kTeamThreads}, shared, shared + launch.shared_bytes};
  named_barrier_sync(0, kTeams * kThreadsPerTeam);
  RingCursor slot;
  u64* events = kTrace ? launch.events + (static_cast<size_t>(blockIdx.x) * static_cast<size_t>(launch.per_queue) +
                                          static_cast<size_t>(index)) *
                                             kInstructionEvents
                       : nullptr;
#pragma unroll 1
  while (true) {
    mbarrier_wait(&fetched[slot.stage], slot.phase);
    const InstructionSlot& here = slots[slot.stage];
    const int opcode = here.opcode();
    if (opcode < 0) break;
    if (kTrace && at.team.thread == 0) {
      events[static_cast<int>(InstructionEvent::kStart)] = global_nanoseconds();
      events[static_cast<int>(InstructionEvent::kOp)] = static_cast<u64>(here.op());
    }
    Consume<InstructionSlot, kOrdering> consume{here, step, at, events};
    dispatch<Entries...>(opcode, consume);
    __syncwarp();
    if (at.team.lane() == 0) mbarrier_arrive(&taken[slot.stage]);
    slot.advance(kSlots);
    if (kTrace) {
      if (at.team.thread == 0) events[static_cast<int>(InstructionEvent::kEnd)] = global_nanoseconds();
      events += kTeams * kInstructionEvents;
    }
  }
  if (thread == 0) launch.epochs[blockIdx.x] = epoch + 1;
}

}  // namespace cuk
