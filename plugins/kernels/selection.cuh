// What the selectors share: ranking keys of units, and the exact choice of the highest of them.
//
// A unit's rank is one uint32: 0 for padding, then the clamped fp32 key in its order, then
// kForcedRank. So a choice is a radix select on integers, and equal keys are equal ranks, which go
// to the lower index.
#pragma once

#include "common.cuh"

namespace kvsift::kernels {

constexpr unsigned kPaddingRank = 0;
constexpr unsigned kForcedRank = 0xffffffffu;

// The rank of a key: clamped to finite values, NaN the lowest of them, -0 the same as 0.
KVSIFT_HD unsigned rank_of(float key) {
  if (!(key >= -FLT_MAX)) key = -FLT_MAX;  // NaN and -inf
  if (key > FLT_MAX) key = FLT_MAX;
  if (key == 0.0f) key = 0.0f;
  const union {
    float f;
    unsigned u;
  } bits = {key};
  return bits.u & 0x80000000u ? ~bits.u : bits.u | 0x80000000u;
}

// The key of a rank that a finite key has.
KVSIFT_HD float key_of(unsigned rank) {
  const union {
    unsigned u;
    float f;
  } bits = {rank & 0x80000000u ? rank & 0x7fffffffu : ~rank};
  return bits.f;
}

// What makes a unit forced; the same members as in the Args of every selector.
struct Forcing {
  const std::int32_t* tokens_seen;
  const std::int32_t* pin_spans;
  std::int32_t E, R, P, block_size, sink_units, recent_units;
};

template <class Args>
Forcing forcing(const Args& a) {
  return {a.tokens_seen, a.pin_spans, a.E, a.R, a.P, a.block_size, a.sink_units, a.recent_units};
}

// Whether unit `id` (not -1) of slot e is a sink, recent, or met by a pinned span.
__device__ __forceinline__ bool is_forced(const Forcing& f, int e, int id) {
  if (id < f.sink_units) return true;
  if (id >= static_cast<std::int64_t>(f.tokens_seen[e] / f.block_size) - f.recent_units) {
    return true;
  }
  const std::int64_t first = static_cast<std::int64_t>(id) * f.block_size;
  for (int p = 0; p < f.P; ++p) {
    const int start = f.pin_spans[(e * f.P + p) * 2], end = f.pin_spans[(e * f.P + p) * 2 + 1];
    if (start < end && first < end && start < first + f.block_size) return true;
  }
  return false;
}

// The rank of unit `id` of a row whose key is `key`.
__device__ __forceinline__ unsigned unit_rank(const Forcing& f, std::int64_t row, int id,
                                              float key) {
  if (id < 0) return kPaddingRank;
  return is_forced(f, static_cast<int>(row / f.R % f.E), id) ? kForcedRank : rank_of(key);
}

// The k highest ranks are those above `rank` and the first `ties` equal to it. On the way there:
// the bytes of it that are found, and how many ranks that begin so are needed.
struct Threshold {
  unsigned rank;
  int ties;
};

struct SelectShared {
  unsigned bins[256];
  unsigned rank;
  int need;
  int above[32], equal[32];
};

// Counts a digit; most keys of a row share their leading bits, so a warp that agrees adds at once.
__device__ __forceinline__ void count_digit(unsigned* bins, bool counts, unsigned digit) {
  const unsigned lanes = __ballot_sync(kAllLanes, counts);
  if (lanes == 0) return;
  const unsigned first = __shfl_sync(kAllLanes, digit, __ffs(lanes) - 1);
  const bool agree = __all_sync(kAllLanes, !counts || digit == first);
  if (!agree) {
    if (counts) atomicAdd(&bins[digit], 1u);
  } else if (threadIdx.x % kWarpSize == 0) {
    atomicAdd(&bins[first], static_cast<unsigned>(__popc(lanes)));
  }
}

// One byte further towards a threshold: `bins` counts the ranks that begin with `state.rank` by
// their byte at `shift`, of which the state.ties highest are needed. Every thread of the block must
// call it.
__device__ __forceinline__ Threshold narrowed(const unsigned* bins, Threshold state, int shift,
                                              SelectShared& s) {
  const int lane = threadIdx.x;
  if (lane < kWarpSize) {  // lane l holds the bins 255 - 8l and the seven below
    int sum = 0;
    for (int j = 0; j < 8; ++j) sum += bins[255 - 8 * lane - j];
    int upto = sum;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, upto, offset);
      if (lane >= offset) upto += other;
    }
    int before = upto - sum;
    if (before < state.ties && upto >= state.ties) {
      int j = 0;
      while (before + static_cast<int>(bins[255 - 8 * lane - j]) < state.ties) {
        before += bins[255 - 8 * lane - j];
        ++j;
      }
      s.rank = state.rank | static_cast<unsigned>(255 - 8 * lane - j) << shift;
      s.need = state.ties - before;
    }
  }
  __syncthreads();
  return {s.rank, s.need};
}

