#include "head_topk_select.h"
#include "selection.cuh"

namespace kvsift::kernels {
namespace {

// Places that a row has in any case, and most that it may have.
struct Places {
  int safe, most;
};

// The whole part of a share of a budget.
__device__ __forceinline__ int share(float ratio, int budget) {
  const double exact = static_cast<double>(ratio) * budget + kShareRounding;
  return exact < INT_MAX ? static_cast<int>(exact) : INT_MAX;
}

// A block per row: ranks become kForcedRank for the safe units, kPaddingRank for those that cannot
// be kept, and stay where units compete.
__global__ void __launch_bounds__(1024)
    split_row(HeadTopKSelectArgs a, unsigned* all_ranks, Places* places) {
  __shared__ SelectShared shared;
  const std::int64_t row = blockIdx.x;
  unsigned* ranks = all_ranks + row * a.N;
  const auto rank = [=](int i) { return ranks[i]; };
  const Counts units = count_units(a.N, rank, shared);
  const int budget = max(0, a.budget[row]);
  int most = units.above;
  if (a.max_head_ratio > 0.0f) most = min(most, max(units.equal, share(a.max_head_ratio, budget)));
  const int safe = min(most, max(units.equal, share(a.safeguard, budget)));
  // Each thread visits the same units every time, so it sees its own changes.
  Threshold threshold{kForcedRank, 0};
  if (most > 0) threshold = radix_select(a.N, most, rank, shared);
  for_each_choice(
      a.N, threshold, rank,
      [&](int i, bool chosen, int) {
        if (!chosen) ranks[i] = kPaddingRank;
      },
      shared);
  if (safe > 0) {
    for_each_choice(
        a.N, radix_select(a.N, safe, rank, shared), rank,
        [&](int i, bool chosen, int) {
          if (chosen) ranks[i] = kForcedRank;
        },
        shared);
  }
  if (threadIdx.x == 0) places[row] = {safe, most};
}

// A block per layer and slot: the free places go to the highest ranks of all rows, and so each row
// gets a threshold of its own.
__global__ void __launch_bounds__(1024) compete(HeadTopKSelectArgs a, const unsigned* all_ranks,
                                                const Places* places, Threshold* thresholds) {
  __shared__ SelectShared shared;
  const std::int64_t first = std::int64_t{blockIdx.x} * a.R;
  const unsigned* ranks = all_ranks + first * a.N;
  std::int64_t budget = 0, safe = 0, room = 0;
  for (int r = 0; r < a.R; ++r) {
    budget += max(0, a.budget[first + r]);
    safe += places[first + r].safe;
    room += places[first + r].most - places[first + r].safe;
  }
  const std::int64_t left = max(budget - safe, std::int64_t{0});
  const int free_places = static_cast<int>(min(left, room));
  const auto rival = [=](int i) { return ranks[i] == kForcedRank ? kPaddingRank : ranks[i]; };
  Threshold threshold{kForcedRank - 1, 0};
  if (free_places > 0) threshold = radix_select(a.R * a.N, free_places, rival, shared);
  for (int r = 0; r < a.R; ++r) {
    const unsigned* mine = ranks + std::int64_t{r} * a.N;
    const auto equal = [=](int i) { return mine[i] == threshold.rank ? 1u : kPaddingRank; };
    const int ties = min(threshold.ties, count_units(a.N, equal, shared).above);
    if (threadIdx.x == 0) thresholds[first + r] = {threshold.rank, ties};
    threshold.ties -= ties;
  }
}

}  // namespace

std::size_t head_topk_select_workspace(const HeadTopKSelectArgs& a) {
  return std::size_t{1} * a.L * a.E * a.R *
         (sizeof(unsigned) * a.N + sizeof(Places) + sizeof(Threshold));
}

cudaError_t head_topk_select(const HeadTopKSelectArgs& args, void* workspace, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{args.L} * args.E * args.R;
  if (args.block_size < 1 || std::int64_t{args.R} * args.N > INT_MAX) return cudaErrorInvalidValue;
  if (rows * args.N == 0) return cudaSuccess;
  unsigned* ranks = static_cast<unsigned*>(workspace);
  Places* places = reinterpret_cast<Places*>(ranks + rows * args.N);
  Threshold* thresholds = reinterpret_cast<Threshold*>(places + rows);
  rank_scores(forcing(args), args.score, args.unit_ids, ranks, args.N, rows, stream);
  KERNEL_LAUNCH((split_row), static_cast<unsigned>(rows), row_threads(args.N), 0, stream, args,
                ranks, places);
  KERNEL_LAUNCH((compete), static_cast<unsigned>(rows / args.R), row_threads(args.R * args.N), 0,
                stream, args, ranks, places, thresholds);
  return select_rows({ranks, args.score, args.unit_ids, args.budget, thresholds, args.keep,
                      args.keep_len, args.coverage, args.N, args.score_is_mass != 0},
                     rows, stream);
}

}  // namespace kvsift::kernels
