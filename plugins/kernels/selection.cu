#include "find.cuh"
#include "selection.cuh"
#include "tally.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    rank_units(Forcing f, const float* score, const std::int32_t* ids, unsigned* ranks, int N,
               std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t < total) ranks[t] = unit_rank(f, t / N, ids[t], score[t]);
}

// The kept score and all score of a chunk, or of some.
struct Mass {
  float kept, all;
};

// Writes the choice in the chunk from `first` on; its mass is in `mass`, the same in every thread.
__device__ Chosen place_chunk(const TailArgs& a, std::int64_t row, int first, unsigned limit,
                              Chosen so_far, Mass& mass, SelectShared& shared, float* scratch) {
  const unsigned* ranks = a.ranks + row * a.N;
  const float* score = a.score + row * a.N;
  std::int32_t* keep = a.keep + row * a.N;
  const int last = min(a.N, first + kChunk);
  float kept = 0.0f;
  so_far = for_each_choice(
      first, last, limit, so_far, [=](int i) { return ranks[i]; },
      [&](int i, bool chosen, int position) {
        if (!chosen) return;
        keep[position] = i;
        kept += score[i];
      },
      shared);
  mass = {0.0f, 0.0f};
  if (a.is_mass) {
    float all = 0.0f;
    for (int i = first + threadIdx.x; i < last; i += kThreads) {
      if (a.unit_ids[row * a.N + i] >= 0) all += score[i];
    }
    mass = {block_sum(kept, scratch), block_sum(all, scratch)};
  }
  return so_far;
}

// A block per row.
__global__ void __launch_bounds__(kThreads) select_row(TailArgs a) {
  __shared__ SelectShared shared;
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const unsigned* ranks = a.ranks + row * a.N;
  const auto rank = [=](int i) { return ranks[i]; };

  int count;
  Threshold threshold{kForcedRank, 0};
  if (a.thresholds) {
    threshold = a.thresholds[row];
    const auto above = [=](int i) { return ranks[i] > threshold.rank ? 1u : kPaddingRank; };
    count = count_units(a.N, above, shared).above + threshold.ties;
  } else {
    const Counts units = count_units(a.N, rank, shared);
    count = min(units.above, max(a.budget[row], units.equal));
    if (count > 0) threshold = radix_select(a.N, count, rank, shared);
  }
  Chosen chosen{0, threshold.ties};
  Mass mass{0.0f, 0.0f};
  for (int first = 0; first < a.N; first += kChunk) {
    Mass here;
    chosen = place_chunk(a, row, first, threshold.rank, chosen, here, shared, scratch);
    mass = {mass.kept + here.kept, mass.all + here.all};
  }
  for (int i = count + threadIdx.x; i < a.N; i += kThreads) a.keep[row * a.N + i] = -1;
  if (threadIdx.x == 0) {
    a.keep_len[row] = count;
    a.coverage[row] = a.is_mass ? coverage_of(mass.kept, mass.all) : NAN;
  }
}

// How many units each row keeps, also as the number wanted of its ranks; a warp per row.
__global__ void __launch_bounds__(kWarpSize)
    count_kept(TailArgs a, const Counts* tallies, int chunks, int* wanted) {
  const std::int64_t row = blockIdx.x;
  const Counts total = sum_tallies(tallies + row * chunks, chunks);
  const int count = a.thresholds ? total.above + a.thresholds[row].ties
                                 : min(total.above, max(a.budget[row], total.equal));
  if (threadIdx.x != 0) return;
  a.keep_len[row] = count;
  wanted[row] = count;
}

// Writes the choice of a chunk; the grid is (rows, chunks).
__global__ void __launch_bounds__(kThreads)
    place(TailArgs a, const Threshold* thresholds, const Counts* tallies, Mass* parts) {
  __shared__ SelectShared shared;
  __shared__ float scratch[32];
  __shared__ Counts before;
  const std::int64_t row = blockIdx.x;
  const int chunks = gridDim.y, first = blockIdx.y * kChunk;
  if (threadIdx.x < kWarpSize) {
    const Counts sum = sum_tallies(tallies + row * chunks, blockIdx.y);
    if (threadIdx.x == 0) before = sum;
  }
  __syncthreads();
  const Threshold threshold = thresholds[row];
  const int ties = min(before.equal, threshold.ties);
  Mass mass;
  place_chunk(a, row, first, threshold.rank, {before.above + ties, threshold.ties - ties}, mass,
              shared, scratch);
  if (threadIdx.x == 0) parts[row * chunks + blockIdx.y] = mass;
  const int last = min(a.N, first + kChunk);
  for (int i = max(first, a.keep_len[row]) + threadIdx.x; i < last; i += kThreads) {
    a.keep[row * a.N + i] = -1;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_coverage(TailArgs a, const Mass* parts, int chunks, std::int64_t rows) {
  const std::int64_t row = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (row >= rows) return;
  Mass mass{0.0f, 0.0f};
  for (int c = 0; c < chunks && a.is_mass; ++c) {
    const Mass here = parts[row * chunks + c];
    mass = {mass.kept + here.kept, mass.all + here.all};
  }
  a.coverage[row] = a.is_mass ? coverage_of(mass.kept, mass.all) : NAN;
}

}  // namespace

void rank_scores(const Forcing& forcing, const float* score, const std::int32_t* ids,
                 unsigned* ranks, int N, std::int64_t rows, cudaStream_t stream) {
  const std::int64_t total = rows * N;
  KERNEL_LAUNCH((rank_units), static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads})),
                kThreads, 0, stream, forcing, score, ids, ranks, N, total);
}

std::size_t select_workspace(std::int64_t rows, int N) {
  if (!spreads(N)) return 0;
  return rows * (kFindBytes + ceil_div(N, kChunk) * (sizeof(Counts) + sizeof(Mass)));
}

cudaError_t select_rows(const TailArgs& args, std::int64_t rows, void* workspace,
                        cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(rows);
  if (!spreads(args.N)) {
    KERNEL_LAUNCH((select_row), blocks, kThreads, 0, stream, args);
    return cudaGetLastError();
  }
  const int chunks = ceil_div(args.N, kChunk);
  const FindSpace space = find_space(workspace, rows);
  Counts* tallies = reinterpret_cast<Counts*>(static_cast<char*>(workspace) + kFindBytes * rows);
  Mass* parts = reinterpret_cast<Mass*>(tallies + rows * chunks);
  const Threshold* thresholds = args.thresholds ? args.thresholds : space.thresholds;
  count_chunks({args.ranks, args.N, 1, args.thresholds, 1}, tallies, rows, stream);
  KERNEL_LAUNCH((count_kept), blocks, kWarpSize, 0, stream, args, tallies, chunks, space.wanted);
  if (!args.thresholds) {
    find_thresholds<Ranks::kGiven>({args.ranks, args.N, 1, nullptr, 1}, space, rows, kForcedRank,
                                   stream);
    count_chunks({args.ranks, args.N, 1, thresholds, 1}, tallies, rows, stream);
  }
  KERNEL_LAUNCH((place), dim3(blocks, chunks), kThreads, 0, stream, args, thresholds, tallies,
                parts);
  KERNEL_LAUNCH((add_coverage), static_cast<unsigned>(ceil_div(rows, std::int64_t{kThreads})),
                kThreads, 0, stream, args, parts, chunks, rows);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