// Finds the threshold of the k highest of n ranks (1 <= k <= n) with a whole block, whose threads
// are a multiple of 32. `rank(i)` gives rank i.
template <class Rank>
__device__ Threshold radix_select(int n, int k, Rank rank, SelectShared& s) {
  const int tid = threadIdx.x, threads = blockDim.x;
  unsigned mask = 0;
  Threshold state{0, k};
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = tid; i < 256; i += threads) s.bins[i] = 0;
    __syncthreads();
    for (int base = 0; base < n; base += threads) {
      const int i = base + tid;
      const unsigned r = i < n ? rank(i) : 0;
      count_digit(s.bins, i < n && (r & mask) == state.rank, r >> shift & 255);
    }
    __syncthreads();
    state = narrowed(s.bins, state, shift, s);
    mask |= 255u << shift;
  }
  return state;
}

// Adds up two small counts over the block's threads: before this one, and in all.
struct Counts {
  int above, equal;
};
__device__ __forceinline__ Counts count_before(bool above, bool equal, SelectShared& s,
                                               Counts& total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const unsigned a = __ballot_sync(kAllLanes, above), b = __ballot_sync(kAllLanes, equal);
  __syncthreads();  // the counts of an earlier call have been read
  if (lane == 0) {
    s.above[warp] = __popc(a);
    s.equal[warp] = __popc(b);
  }
  __syncthreads();
  const unsigned lower = (1u << lane) - 1;
  Counts before{__popc(a & lower), __popc(b & lower)};
  total = {0, 0};
  for (int w = 0; w < warps; ++w) {
    if (w == warp) {
      before.above += total.above;
      before.equal += total.equal;
    }
    total.above += s.above[w];
    total.equal += s.equal[w];
  }
  return before;
}

// How far a choice has come: places taken, and ties still to take.
struct Chosen {
  int taken, ties;
};

// Calls visit(i, chosen, position) for each of the ranks [first, last) with a whole block: the
// chosen ones take the next positions, in index order.
template <class Rank, class Visit>
__device__ Chosen for_each_choice(int first, int last, unsigned limit, Chosen so_far, Rank rank,
                                  Visit visit, SelectShared& s) {
  for (int base = first; base < last; base += blockDim.x) {
    const int i = base + threadIdx.x;
    const unsigned r = i < last ? rank(i) : 0;
    const bool above = i < last && r > limit, equal = i < last && r == limit;
    Counts total;
    const Counts before = count_before(above, equal, s, total);
    const bool chosen = above || (equal && before.equal < so_far.ties);
    const int position = so_far.taken + before.above + min(before.equal, so_far.ties);
    if (i < last) visit(i, chosen, position);
    const int ties = min(total.equal, so_far.ties);
    so_far.taken += total.above + ties;
    so_far.ties -= ties;
  }
  return so_far;
}

// How many of the row's n ranks are units, and how many of them forced.
template <class Rank>
__device__ Counts count_units(int n, Rank rank, SelectShared& s) {
  Counts counts{0, 0};  // above: units; equal: forced
  for (int base = 0; base < n; base += blockDim.x) {
    const int i = base + threadIdx.x;
    const unsigned r = i < n ? rank(i) : kPaddingRank;
    Counts total;
    count_before(r != kPaddingRank, r == kForcedRank, s, total);
    counts.above += total.above;
    counts.equal += total.equal;
  }
  return counts;
}

// The share of the kept scores in all, NaN if that is no number or zero.
__device__ __forceinline__ float coverage_of(float kept, float all) {
  return isfinite(all) && all != 0.0f ? kept / all : NAN;
}

// What a selector's tail reads and writes: rows of N.
struct TailArgs {
  const unsigned* ranks;
  const float* score;
  const std::int32_t* unit_ids;
  // How many units a row keeps; where `thresholds` is given, those say which.
  const std::int32_t* budget;
  const Threshold* thresholds;
  std::int32_t* keep;
  std::int32_t* keep_len;
  float* coverage;
  std::int32_t N;
  bool is_mass;
};

// Enqueues the ranks [rows, N] of units whose keys are their scores.
void rank_scores(const Forcing& forcing, const float* score, const std::int32_t* ids,
                 unsigned* ranks, int N, std::int64_t rows, cudaStream_t stream);

// Bytes, a multiple of 8, that select_rows needs.
std::size_t select_workspace(std::int64_t rows, int N);

// Enqueues the choice of each of `rows` rows: one block does a short row, several a long one. The
// results are the same, bit for bit.
cudaError_t select_rows(const TailArgs& args, std::int64_t rows, void* workspace,
                        cudaStream_t stream);

// Threads of a block that handles a whole row of n.
inline unsigned row_threads(std::int64_t n) { return n <= 8 * kChunk ? 256 : 1024; }

}  // namespace kvsift::kernels
