#include "selection.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    rank_units(Forcing f, const float* score, const std::int32_t* ids, unsigned* ranks, int N,
               std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t < total) ranks[t] = unit_rank(f, t / N, ids[t], score[t]);
}

// A block per row.
__global__ void __launch_bounds__(1024) select_row(TailArgs a) {
  __shared__ SelectShared shared;
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const unsigned* ranks = a.ranks + row * a.N;
  const float* score = a.score + row * a.N;
  std::int32_t* keep = a.keep + row * a.N;
  const auto rank = [=](int i) { return ranks[i]; };

  int count;
  Threshold threshold{};
  if (a.thresholds) {
    threshold = a.thresholds[row];
    const auto above = [=](int i) { return ranks[i] > threshold.rank ? 1u : kPaddingRank; };
    count = count_units(a.N, above, shared).above + threshold.ties;
  } else {
    const Counts units = count_units(a.N, rank, shared);
    count = min(units.above, max(a.budget[row], units.equal));
    if (count > 0) threshold = radix_select(a.N, count, rank, shared);
  }
  float kept = 0.0f;
  if (count > 0) {
    for_each_choice(
        a.N, threshold, rank,
        [&](int i, bool chosen, int position) {
          if (!chosen) return;
          keep[position] = i;
          kept += score[i];
        },
        shared);
  }
  for (int i = count + threadIdx.x; i < a.N; i += blockDim.x) keep[i] = -1;
  if (threadIdx.x == 0) a.keep_len[row] = count;
  float share = NAN;
  if (a.is_mass) {
    float all = 0.0f;
    for (int i = threadIdx.x; i < a.N; i += blockDim.x) {
      if (a.unit_ids[row * a.N + i] >= 0) all += score[i];
    }
    kept = block_sum(kept, scratch);
    all = block_sum(all, scratch);
    share = coverage_of(kept, all);
  }
  if (threadIdx.x == 0) a.coverage[row] = share;
}

}  // namespace

cudaError_t rank_scores(const Forcing& forcing, const float* score, const std::int32_t* ids,
                        unsigned* ranks, int N, std::int64_t rows, cudaStream_t stream) {
  const std::int64_t total = rows * N;
  KERNEL_LAUNCH((rank_units), static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads})),
                kThreads, 0, stream, forcing, score, ids, ranks, N, total);
  return cudaGetLastError();
}

cudaError_t select_rows(const TailArgs& args, std::int64_t rows, cudaStream_t stream) {
  KERNEL_LAUNCH((select_row), static_cast<unsigned>(rows), row_threads(args.N), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
