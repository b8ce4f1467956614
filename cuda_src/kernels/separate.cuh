// One op as one kernel: the driver of the runs stream, graph and pdl.
//
// A CTA holds kTeams teams, each a ring with its own producer warp and four consumer warps; team i of CTA c takes tasks
// i * grid + c, then every grid * kTeams-th. With kPdl, the producers fill their rings with what no kernel of this step writes,
// while the consumers wait for the kernels before; everything a task writes it writes after that wait. A kernel whose x arrives as
// words (core/sync.cuh) takes them as they come instead, and waits before it reads or writes anything else; its producers need no wait at all.
#pragma once

#include "core/ring.cuh"
#include "core/team.cuh"
#include "core/trace.cuh"

namespace cuk {

// Where the kernel lets its successor start: at once, after its last load is issued, or after its last store.
enum class Trigger { kStart, kLoads, kEnd };

struct LaunchArgs {
  int num_tasks;
  int num_stages;     // of each team's ring
  int stage_bytes;    // multiple of 1024, which the 128-byte swizzle wants of a stage's address
  int shared_bytes;   // staged operands of the CTA, multiple of 128
  int scratch_bytes;  // of each team, multiple of 128
  int prefetch;       // stages that may load before the wait
  int in_flight;      // stages of a team that may be on their way at once before the wait
  // What this op or a later one will read after its rings are full, to be brought into L2: before the wait or after it, a piece by
  // each producer every so many nanoseconds.
  int ahead_bytes, ahead_early, ahead_pace;
  int num_emptied;
  const char* ahead;
  // Words of three edges: to the next kernel, from the one before, and from the one before to that one, which has taken them all.
  u64* postings;
  const u64* arrivals;
  u64* emptied;
};

constexpr int kAheadPiece = 4096;  // bytes that one request brings into L2

// Whether a kernel posts its output as words, too, and whether it takes its x from such words.
enum class Words { kNone, kPosts, kPolls, kBoth };

template <bool kPdl, Words kWords, class Tracer>
struct SeparatePolicy {
  static constexpr bool kPosts = kWords == Words::kPosts || kWords == Words::kBoth;
  static constexpr bool kPolls = kWords == Words::kPolls || kWords == Words::kBoth;
  static constexpr bool kResidualWords = false;  // it is read after the wait
  static constexpr bool kStagers = kPolls;       // warps that stage an x which is used chunk by chunk
  static_assert(kPdl || kWords == Words::kNone, "after a full edge there is nothing to take early");
  const LaunchArgs& launch;
  u64* staged;  // an mbarrier for each chunk of x
  Tracer tracer;
  bool all_at_once;
  bool first =
      true;  // looked at by tracing alone: griddepcontrol.wait may be repeated, and a flag kept for it costs a register
  __device__ void wait() {
    if (kPdl) griddepcontrol_wait();
    if (Tracer::kOn && first) tracer.mark(Event::kWaited);
    first = false;
  }
  // Whether all tasks of the op run at the same time, so that each may wait for any other.
  __device__ bool together() const { return all_at_once; }
  __device__ void post(int index, u64 content) const { cuk::post(launch.postings + index, content); }
  __device__ const bf16* arrivals() const { return reinterpret_cast<const bf16*>(launch.arrivals); }
  __device__ void wait_staged(int chunk) const { mbarrier_wait(staged + chunk, 0); }
};

// Warps of a CTA that stage x chunk by chunk as its words come, beside the teams that use each chunk at once.
template <class Task, bool kPolls>
__device__ constexpr int stagers() {
  if constexpr (kPolls) return Task::kStagesByChunk ? kTeamThreads : 0;
  return 0;
}

// Walks the chunks of a team's tasks in order. A task's tile (what its index means) is worked out once.
template <class Task>
struct ChunkCursor {
  const typename Task::Args& args;
  int num_tasks, stride, task;
  int chunk = 0, num_chunks = 0;
  typename Task::Tile tile{};

  __device__ ChunkCursor(const typename Task::Args& args, int num_tasks, int first, int stride)
      : args(args), num_tasks(num_tasks), stride(stride), task(first - stride) {
    next_task();
  }
  __device__ bool done() const { return task >= num_tasks; }
  __device__ void advance() {
    if (++chunk >= num_chunks) next_task();
  }

