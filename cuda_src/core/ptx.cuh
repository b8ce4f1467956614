// Thin wrappers: one PTX instruction each, named after it. No policy, no memory-order decision lives here (see sync.cuh).
// Needs no header, so that NVRTC compiles every kernel from this tree alone.
#pragma once

namespace cuk {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// bfloat16 as its bits: storage only. Arithmetic is done in float.
struct bf16 {
  u16 bits;
};

struct alignas(16) Vec16 {
  u32 x, y, z, w;
};
static_assert(sizeof(bf16) == 2 && sizeof(Vec16) == 16, "storage types must have their hardware size");

constexpr int kWarpSize = 32;
constexpr u32 kFullMask = 0xffffffffu;

__device__ __forceinline__ u32 smem_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- bfloat16 ----

__device__ __forceinline__ float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

__device__ __forceinline__ float low_to_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_to_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ bf16 to_bf16(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

// Packs two floats, rounding to nearest even; `low` takes the lower address.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- memory ----

// Weights and tables that no kernel writes.
__device__ __forceinline__ Vec16 load_constant(const void* pointer) {
  Vec16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// Shared memory, in program order among such loads.
template <int kOffset>
__device__ __forceinline__ Vec16 load_shared(const char* pointer) {
  Vec16 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem_address(pointer)), "n"(kOffset));
  return v;
}

// Shared memory into `v` where `active`; elsewhere `v` keeps what it held, and the load costs no bank cycle.
template <int kOffset>
__device__ __forceinline__ void load_shared_if(Vec16& v, const char* pointer, bool active) {
  asm volatile(
      "{\n\t.reg .pred active;\n\t"
      "setp.ne.u32 active, %5, 0;\n\t"
      "@active ld.shared.v4.b32 {%0, %1, %2, %3}, [%4 + %6];\n\t}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "r"(smem_address(pointer)), "r"(static_cast<u32>(active)), "n"(kOffset));
}

// A pairwise select of two 16-bit halves: the low (high) halves of `a` and `b`.
__device__ __forceinline__ u32 pack_low(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 pack_high(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// ---- mbarrier ----

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
}

// True once the phase of the given parity has completed; may suspend the thread for a short while first.
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, done;\n\t}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ u64 global_nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Which SM this is: a fact for traces, never an index (nothing promises one CTA an SM in order).
__device__ __forceinline__ u32 sm_id() {
  u32 id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  return id;
}

// A wait that outlasts this stops the grid with a trap (the launch fails) instead of hanging the GPU.
constexpr u64 kHangNanoseconds = 4000000000ull;

struct Patience {
  u64 start = global_nanoseconds();
  __device__ __forceinline__ void check() const {
    if (global_nanoseconds() - start > kHangNanoseconds) __trap();
  }
};

__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
  if (mbarrier_try_wait(barrier, parity)) return;
  for (Patience patience; !mbarrier_try_wait(barrier, parity);) patience.check();
}

// True in one lane of a converged warp. The compiler knows that a branch on it holds one lane: a bulk copy in it needs no loop over
// the active lanes, which otherwise costs about 100 cycles a copy.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile(
      "{\n\t.reg .pred one;\n\t"
      "elect.sync _|one, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, one;\n\t}"
      : "=r"(elected));
  return elected != 0;
}

// ---- bulk copies (async proxy) ----

// An L2 policy for data that a step reads once: activations, tables and the kernels' own code stay in L2 in its place.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Global to shared, `bytes` a multiple of 16, both addresses 16-byte aligned; completes on `barrier`.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(destination)),
               "l"(source), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

// Asks for `bytes` (a multiple of 16, as the address is) to be brought into L2.
__device__ __forceinline__ void bulk_prefetch(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void sleep_nanoseconds(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

// A tensor map as the driver encodes it (cuTensorMapEncodeTiled): opaque.
struct alignas(128) TensorMap {
  char opaque[128];
};

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of a rank-5 tensor into shared memory; what lies outside the tensor arrives as zeros. Completes on `barrier`.
__device__ __forceinline__ void tensor_load(void* destination, const TensorMap* map, int c0, int c1, int c2, int c3, int c4,
                                            u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(smem_address(destination)),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}

// What this thread knows to be written through the generic proxy, it may now have read through the async one, and the other way round.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- programmatic dependent launch ----

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- barriers among the threads of a CTA ----

__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts as a thread that has come, and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- tensor cores, one warp: d[16, 8] += a[16, k] * b[k, 8], bf16 in, float accumulators ----
// Lane = 4 * g + t. a: rows g (a0, a2) and g + 8 (a1, a3), columns 2t, 2t+1 (a0, a1) and 2t+8, 2t+9 (a2, a3).
// b: rows 2t, 2t+1 (b0) and 2t+8, 2t+9 (b1), column g. d: row g, columns 2t, 2t+1 (d0, d1); row g + 8 (d2, d3).

__device__ __forceinline__ void mma_k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with k = 8: a0 (row g) and a1 (row g + 8) hold columns 2t, 2t+1; b0 holds rows 2t, 2t+1 of column g.
__device__ __forceinline__ void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

}  // namespace cuk
