#include "find.cuh"
#include "head_topk_select.h"
#include "tally.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// Places that a row has in any case, and most that it may have.
struct Places {
  int safe, most;
};

// The whole part of a share of a budget.
__device__ __forceinline__ int share(float ratio, int budget) {
  const double exact = static_cast<double>(ratio) * budget + kShareRounding;
  return exact < INT_MAX ? static_cast<int>(exact) : INT_MAX;
}

// The places of a row of `units` units, of which `forced` are forced.
__device__ __forceinline__ Places places_of(const HeadTopKSelectArgs& a, std::int64_t row,
                                            Counts units) {
  const int budget = max(0, a.budget[row]);
  int most = units.above;
  if (a.max_head_ratio > 0.0f) most = min(most, max(units.equal, share(a.max_head_ratio, budget)));
  return {min(most, max(units.equal, share(a.safeguard, budget))), most};
}

// The places of the rows of layer and slot `group` that no row has for sure.
__device__ int free_places(const HeadTopKSelectArgs& a, const Places* places, std::int64_t group) {
  std::int64_t budget = 0, safe = 0, room = 0;
  for (std::int64_t row = group * a.R; row < (group + 1) * a.R; ++row) {
    budget += max(0, a.budget[row]);
    safe += places[row].safe;
    room += places[row].most - places[row].safe;
  }
  return static_cast<int>(min(max(budget - safe, std::int64_t{0}), room));
}

// Below the safe units, which rank as forced ones, and above all others.
constexpr unsigned kSafeOnly = kForcedRank - 1;

// A block per row: ranks become kForcedRank for the safe units, kPaddingRank for those that cannot
// be kept, and stay where units compete.
__global__ void __launch_bounds__(1024)
    split_row(HeadTopKSelectArgs a, unsigned* all_ranks, Places* places) {
  __shared__ SelectShared shared;
  const std::int64_t row = blockIdx.x;
  unsigned* ranks = all_ranks + row * a.N;
  const auto rank = [=](int i) { return ranks[i]; };
  const Places mine = places_of(a, row, count_units(a.N, rank, shared));
  // Each thread visits the same units every time, so it sees its own changes.
  Threshold threshold{kForcedRank, 0};
  if (mine.most > 0) threshold = radix_select(a.N, mine.most, rank, shared);
  for_each_choice(
      0, a.N, threshold.rank, {0, threshold.ties}, rank,
      [&](int i, bool chosen, int) {
        if (!chosen) ranks[i] = kPaddingRank;
      },
      shared);
  if (mine.safe > 0) {
    threshold = radix_select(a.N, mine.safe, rank, shared);
    for_each_choice(
        0, a.N, threshold.rank, {0, threshold.ties}, rank,
        [&](int i, bool chosen, int) {
          if (chosen) ranks[i] = kForcedRank;
        },
        shared);
  }
  if (threadIdx.x == 0) places[row] = mine;
}

// The same for long rows: how many of the highest ranks may be kept, and are safe, wanted [rows,
// 2]; a warp per row.
__global__ void __launch_bounds__(kWarpSize)
    count_places(HeadTopKSelectArgs a, const Counts* tallies, int chunks, Places* places,
                 int* wanted) {
  const std::int64_t row = blockIdx.x;
  const Places mine = places_of(a, row, sum_tallies(tallies + row * chunks, chunks));
  if (threadIdx.x != 0) return;
  places[row] = mine;
  wanted[row * 2] = mine.most;
  wanted[row * 2 + 1] = mine.safe;
}