 private:
  __device__ void next_task() {
    chunk = 0;
    do {
      task += stride;
      if (task >= num_tasks) return;
      tile = Task::tile(args, task);
      num_chunks = Task::num_chunks(args, tile);
    } while (num_chunks == 0);
  }
};

// Memory has little else to do while small ops run. What a kernel asks for before its wait lands while the one ahead runs; after its wait
// it had better be little, since what is still on its way when a kernel ends delays that end.
__device__ __forceinline__ void ask_ahead(const LaunchArgs& launch, int first, int stride, bool elected) {
  if (elected)
#pragma unroll 1
    for (int at = first * kAheadPiece; at < launch.ahead_bytes; at += stride * kAheadPiece) {
      bulk_prefetch(launch.ahead + at, static_cast<u32>(min(kAheadPiece, launch.ahead_bytes - at)));
      if (launch.ahead_pace > 0) sleep_nanoseconds(static_cast<u32>(launch.ahead_pace));
    }
  __syncwarp();
}

// By all the producer warps of the grid: the words that the kernel before has taken, ready for the next step.
__device__ __forceinline__ void empty_words(const LaunchArgs& launch, int first, int stride) {
#pragma unroll 1
  for (int i = first * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize; i < launch.num_emptied; i += stride * kWarpSize)
    post(launch.emptied + i, kEmptyWord);
}

// The producer warp waits as a whole; its elected lane announces and issues. Always the same lane: elect.sync picks it by the mask.
template <class Task, bool kPdl, class Policy>
__device__ void produce(const typename Task::Args& args, const LaunchArgs& launch, const Ring& ring, int first, int stride,
                        Policy& policy) {
  RingProducer producer{ring, {}};
  ChunkCursor<Task> at(args, launch.num_tasks, first, stride);
  const int ahead = min(launch.prefetch, launch.num_stages);
  const bool elected = elect_one();
  bool waited = false;
  const auto wait = [&] {
    if (!launch.ahead_early) policy.wait();
    ask_ahead(launch, first, stride, elected);
    policy.wait();
    if (kPdl) empty_words(launch, first, stride);
    waited = true;
  };
  // Weights depend on nothing: where the consumers go on before the wait, so does this, unless it was told to keep to fewer stages.
  const int wait_at = Policy::kPolls && ahead == launch.num_stages ? -1 : ahead;
  if constexpr (Task::kHasDependentLoads) {
    // The independent halves of the first stages, the wait, then their dependent halves.
    ChunkCursor<Task> behind = at;
    RingProducer late = producer;
    int early = 0;
    for (; early < ahead && !at.done(); ++early, at.advance(), producer.advance()) {
      if (!elected) continue;  // the first stages are free
      producer.announce(Task::chunk_bytes(args, at.tile, at.chunk));
      Task::load_independent(args, at.tile, at.chunk, producer.here());
    }
    wait();
    for (; early > 0; --early, behind.advance(), late.advance())
      if (elected) Task::load_dependent(args, behind.tile, behind.chunk, late.here());
  }
  RingCursor landing = producer.at;
  int landed = 0;
#pragma unroll 1
  for (int issued = 0; true; ++issued, at.advance(), producer.advance()) {
    if (!Task::kHasDependentLoads && !waited && (at.done() || issued == wait_at)) wait();
    if (at.done()) break;
    // Early loads go out a few at a time: more of them would only queue in the memory system, before the few bytes that the
    // kernel ahead still needs.
    if (kPdl && issued < ahead)
      for (; issued - landed >= launch.in_flight; ++landed) {
        mbarrier_wait(&ring.full[landing.stage], landing.phase);
        landing.advance(ring.num_stages);
      }
    producer.wait();
    if (elected) {
      producer.announce(Task::chunk_bytes(args, at.tile, at.chunk));
      Task::load_independent(args, at.tile, at.chunk, producer.here());
      if constexpr (Task::kHasDependentLoads) Task::load_dependent(args, at.tile, at.chunk, producer.here());
    }
    __syncwarp();
  }
}

template <class Task, int kTeams, bool kPdl, Trigger kTrigger, Words kWords = Words::kNone, class Tracer = NoTrace>
__device__ void separate(const typename Task::Args& args, const LaunchArgs& launch, Tracer tracer = {}) {
  static_assert(kTeams >= 1 && kTeams <= kMaxTeams, "more teams than a CTA has threads for");
  extern __shared__ __align__(1024) char smem[];
  constexpr int kConsumers = kTeams * kTeamThreads;
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_consumer = thread < kConsumers;
  const int index = is_consumer ? thread / kTeamThreads : (thread - kConsumers) / kWarpSize;

  using Policy = SeparatePolicy<kPdl, kWords, Tracer>;
  constexpr int kStagers = stagers<Task, Policy::kPolls>(), kThreads = kTeams * kThreadsPerTeam + kStagers;
  const bool is_stager = kStagers > 0 && thread >= kTeams * kThreadsPerTeam;

  // Shared memory: the rings' stages, staged operands, team scratch, barriers of the rings and of the chunks.
  const int ring_bytes = launch.num_stages * launch.stage_bytes;
  char* shared = smem + kTeams * ring_bytes;
  char* scratch = shared + launch.shared_bytes + index * launch.scratch_bytes;
  u64* all_barriers = reinterpret_cast<u64*>(shared + launch.shared_bytes + kTeams * launch.scratch_bytes);
  u64* barriers = all_barriers + index * 2 * launch.num_stages;
  const Ring ring{smem + index * ring_bytes, barriers, barriers + launch.num_stages, launch.num_stages, launch.stage_bytes};
  tracer.begin(thread == 0);
  if (kPdl && kTrigger == Trigger::kStart && thread == 0) griddepcontrol_launch_dependents();

  const int stride = static_cast<int>(gridDim.x) * kTeams;
  const int first = index * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  Policy policy{launch, all_barriers + kTeams * 2 * launch.num_stages, tracer, launch.num_tasks <= stride};
  // Barrier 0: the rings are ready, and the barriers of the chunks. Only those wait for it who did not make them.
  if constexpr (kStagers > 0)
    if (is_stager) {
      const int stager = thread - kTeams * kThreadsPerTeam;
      if (stager == 0) {
#pragma unroll 1
        for (int i = 0; i < Task::chunks_of(args.k); ++i) mbarrier_init(policy.staged + i, Task::arrivals_of_chunk(args.batch));
        fence_mbarrier_init();
      }
      named_barrier_sync(0, kThreads);
      Task::stage_by_chunk(policy.arrivals(), args.batch, args.k, shared, policy.staged, stager);
      return;
    }
  if (!is_consumer) {
    if (thread % kWarpSize == 0) {
      Ring(ring).init(kTeamWarps);
      fence_mbarrier_init();
    }
    __syncwarp();
    named_barrier_arrive(0, kThreads);
    produce<Task, kPdl>(args, launch, ring, first, stride, policy);
    if (kPdl && kTrigger == Trigger::kLoads) griddepcontrol_launch_dependents();
    return;
  }
  const Team team{index, threadIdx.x % kTeamThreads};
  RingConsumer consumer{ring, {}};
  if (kPdl) named_barrier_sync(0, kThreads);
  Task::prepare(args, Crew{thread, kConsumers}, team, shared, scratch, policy);
  if (!kPdl) named_barrier_sync(0, kThreads);
  tracer.mark(Event::kPrepared);
  int iteration = 0;
#pragma unroll 1
  for (int task = first; task < launch.num_tasks; task += stride, ++iteration) {
    const typename Task::Tile tile = Task::tile(args, task);
    Task::consume(args, tile, consumer, team, shared, scratch, iteration, policy);
    if (iteration == 0) tracer.mark(Event::kFirstTask);
  }
  tracer.mark(Event::kEnd);
  // A CTA without a task stays as long as the others of the grid before: one that left early would leave room on this SM for two
  // CTAs of a later kernel, and none for it elsewhere.
  policy.wait();
  if (kPdl && kTrigger == Trigger::kEnd) griddepcontrol_launch_dependents();
}

}  // namespace cuk
