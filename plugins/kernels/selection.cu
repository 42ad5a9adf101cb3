#include "selection.cuh"

namespace kvsift::kernels {
namespace {

// A block per row.
__global__ void __launch_bounds__(1024) select_row(TailArgs a) {
  __shared__ SelectShared shared;
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const unsigned* ranks = a.ranks + row * a.N;
  const float* score = a.score + row * a.N;
  std::int32_t* keep = a.keep + row * a.N;
  const auto rank = [=](int i) { return ranks[i]; };

  const Counts units = count_units(a.N, rank, shared);
  const int count = min(units.above, max(a.budget[row], units.equal));
  float kept = 0.0f;
  if (count > 0) {
    Threshold threshold = radix_select(a.N, count, rank, shared);
    for_chosen(
        a.N, threshold, rank,
        [&](int i, int position) {
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
      if (ranks[i] != kPaddingRank) all += score[i];
    }
    kept = block_sum(kept, scratch);
    all = block_sum(all, scratch);
    share = coverage_of(kept, all);
  }
  if (threadIdx.x == 0) a.coverage[row] = share;
}

}  // namespace

cudaError_t select_rows(const TailArgs& args, std::int64_t rows, cudaStream_t stream) {
  KERNEL_LAUNCH((select_row), static_cast<unsigned>(rows), row_threads(args.N), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
