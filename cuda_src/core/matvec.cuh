// The main loop of every projection: partial sums of y[b, n] = sum_k x[b, k] * w[n, k] for eight rows n and b < 16.
//
// The tensor cores take eight weight rows as half of the 16-row operand and x as the 8-column one, so a batch of 1 to 8 costs the
// same weight traffic (9 to 16 take two products) and a tile can be as fine as eight rows. Cost of a tile: 16 * k bytes of weights,
// 16 * batch * k flops.
//
// A lane's 16 bytes of a weight row are four registers in a row, and go in as they are: registers 0 and 2 stand for row g, 1 and 3 for
// row g + 8. With elements 0, 1, 4, 5 of every eight of x in a column, the product's rows g in that column are the sum over those
// elements and its rows g + 8 are nothing; with elements 2, 3, 6, 7 it is the other way round. No instruction moves or clears any of them.
//
// A batch of up to four has columns for both: an even one for the first, the odd one beside it for the others, and one product for
// 512 bytes of a warp. What columns are left then go to further halves of the warp's blocks: with batch 1, columns 2 i and 2 i + 1
// are x at half i of four, everywhere else zero. One load brings a lane x for all four; a load for each half, of the few lanes that
// need it, would take shared memory as long as the weights do. A larger batch takes two products for 512 bytes, or twice two.
//
// The order of a sum is fixed by k and kSlots: warp v of the team takes the 64-column blocks v, v + 4, v + 8, …, in halves. Up to batch 4, halves
// alternate between two accumulators, and what the two columns and the groups of them hold is added at the end; beyond, the two
// products of a half have an accumulator each. Then the warps in index order.
//
// A ring stage is one box of the weights' tensor map, rank 5: 64 columns, rows, halves of the tile, blocks of 64 columns, heads. In
// shared memory it is [block][tile row][64 columns] with the 128-byte swizzle: 16-byte unit u of row r lies at u ^ r. A copy costs
// its issuer about 100 cycles whatever its size: one a stage, where eight row copies held a team to half its share of the bandwidth.
//
// Row g of the tensor-core tile is tile row g / 2 + 4 * (g % 2): the quarter-warp that reads 16 bytes a lane then covers two
// rows whose units differ in bit 2, which the swizzle keeps in different banks. x rows are padded by 64 bytes to the same end.
#pragma once

#include "core/ring.cuh"
#include "core/team.cuh"

namespace cuk {

constexpr int kTileRows = 8;    // weight rows of one tile
constexpr int kBlockK = 64;     // columns that a warp takes at a time
constexpr int kSegmentK = 256;  // columns whose squares one warp sums while it stages x
constexpr int kPadBytes = 64;

// kSlots: the batch, rounded up to a power of two. kStreamX: x does not fit in shared memory and comes through the ring with the
// weights. kChunkK: columns of one ring stage.
template <int kSlots, bool kStreamX, int kChunkK>
struct Matvec {
  static_assert(kSlots == 1 || kSlots == 2 || kSlots == 4 || kSlots == 8 || kSlots == 16,
                "a product has eight columns, or twice eight");
  static_assert(kChunkK % (kBlockK * kTeamWarps) == 0, "a stage must hold whole rounds of the team's four warps");
  static constexpr int kColumnSets = kSlots == 16 ? 2 : 1;  // of eight columns
  static constexpr int kStageWeights = kTileRows * kChunkK * 2;
  static constexpr int kBlockBytes = kTileRows * kBlockK * 2;
  static constexpr int kXPitch = kChunkK * 2 + kPadBytes;  // of a streamed x, behind the weights of its stage
  static constexpr int kBlocksPerWarp = kChunkK / (kBlockK * kTeamWarps);
  static constexpr int kHalves = 2 * kBlocksPerWarp;  // of blocks: what a warp takes of a stage
  static constexpr bool kPaired = kSlots <= 4;        // a row of x has two columns
  static constexpr int kGroups = !kPaired ? 1 : 4 / kSlots < kHalves ? 4 / kSlots : kHalves;  // of columns, a half each
  static constexpr int kAhead = kSlots < 16 && kHalves > 3 ? 3 : 1;  // halves whose loads run ahead of the products
  static constexpr bool kHasDependentLoads = kStreamX;
  static constexpr bool kStagesByChunk = false;  // where x arrives as words: not all of it before the first product
  using Tile = int;                              // its index
  template <class Args>
  static __device__ Tile tile(const Args&, int task) {
    return task;
  }

