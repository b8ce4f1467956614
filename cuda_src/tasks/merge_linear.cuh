// y[b, n] = sum_k x[b, k] * w[n, k] (+ residual[b, n]), x merged from what the ranges of a split attention left:
// x[b, k] = sum_s 2^(lse[b, h, s] - max) * partials[b, s, k] / sum_s 2^(lse[b, h, s] - max), h = k / kHeadDim, s in index order.
// partials: [batch, splits, k] bf16, normalised within their range   lse: [batch, k / kHeadDim, splits] float32, logarithms to base 2 of
// the ranges' sums (-infinity: an empty one)   w, residual, y and tasks as in tasks/linear.cuh.
//
// Every CTA merges all of x while it stages it: splits * k * 2 bytes out of L2, which takes less than one exchange between
// CTAs (a post, a poll and an edge) would.
#pragma once

#include "core/projection.cuh"

namespace cuk {

template <int kHeadDim, int kSlots, int kChunkK, bool kResidual, class Out>
struct MergeLinear : Projection<kSlots, false, kChunkK, false, false, kResidual, Out> {
  using Base = Matvec<kSlots, false, kChunkK>;
  static constexpr int kDepth = 8;  // ranges loaded at a time

  struct Args {
    const TensorMap* w;
    const bf16* partials;
    const float* lse;
    const bf16* residual;
    Out* y;
    int batch, n, k, splits;
  };

  template <class Policy>
  static __device__ void prepare(const Args& a, const Crew& crew, const Team&, char* shared, char*, Policy& policy) {
    static_assert(!Policy::kPolls, "x is merged from more than one tensor");
    const int pitch = Base::x_pitch(a.k), units = a.k / 8;
    int b = 0, unit = crew.thread;  // 16 bytes of x
    policy.wait();
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (; unit >= units; ++b) unit -= units;
      if (b >= a.batch) break;
      const Vec16 x = merged(a, b, unit);
      *reinterpret_cast<Vec16*>(shared + b * pitch + unit * 16) = Vec16{x.x, x.z, x.y, x.w};  // as core/matvec.cuh wants it
      unit += crew.num_threads;
    }
    crew.sync();
  }

 private:
  static __device__ Vec16 merged(const Args& a, int b, int unit) {
    const float* lse = a.lse + (static_cast<size_t>(b) * (a.k / kHeadDim) + unit * 8 / kHeadDim) * a.splits;
    const bf16* row = a.partials + static_cast<size_t>(b) * a.splits * a.k + unit * 8;
    float maximum = -infinity(), sum = 0.f, out[8] = {};
#pragma unroll 1
    for (int first = 0; first < a.splits; first += kDepth) {
      float weight[kDepth];
      Vec16 v[kDepth];
      float top = maximum;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        weight[i] = -infinity();
        v[i] = Vec16{};
        if (first + i < a.splits) {
          weight[i] = lse[first + i];
          v[i] = *reinterpret_cast<const Vec16*>(row + static_cast<size_t>(first + i) * a.k);
        }
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) top = fmaxf(top, weight[i]);
      const float base = top == -infinity() ? 0.f : top, keep = exp2_approx(maximum - base);
      maximum = top;
      sum *= keep;
#pragma unroll
      for (float& o : out) o *= keep;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        weight[i] = exp2_approx(weight[i] - base);
        sum += weight[i];
        add(out[0], out[1], weight[i], v[i].x);
        add(out[2], out[3], weight[i], v[i].y);
        add(out[4], out[5], weight[i], v[i].z);
        add(out[6], out[7], weight[i], v[i].w);
      }
    }
    const float scale = __frcp_rn(sum);
    return Vec16{pack_bf16(out[0] * scale, out[1] * scale), pack_bf16(out[2] * scale, out[3] * scale),
                 pack_bf16(out[4] * scale, out[5] * scale), pack_bf16(out[6] * scale, out[7] * scale)};
  }
  static __device__ __forceinline__ void add(float& low, float& high, float weight, u32 pair) {
    low = fmaf(weight, low_to_float(pair), low);
    high = fmaf(weight, high_to_float(pair), high);
  }
};

}  // namespace cuk