// ... then the ranks, given both thresholds [rows, 2] and their tallies [rows, 2, chunks]; the grid
// is (rows, chunks).
__global__ void __launch_bounds__(kThreads)
    split_chunk(HeadTopKSelectArgs a, unsigned* all_ranks, const Threshold* thresholds,
                const Counts* tallies) {
  __shared__ SelectShared shared;
  __shared__ int taken[2];
  const std::int64_t row = blockIdx.x;
  const int chunks = gridDim.y, first = blockIdx.y * kChunk, last = min(a.N, first + kChunk);
  if (threadIdx.x < kWarpSize) {
    for (int k = 0; k < 2; ++k) {
      const Counts sum = sum_tallies(tallies + (row * 2 + k) * chunks, blockIdx.y);
      if (threadIdx.x == 0) taken[k] = min(sum.equal, thresholds[row * 2 + k].ties);
    }
  }
  __syncthreads();
  unsigned* ranks = all_ranks + row * a.N;
  const auto rank = [=](int i) { return ranks[i]; };
  const Threshold most = thresholds[row * 2], safe = thresholds[row * 2 + 1];
  for_each_choice(
      first, last, most.rank, {0, most.ties - taken[0]}, rank,
      [&](int i, bool chosen, int) {
        if (!chosen) ranks[i] = kPaddingRank;
      },
      shared);
  for_each_choice(
      first, last, safe.rank, {0, safe.ties - taken[1]}, rank,
      [&](int i, bool chosen, int) {
        if (chosen) ranks[i] = kForcedRank;
      },
      shared);
}

// A block per layer and slot: the free places go to the highest ranks of all rows, and so each row
// gets a threshold of its own.
__global__ void __launch_bounds__(1024) compete(HeadTopKSelectArgs a, const unsigned* all_ranks,
                                                const Places* places, Threshold* thresholds) {
  __shared__ SelectShared shared;
  const std::int64_t first = std::int64_t{blockIdx.x} * a.R;
  const unsigned* ranks = all_ranks + first * a.N;
  const int places_left = free_places(a, places, blockIdx.x);
  const auto rival = [=](int i) { return ranks[i] == kForcedRank ? kPaddingRank : ranks[i]; };
  Threshold threshold{kSafeOnly, 0};
  if (places_left > 0) threshold = radix_select(a.R * a.N, places_left, rival, shared);
  for (int r = 0; r < a.R; ++r) {
    const unsigned* mine = ranks + std::int64_t{r} * a.N;
    const auto equal = [=](int i) { return mine[i] == threshold.rank ? 1u : kPaddingRank; };
    const int ties = min(threshold.ties, count_units(a.N, equal, shared).above);
    if (threadIdx.x == 0) thresholds[first + r] = {threshold.rank, ties};
    threshold.ties -= ties;
  }
}

// The same for long rows: a thread per layer and slot tells how many ranks of its rows are wanted,
__global__ void __launch_bounds__(kThreads)
    count_free(HeadTopKSelectArgs a, const Places* places, int* wanted, std::int64_t groups) {
  const std::int64_t group = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (group < groups) wanted[group] = free_places(a, places, group);
}

// ... and hands out the ties; a warp per layer and slot.
__global__ void __launch_bounds__(kWarpSize)
    share_ties(HeadTopKSelectArgs a, const Threshold* found, const Counts* tallies, int chunks,
               Threshold* thresholds) {
  const std::int64_t group = blockIdx.x;
  Threshold threshold = found[group];
  for (std::int64_t row = group * a.R; row < (group + 1) * a.R; ++row) {
    const int ties = min(threshold.ties, sum_tallies(tallies + row * chunks, chunks).equal);
    if (threadIdx.x == 0) thresholds[row] = {threshold.rank, ties};
    threshold.ties -= ties;
  }
}

// Parts of the workspace, aligned to 8.
struct Space {
  FindSpace find;  // of two groups a row: also what select_rows takes
  Counts* tallies;
  Threshold* thresholds;
  Places* places;
  unsigned* ranks;
  std::size_t bytes;
};