  // Team scratch: two buffers of partial sums [warp][batch][row], used by alternate tiles; then 1 / rms [batch].
  static constexpr int kPartials = kTeamWarps * kSlots * kTileRows;
  static __device__ float* partials(char* scratch, int iteration) {
    return reinterpret_cast<float*>(scratch) + (iteration & 1) * kPartials;
  }

  // Crew's shared memory: x [batch][x_pitch], elements 2, 3 and 4, 5 of each eight exchanged; then the sums of squares
  // [batch][segments].
  static __device__ int x_pitch(int k) { return round_up(k, kBlockK) * 2 + kPadBytes; }
  // Where a task's own shared operands may follow.
  static __device__ int x_bytes(int batch, int k) {
    return kStreamX ? 0 : round_up(batch * (x_pitch(k) + 4 * ceil_div(k, kSegmentK)), 16);
  }

  // ---- producer, one lane: a chunk of the tile's columns. What the projections' Args have in common: x, batch, k ----
  static __device__ int chunks_of(int k) { return ceil_div(k, kChunkK); }
  template <class Args>
  static __device__ int num_chunks(const Args& a, Tile) {
    return chunks_of(a.k);
  }
  static __device__ u32 columns_bytes(int k, int chunk) { return 2u * static_cast<u32>(min(kChunkK, k - chunk * kChunkK)); }
  template <class Args>
  static __device__ u32 chunk_bytes(const Args& a, Tile, int chunk) {
    return kStageWeights + (kStreamX ? columns_bytes(a.k, chunk) * static_cast<u32>(a.batch) : 0u);
  }
  static __device__ void load_weights(const Filling& filling, const TensorMap* w, int row, int head, int chunk) {
    filling.tile(w, row, 0, chunk * (kChunkK / kBlockK), head);
  }
  template <class Args>
  static __device__ void load_dependent(const Args& a, Tile, int chunk, const Filling& filling) {
    const u32 bytes = columns_bytes(a.k, chunk);
#pragma unroll 1
    for (int b = 0; b < a.batch; ++b)
      filling.copy(kStageWeights + b * kXPitch, a.x + static_cast<size_t>(b) * a.k + chunk * kChunkK, bytes);
  }

  // ---- crew: x into shared memory, times the norm's weight where there is one, and the squares of x summed ----
  // The product is rounded to bf16 once; 1 / rms multiplies the finished sums instead of every element. Where x arrives as words, each is
  // taken as it comes, and the kernel before may still run.
  template <bool kNorm, class Policy>
  static __device__ void stage_x(const bf16* x, const bf16* norm, int batch, int k, char* shared, const Crew& crew,
                                 Policy& policy) {
    const int units = ceil_div(k, kSegmentK) * kWarpSize;  // 16-byte units of a row, in whole warps
    const int pitch = x_pitch(k);
    float* squares = reinterpret_cast<float*>(shared + batch * pitch);
    // kDepth loads in flight a thread: one L2 latency covers a row of 8192 columns with two teams. A normalised x is as short as
    // the hidden size, and its code is long: one at a time.
    constexpr int kDepth = kNorm ? 1 : 4;
    Place at{0, crew.thread};
    at.wrap(units);
    Vec16 weight{}, v[kDepth];
    if (kNorm && at.row < batch && at.unit * 8 < k) weight = load_constant(norm + at.unit * 8);
    if constexpr (Policy::kPolls)
      x = policy.arrivals();
    else
      policy.wait();
#pragma unroll 1
    while (at.row < batch) {
      Place load = at;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        v[d] = Vec16{};
        if (load.row < batch && load.unit * 8 < k) {
          const bf16* from = x + static_cast<size_t>(load.row) * k + load.unit * 8;
          v[d] = Policy::kPolls ? peek_two(from) : *reinterpret_cast<const Vec16*>(from);
        }
        load.unit += crew.num_threads;
        load.wrap(units);
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (at.row >= batch) break;  // whole warps: units and num_threads are multiples of 32
        if constexpr (Policy::kPolls) take_two(v[d], x + static_cast<size_t>(at.row) * k + at.unit * 8, at.unit * 8 < k);
        float sum = 0.f;
        if constexpr (kNorm) {
          v[d].x = scale_and_square(v[d].x, weight.x, sum);
          v[d].y = scale_and_square(v[d].y, weight.y, sum);
          v[d].z = scale_and_square(v[d].z, weight.z, sum);
          v[d].w = scale_and_square(v[d].w, weight.w, sum);
        }
        if (at.unit * 8 < k)
          *reinterpret_cast<Vec16*>(shared + at.row * pitch + at.unit * 16) = Vec16{v[d].x, v[d].z, v[d].y, v[d].w};
        if constexpr (kNorm) {
#pragma unroll
          for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
          if (at.unit % kWarpSize == 0) squares[(at.row * units + at.unit) / kWarpSize] = sum;
        }
        at.unit += crew.num_threads;
        at.wrap(units);
        if (kNorm && at.row < batch && at.unit * 8 < k) weight = load_constant(norm + at.unit * 8);
      }
    }
    crew.sync();
  }

