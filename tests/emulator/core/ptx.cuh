// The machine that tests/emulator stands for, in place of cuda_src/core/ptx.cuh: each CUDA thread is a fiber on the CPU, copies land at
// random moments, and the next fiber to go on is drawn at random. A CTA goes on until it has ended or can only wait for another one.
// Every other device file is compiled as it is.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __maxnreg__(count)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct int3 {
  int x, y, z;
};
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

namespace emulator {

constexpr int kMaxSmem = 232448;
constexpr int kStackBytes = 128 * 1024;
constexpr long kPatience = 50;  // rounds of every fiber without any event: none comes unless from another CTA

struct Rendezvous {
  int waiting = 0;
  long generation = 0;
};
struct Warp {
  Rendezvous meeting;
  alignas(16) unsigned char slots[2][32][64];
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

struct Cta {
  int index = 0;
  std::unique_ptr<char[]> smem;  // while another CTA runs
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Rendezvous barriers[16];
  std::vector<std::function<void()>> copies;  // in flight
  ucontext_t scheduler;
  int current = 0;
  int left = -1;  // threads that have not ended; -1 before the start
  long events = 0;
  bool waited = false;
  std::mt19937 random;
};
inline Cta* cta;
inline int3 block_index, grid_size, block_size;
inline std::string failure;
inline bool drop_copies = false;  // a test's: nothing ever lands
// A test's: called when a CTA starts, and when the first of its threads has waited for the kernels before.
inline void (*on_start)(int) = nullptr;
inline void (*on_wait)(int) = nullptr;
// A test's: called when no CTA can go on; true where it has done something about that.
inline bool (*on_stuck)() = nullptr;

inline void yield() { swapcontext(&cta->fibers[cta->current].context, &cta->scheduler); }
inline void event() { ++cta->events; }

// Waits until `count` have come. Quiet: no event, since nothing comes of it by itself (a loop that looks again and again meets so).
inline void meet(Rendezvous& at, int count, bool quiet = false) {
  const long generation = at.generation;
  if (!quiet) event();
  if (++at.waiting == count) {
    at.waiting = 0;
    ++at.generation;
    return;
  }
  while (at.generation == generation) yield();
}

// Counts as one that has come, and goes on.
inline void arrive(Rendezvous& at, int count) {
  event();
  if (++at.waiting == count) {
    at.waiting = 0;
    ++at.generation;
  }
}

// What every lane of the warp brought to this meeting.
template <class T>
struct Gathered {
  const unsigned char (*slots)[64];
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, slots[lane], sizeof(T));
    return value;
  }
};
template <class T>
inline Gathered<T> gather(const T& mine, bool quiet = false) {
  static_assert(sizeof(T) <= 64, "a slot holds 64 bytes");
  Warp& warp = cta->warps[cta->current / 32];
  unsigned char (*slots)[64] = warp.slots[warp.meeting.generation & 1];
  std::memcpy(slots[cta->current % 32], &mine, sizeof(T));
  meet(warp.meeting, 32, quiet);
  return {slots};
}

inline std::function<void()> body;
inline void enter() {
  body();
  cta->fibers[cta->current].done = true;
  event();
  swapcontext(&cta->fibers[cta->current].context, &cta->scheduler);
}

inline void land_one() {
  const size_t i = cta->random() % cta->copies.size();
  auto copy = std::move(cta->copies[i]);
  cta->copies.erase(cta->copies.begin() + static_cast<long>(i));
  copy();
  event();
}