Space space_of(const HeadTopKSelectArgs& a, char* workspace) {
  const std::int64_t rows = std::int64_t{a.L} * a.E * a.R;
  Space space{};
  const auto part = [&](std::size_t size) {
    char* at = workspace ? workspace + space.bytes : nullptr;
    space.bytes += size;
    return at;
  };
  const std::size_t tallies = spreads(a.N) ? 2 * rows * ceil_div(a.N, kChunk) : 0;
  space.find = find_space(part(spreads(a.N) ? 2 * rows * kFindBytes : 0), 2 * rows);
  space.tallies = reinterpret_cast<Counts*>(part(tallies * sizeof(Counts)));
  space.thresholds = reinterpret_cast<Threshold*>(part(rows * sizeof(Threshold)));
  space.places = reinterpret_cast<Places*>(part(rows * sizeof(Places)));
  space.ranks = reinterpret_cast<unsigned*>(part(rows * a.N * sizeof(unsigned)));
  return space;
}

// Splits and competes with many blocks.
void spread(const HeadTopKSelectArgs& args, const Space& space, std::int64_t rows,
            cudaStream_t stream) {
  const int chunks = ceil_div(args.N, kChunk);
  const std::int64_t groups = rows / args.R;
  count_chunks({space.ranks, args.N, 1, nullptr, 1}, space.tallies, rows, stream);
  KERNEL_LAUNCH((count_places), static_cast<unsigned>(rows), kWarpSize, 0, stream, args,
                space.tallies, chunks, space.places, space.find.wanted);
  find_thresholds<Ranks::kGiven>({space.ranks, args.N, 2, nullptr, 1}, space.find, 2 * rows,
                                 kForcedRank, stream);
  count_chunks({space.ranks, args.N, 2, space.find.thresholds, 1}, space.tallies, 2 * rows, stream);
  KERNEL_LAUNCH((split_chunk), dim3(static_cast<unsigned>(rows), chunks), kThreads, 0, stream, args,
                space.ranks, space.find.thresholds, space.tallies);
  KERNEL_LAUNCH((count_free), static_cast<unsigned>(ceil_div(groups, std::int64_t{kThreads})),
                kThreads, 0, stream, args, space.places, space.find.wanted, groups);
  find_thresholds<Ranks::kRivals>({space.ranks, std::int64_t{args.R} * args.N, 1, nullptr, 1},
                                  space.find, groups, kSafeOnly, stream);
  count_chunks({space.ranks, args.N, 1, space.find.thresholds, args.R}, space.tallies, rows,
               stream);
  KERNEL_LAUNCH((share_ties), static_cast<unsigned>(groups), kWarpSize, 0, stream, args,
                space.find.thresholds, space.tallies, chunks, space.thresholds);
}

}  // namespace

std::size_t head_topk_select_workspace(const HeadTopKSelectArgs& a) {
  return space_of(a, nullptr).bytes;
}

cudaError_t head_topk_select(const HeadTopKSelectArgs& args, void* workspace, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{args.L} * args.E * args.R;
  if (args.block_size < 1 || std::int64_t{args.R} * args.N > INT_MAX) return cudaErrorInvalidValue;
  if (rows * args.N == 0) return cudaSuccess;
  const Space space = space_of(args, static_cast<char*>(workspace));
  rank_scores(forcing(args), args.score, args.unit_ids, space.ranks, args.N, rows, stream);
  if (spreads(args.N)) {
    spread(args, space, rows, stream);
  } else {
    KERNEL_LAUNCH((split_row), static_cast<unsigned>(rows), row_threads(args.N), 0, stream, args,
                  space.ranks, space.places);
    KERNEL_LAUNCH((compete), static_cast<unsigned>(rows / args.R), row_threads(args.R * args.N), 0,
                  stream, args, space.ranks, space.places, space.thresholds);
  }
  return select_rows({space.ranks, args.score, args.unit_ids, args.budget, space.thresholds,
                      args.keep, args.keep_len, args.coverage, args.N, args.score_is_mass != 0},
                     rows, workspace, stream);
}

}  // namespace kvsift::kernels