  // ---- stagers (kTeamThreads of them): x into shared memory a chunk at a time, as its words come, `staged` telling of each ----
  // A warp takes 256 columns of a row, `kDepth` such runs in flight, chunk after chunk.
  static constexpr int kRunsOfRow = kChunkK / kSegmentK;
  static __device__ u32 arrivals_of_chunk(int batch) { return static_cast<u32>(batch * kRunsOfRow); }
  static __device__ void stage_by_chunk(const bf16* x, int batch, int k, char* shared, u64* staged, int thread) {
    constexpr int kDepth = 4;
    const int lane = thread % kWarpSize, runs = chunks_of(k) * batch * kRunsOfRow, pitch = x_pitch(k);
    struct Run {
      int chunk, row, unit;
      __device__ Run(int index, int batch, int lane)
          : chunk(index / (batch * kRunsOfRow)),
            row(index / kRunsOfRow % batch),
            unit(chunk * (kChunkK / 8) + index % kRunsOfRow * kWarpSize + lane) {}
    };
    Vec16 v[kDepth];
#pragma unroll 1
    for (int first = thread / kWarpSize; first < runs; first += kDepth * kTeamWarps) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const Run run(first + d * kTeamWarps, batch, lane);
        if (first + d * kTeamWarps < runs && run.unit * 8 < k)
          v[d] = peek_two(x + static_cast<size_t>(run.row) * k + run.unit * 8);
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (first + d * kTeamWarps >= runs) break;
        const Run run(first + d * kTeamWarps, batch, lane);
        take_two(v[d], x + static_cast<size_t>(run.row) * k + run.unit * 8, run.unit * 8 < k);
        if (run.unit * 8 < k)
          *reinterpret_cast<Vec16*>(shared + run.row * pitch + run.unit * 16) = Vec16{v[d].x, v[d].z, v[d].y, v[d].w};
        __syncwarp();
        if (lane == 0) mbarrier_arrive(staged + run.chunk);
      }
    }
  }

  // 1 / rms of row thread / 8 of x for the threads that have its sums. Made from the staged sums of squares after the team's first
  // tile, when nothing waits for it any more, and kept in team scratch for the other tiles.
  template <class Args>
  static __device__ float inverse_rms(const Args& a, const Team& team, const char* shared, char* scratch, int iteration) {
    const int b = static_cast<int>(team.thread / kTileRows);
    float* kept = reinterpret_cast<float*>(scratch) + 2 * kPartials + b;
    if (iteration > 0) return *kept;
    const int segments = ceil_div(a.k, kSegmentK);
    const float* squares = reinterpret_cast<const float*>(shared + a.batch * x_pitch(a.k)) + b * segments;
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < segments; ++i) sum += squares[i];
    const float inverse = rsqrt_approx(fmaf(sum, rcp_approx(static_cast<float>(a.k)), a.eps));
    if (team.thread % kTileRows == 0) *kept = inverse;
    return inverse;
  }

  // What a projection does once an op: x staged, or merely waited for when it comes through the ring.
  template <bool kNorm, class Args, class Policy>
  static __device__ void prepare_x(const Args& a, const Crew& crew, char* shared, Policy& policy) {
    static_assert(!(kNorm && kStreamX), "a streamed x is normalised by an op of its own");
    if constexpr (kStreamX) {
      policy.wait();
      crew.sync();
    } else {
      stage_x<kNorm>(a.x, a.norm, a.batch, a.k, shared, crew, policy);
    }
  }

  // ---- team: the tile's sums. Returns y of (batch = thread / 8, tile row = thread % 8), for threads < 8 * kSlots ----
  // before_chunk(chunk) is called before a chunk of x is read.
  static __device__ float sums(RingConsumer& ring, const Team& team, int batch, int k, const char* shared, char* scratch,
                               int iteration) {
    return sums(ring, team, batch, k, shared, scratch, iteration, [](int) {});
  }
  template <class BeforeChunk>
  static __device__ float sums(RingConsumer& ring, const Team& team, int batch, int k, const char* shared, char* scratch,
                               int iteration, const BeforeChunk& before_chunk) {
    const int lane = team.lane(), warp = team.warp();
    const int g = lane / 4, t = lane % 4;
    const int tile_row = g / 2 + g % 2 * 4;
    const int unit[2] = {(t ^ tile_row) * 16, ((t + 4) ^ tile_row) * 16};
    const int w_offset = warp * kBlockBytes + tile_row * (kBlockK * 2);
    const int pitch = kStreamX ? kXPitch : x_pitch(k);
    // Columns past the batch hold anything: what they give is not looked at, and their loads are off.
    const int b = kPaired ? g / 2 % kSlots : g, group = kPaired ? g / 2 / kSlots : 0;
    const XLane x_lane{(kStreamX ? kStageWeights : 0) + b * pitch + warp * (kBlockK * 2) + t * 16,
                       half_offset(group),
                       8 * pitch,
                       group,
                       g % 2 != 0,
                       {group < kGroups && b < batch, g + 8 < batch}};
    float acc[kColumnSets][2][4] = {};
    Operands in;
    const int chunks = chunks_of(k);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      before_chunk(chunk);
      const char* stage = ring.wait();
      const char* w_row = stage + w_offset;
      const char* x = kStreamX ? stage : shared + chunk * (kChunkK * 2);
      if ((chunk + 1) * kChunkK <= k) {
        load_ahead<0, kAhead>(in, w_row, unit, x, x_lane);
        add_halves<0>(acc, in, w_row, unit, x, x_lane);
      } else {
#pragma unroll 1
        for (int j = 0; j < kBlocksPerWarp; ++j) {
          const int left = k - chunk * kChunkK - (warp + j * kTeamWarps) * kBlockK - t * 8;
          add_partial<0>(acc, in, w_row + j * (kTeamWarps * kBlockBytes), unit, x + j * (kTeamWarps * kBlockK * 2), x_lane,
                         left);
          add_partial<1>(acc, in, w_row + j * (kTeamWarps * kBlockBytes), unit, x + j * (kTeamWarps * kBlockK * 2), x_lane,
                         left);
        }
      }
      ring.release(lane);
    }
    float* partial = partials(scratch, iteration);