inline void start_cta(int threads, unsigned seed) {
  cta->random.seed(seed);
  cta->left = threads;
  cta->fibers.resize(static_cast<size_t>(threads));
  cta->warps.resize(static_cast<size_t>(threads) / 32);
  for (Fiber& fiber : cta->fibers) {
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
}

// Runs the CTA until it has ended or waits for another one.
inline void run_cta() {
  Cta& state = *cta;
  const int threads = static_cast<int>(state.fibers.size());
  long idle = 0, seen = -1;
  while (state.left > 0 && (idle <= kPatience || !state.copies.empty()) && failure.empty()) {
    if (drop_copies) state.copies.clear();
    if (!state.copies.empty() && state.random() % 2 == 0) land_one();
    const int start = static_cast<int>(state.random() % static_cast<unsigned>(threads));
    state.left = 0;
    for (int i = 0; i < threads && failure.empty(); ++i) {
      const int at = (start + i) % threads;
      if (state.fibers[static_cast<size_t>(at)].done) continue;
      ++state.left;
      state.current = at;
      swapcontext(&state.scheduler, &state.fibers[static_cast<size_t>(at)].context);
    }
    idle = state.events == seen ? idle + 1 : 0;
    seen = state.events;
  }
  while (state.left == 0 && !state.copies.empty()) land_one();
}

// Runs a grid, all its CTAs resident, one at a time until it waits for another; in the order of their indices or against it. False,
// with `failure` set, when nothing can go on.
inline bool run_grid(int grid, int threads, unsigned seed, char* smem) {
  failure.clear();
  grid_size = {grid, 1, 1};
  block_size = {threads, 1, 1};
  std::vector<Cta> ctas(static_cast<size_t>(grid));
  int left = grid;
  for (bool moved = true; left > 0;) {
    if (!moved && !(on_stuck && on_stuck())) {
      for (const Cta& stuck : ctas)
        if (stuck.left > 0) {
          failure =
              "deadlock: CTA " + std::to_string(stuck.index) + ", " + std::to_string(stuck.left) + " threads wait for ever";
          return false;
        }
    }
    moved = false;
    for (int i = 0; i < grid; ++i) {
      const int index = seed % 2 ? grid - 1 - i : i;
      cta = &ctas[static_cast<size_t>(index)];
      if (cta->left == 0) continue;
      block_index = {index, 0, 0};
      if (cta->left < 0) {
        cta->index = index;
        std::memset(smem, 0xff, kMaxSmem);
        start_cta(threads, seed + static_cast<unsigned>(index));
        if (on_start) on_start(index);
      } else {
        std::memcpy(smem, cta->smem.get(), kMaxSmem);
      }
      const long before = cta->events;
      run_cta();
      if (!failure.empty()) return false;
      moved = moved || cta->events != before;
      if (cta->left == 0) {
        --left;
        cta->fibers.clear();
      } else {
        if (!cta->smem) cta->smem.reset(new char[kMaxSmem]);
        std::memcpy(cta->smem.get(), smem, kMaxSmem);
      }
    }
  }
  return true;
}

struct ThreadIndex {
  struct X {
    operator unsigned() const { return static_cast<unsigned>(cta->current); }
  } x;
};
inline ThreadIndex thread_index;

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size
#define blockDim emulator::block_size

inline void __syncthreads() { emulator::meet(emulator::cta->barriers[0], blockDim.x); }
inline void __syncwarp() { emulator::gather(0); }
inline float __shfl_xor_sync(unsigned, float v, int mask) { return emulator::gather(v)[(emulator::cta->current % 32) ^ mask]; }
inline int __shfl_xor_sync(unsigned, int v, int mask) { return emulator::gather(v)[(emulator::cta->current % 32) ^ mask]; }
inline unsigned __ballot_sync(unsigned, bool v) {
  const auto all = emulator::gather(v, true);
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(all[lane]) << lane;
  return lanes;
}
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline std::uint64_t __shfl_xor_sync(unsigned, std::uint64_t v, int mask) {
  return emulator::gather(v)[(emulator::cta->current % 32) ^ mask];
}
inline std::uint64_t __shfl_up_sync(unsigned, std::uint64_t v, int by) {
  const int lane = emulator::cta->current % 32;
  return emulator::gather(v)[lane < by ? lane : lane - by];
}
template <class T>
inline T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
inline std::uint64_t __umul64hi(std::uint64_t a, std::uint64_t b) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __shfl_sync(unsigned, float v, int lane) { return emulator::gather(v)[lane % 32]; }
inline unsigned __float_as_uint(float v) {
  unsigned u;
  std::memcpy(&u, &v, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float v;
  std::memcpy(&v, &u, 4);
  return v;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = (static_cast<std::uint64_t>(b) << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>((both >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return result;
}

namespace cuk {

using std::exp2;
using std::fmaf;
using std::fmax;
inline float fmaxf(float a, float b) { return std::fmax(a, b); }

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = std::uint64_t;
using size_t = std::size_t;

struct bf16 {
  u16 bits;
};
struct alignas(16) Vec16 {
  u32 x, y, z, w;
};
struct alignas(128) TensorMap {
  u64 address;
  u64 sizes[5], strides[4];
  u32 box[5];
};
static_assert(sizeof(TensorMap) == 128, "as long as the driver's");

constexpr int kWarpSize = 32;
constexpr u32 kFullMask = 0xffffffffu;
alignas(1024) inline char smem[emulator::kMaxSmem];

inline float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }
inline float low_to_float(u32 pair) { return __uint_as_float(pair << 16); }
inline float high_to_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline bf16 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if (std::isnan(value)) return {0x7fff};
  return {static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low).bits | static_cast<u32>(to_bf16(high).bits) << 16; }
inline float infinity() { return __uint_as_float(0x7f800000u); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float rsqrt_approx(float x) { return 1.0f / std::sqrt(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline Vec16 load_constant(const void* pointer) { return *static_cast<const Vec16*>(pointer); }
template <int kOffset>
inline Vec16 load_shared(const char* pointer) {
  return *reinterpret_cast<const Vec16*>(pointer + kOffset);
}
template <int kOffset>
inline void load_shared_if(Vec16& v, const char* pointer, bool active) {
  if (active) v = *reinterpret_cast<const Vec16*>(pointer + kOffset);
}
inline u32 pack_low(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
inline u32 pack_high(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// An mbarrier in its word: arrivals still expected, arrivals of a phase, parity of the current phase, bytes still to come.
struct Barrier {
  std::int16_t pending, count;
  std::int32_t tx_and_parity;
  int tx() const { return tx_and_parity >> 1; }
  u32 parity() const { return static_cast<u32>(tx_and_parity) & 1; }
  void add_tx(int bytes) { tx_and_parity += bytes * 2; }
  void advance() {
    if (pending < 0) emulator::failure = "an mbarrier got more arrivals than its phase expects";
    if (pending == 0 && tx() == 0) {
      pending = count;
      tx_and_parity ^= 1;
    }
    emulator::event();
  }
};
inline Barrier& barrier_of(u64* word) { return *reinterpret_cast<Barrier*>(word); }

inline void mbarrier_init(u64* word, u32 count) {
  barrier_of(word) = {static_cast<std::int16_t>(count), static_cast<std::int16_t>(count), 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(u64* word) {
  --barrier_of(word).pending;
  barrier_of(word).advance();
}
inline void mbarrier_arrive_expect_tx(u64* word, u32 bytes) {
  barrier_of(word).add_tx(static_cast<int>(bytes));
  mbarrier_arrive(word);
}
inline bool mbarrier_try_wait(u64* word, u32 parity) { return barrier_of(word).parity() != parity; }
inline void mbarrier_wait(u64* word, u32 parity) {
  while (!mbarrier_try_wait(word, parity)) emulator::yield();
}

inline u64 global_nanoseconds() { return static_cast<u64>(emulator::cta->events) + 1; }
inline u32 sm_id() { return static_cast<u32>(emulator::block_index.x); }

struct Patience {
  void check() const { emulator::yield(); }
};

inline void bulk_prefetch(const void* source, u32 bytes) {  // which faults where nothing is
  (void)*static_cast<const volatile char*>(source);
  (void)*(static_cast<const volatile char*>(source) + bytes - 1);
}
inline void sleep_nanoseconds(u32) { emulator::yield(); }
inline bool elect_one() { return emulator::cta->current % 32 == 0; }
inline void fence_proxy_async() {}
inline u64 evict_first_policy() { return 0; }

inline void complete(u64* word, int bytes) {
  barrier_of(word).add_tx(-bytes);
  barrier_of(word).advance();
}
inline void must_fit(const void* destination, size_t bytes) {
  const char* at = static_cast<const char*>(destination);
  if (at < smem || at + bytes > smem + emulator::kMaxSmem) emulator::failure = "a copy outside shared memory";
}
inline void bulk_load(void* destination, const void* source, u32 bytes, u64* word) {
  if (bytes % 16 || reinterpret_cast<u64>(source) % 16 || reinterpret_cast<u64>(destination) % 16 || bytes == 0)
    emulator::failure = "a bulk copy of an address or a size that is no multiple of 16";
  must_fit(destination, bytes);
  emulator::cta->copies.push_back([=] {
    std::memcpy(destination, source, bytes);
    complete(word, static_cast<int>(bytes));
  });
}
inline void prefetch_tensor_map(const TensorMap*) {}
inline void tensor_load(void* destination, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, u64* word, u64) {
  const int start[5] = {c0, c1, c2, c3, c4};
  int bytes = 2;
  for (int d = 0; d < 5; ++d) bytes *= static_cast<int>(map->box[d]);
  if (reinterpret_cast<u64>(destination) % 1024) emulator::failure = "a swizzled stage must lie at a multiple of 1024";
  must_fit(destination, static_cast<size_t>(bytes));
  std::vector<int> from(start, start + 5);
  emulator::cta->copies.push_back([=] {
    for (int i = 0; i < bytes / 2; ++i) {
      int rest = i;
      bool inside = true;
      u64 at = map->address;
      for (int d = 0; d < 5; ++d) {
        const long index = from[static_cast<size_t>(d)] + rest % static_cast<int>(map->box[d]);
        rest /= static_cast<int>(map->box[d]);
        inside = inside && index >= 0 && static_cast<u64>(index) < map->sizes[d];
        at += static_cast<u64>(index) * (d == 0 ? 2 : map->strides[d - 1]);
      }
      const u32 linear = static_cast<u32>(i) * 2;
      const u32 swizzled = linear ^ (((linear >> 7) & 7) << 4);
      u16 value = 0;
      if (inside) std::memcpy(&value, reinterpret_cast<const void*>(at), 2);
      std::memcpy(static_cast<char*>(destination) + swizzled, &value, 2);
    }
    complete(word, bytes);
  });
}

inline void griddepcontrol_wait() {
  if (!emulator::cta->waited && emulator::on_wait) emulator::on_wait(emulator::block_index.x);
  emulator::cta->waited = true;
}
inline void griddepcontrol_launch_dependents() {}
inline void named_barrier_arrive(int id, int num_threads) { emulator::arrive(emulator::cta->barriers[id], num_threads); }
inline void named_barrier_sync(int id, int num_threads) { emulator::meet(emulator::cta->barriers[id], num_threads); }

struct MmaOperands {
  u32 a[4], b[2];
};
template <int kK>
inline void mma(float (&d)[4], const MmaOperands& mine) {
  const auto all = emulator::gather(mine);
  const int lane = emulator::cta->current % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2, column = 2 * t + i % 2;
    float sum = d[i];
    for (int k = 0; k < kK; ++k) {
      const MmaOperands left = all[4 * g + k % 8 / 2], right = all[4 * column + k % 8 / 2];
      const u32 a = left.a[row + 2 * (k / 8)], b = right.b[k / 8];
      sum += (k % 2 ? high_to_float(a) : low_to_float(a)) * (k % 2 ? high_to_float(b) : low_to_float(b));
    }
    d[i] = sum;
  }
  emulator::gather(0);  // nobody overwrites a slot that another lane still reads
}
inline void mma_k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma<16>(d, {{a0, a1, a2, a3}, {b0, b1}}); }
inline void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b0) { mma<8>(d, {{a0, a1, 0, 0}, {b0, 0}}); }

}  // namespace cuk