#pragma unroll
    for (int h = 0; h < kColumnSets; ++h) {
      if constexpr (kPaired) {
        float sum = (acc[h][0][0] + acc[h][0][3]) + (acc[h][1][0] + acc[h][1][3]);  // rows g of column 2 t, g + 8 of the next
#pragma unroll
        for (int step = kSlots; step < 4; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);  // over the groups
        if (t < batch) partial[(warp * kSlots + t) * kTileRows + tile_row] = sum;
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * h + 2 * t + e < batch)
            partial[(warp * kSlots + 8 * h + 2 * t + e) * kTileRows + tile_row] = acc[h][0][e] + acc[h][1][2 + e];
      }
    }
    team.sync();
    float sum = 0.f;
    if (team.thread < kTileRows * batch) {
      constexpr int kStride = kSlots * kTileRows;
      sum = ((partial[team.thread] + partial[kStride + team.thread]) + partial[2 * kStride + team.thread]) +
            partial[3 * kStride + team.thread];
    }
    return sum;
  }

 private:
  // From the first half of a chunk to another one, in bytes of x.
  static __device__ constexpr int half_offset(int half) { return half / 2 * (kTeamWarps * kBlockK * 2) + half % 2 * 64; }

  // What a lane loads of x: its unit of the chunk's first half; from there to the first half of its group, and to the column eight further.
  struct XLane {
    int offset, group_offset, high, group;
    bool odd;  // of its column
    bool active[2];
  };
  // Halves on their way to the tensor cores: of the weights the warp's i-th of a chunk in place i % (kAhead + 1); of x, kGroups at a time.
  static constexpr int kXLoads = kHalves / kGroups;  // of a stage
  static constexpr int kXPlaces = ceil_div(kAhead, kGroups) + 1 < kXLoads ? ceil_div(kAhead, kGroups) + 1 : kXLoads;
  struct Pair {
    u32 x, y;
  };
  struct Operands {
    Vec16 w[kAhead + 1], x[kXPlaces][kColumnSets] = {};
  };

  template <int i>
  static __device__ __forceinline__ void load_w(Operands& in, const char* w_row, const int (&unit)[2]) {
    in.w[i % (kAhead + 1)] = load_shared<i / 2 * (kTeamWarps * kBlockBytes)>(w_row + unit[i % 2]);
  }
  // Halves i … end - 1.
  template <int i, int end>
  static __device__ __forceinline__ void load_ahead(Operands& in, const char* w_row, const int (&unit)[2], const char* x,
                                                    const XLane& lane) {
    if constexpr (i < end) {
      load_w<i>(in, w_row, unit);
      if constexpr (i % kGroups == 0) {
#pragma unroll
        for (int h = 0; h < kColumnSets; ++h)
          load_shared_if<half_offset(i)>(in.x[i / kGroups % kXPlaces][h], x + lane.offset + lane.group_offset + h * lane.high,
                                         lane.active[h]);
      }
      load_ahead<i + 1, end>(in, w_row, unit, x, lane);
    }
  }
  // A lane's four registers of x as two: those for an even column, and for an odd one.
  static __device__ __forceinline__ Pair pair_of(const Vec16& x, bool odd) {
    const u32 first = kStreamX ? x.z : x.y, second = kStreamX ? x.y : x.z;  // as it came through the ring, or as staged
    return odd ? Pair{second, x.w} : Pair{x.x, first};
  }
  // The products of a chunk from half i on, with the loads of the half kAhead further.
  template <int i>
  static __device__ __forceinline__ void add_halves(float (&acc)[kColumnSets][2][4], Operands& in, const char* w_row,
                                                    const int (&unit)[2], const char* x, const XLane& lane) {
    if constexpr (i < kHalves) {
      if constexpr (i + kAhead < kHalves) load_ahead<i + kAhead, i + kAhead + 1>(in, w_row, unit, x, lane);
#pragma unroll
      for (int h = 0; h < kColumnSets; ++h)
        add_half<i>(acc[h], in.w[i % (kAhead + 1)], in.x[i / kGroups % kXPlaces][h], kGroups == 1 || lane.group == i % kGroups,
                    lane.odd);
      add_halves<i + 1>(acc, in, w_row, unit, x, lane);
    }
  }
  // The products of one half of a block that the row may end in, `left` columns after this lane's first.
  template <int half>
  static __device__ __forceinline__ void add_partial(float (&acc)[kColumnSets][2][4], Operands& in, const char* w_row,
                                                     const int (&unit)[2], const char* x, const XLane& lane, int left) {
    // Past the row's end the box holds the next row's columns and x whatever was there, either of which may be NaN.
    const bool counts = left > half * 32;
    load_w<half>(in, w_row, unit);
#pragma unroll
    for (int h = 0; h < kColumnSets; ++h) {
      load_shared_if<half_offset(half)>(in.x[0][h], x + lane.offset + h * lane.high, lane.active[h]);
      add_half<half>(acc[h], counts ? in.w[half] : Vec16{}, in.x[0][h], counts && lane.group == 0, lane.odd);
    }
  }
  template <int i>
  static __device__ __forceinline__ void add_half(float (&acc)[2][4], const Vec16& w, const Vec16& x, bool counts, bool odd) {
    if constexpr (kPaired) {
      const Pair b = pair_of(x, odd);
      mma_k16(acc[i % 2], w.x, w.y, w.z, w.w, counts ? b.x : 0u, counts ? b.y : 0u);
    } else {
      const Pair even = pair_of(x, false), other = pair_of(x, true);
      mma_k16(acc[0], w.x, w.y, w.z, w.w, counts ? even.x : 0u, counts ? even.y : 0u);
      mma_k16(acc[1], w.x, w.y, w.z, w.w, counts ? other.x : 0u, counts ? other.y : 0u);
    }
  }

  // A 16-byte unit of x.
  struct Place {
    int row, unit;
    __device__ void wrap(int units) {
#pragma unroll 1
      for (; unit >= units; ++row) unit -= units;
    }
  };

  static __device__ u32 scale_and_square(u32 x, u32 weight, float& sum) {
    const float low = low_to_float(x), high = high_to_float(x);
    sum = fmaf(low, low, sum);
    sum = fmaf(high, high, sum);
    return pack_bf16(low * low_to_float(weight), high * high_to_float(weight));
  }
};

}  // namespace cuk
