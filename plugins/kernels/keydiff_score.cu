#include "keydiff_score.h"
#include "rows.cuh"

namespace kvsift::kernels {
namespace {

// Sums k / |k| and the units of a chunk of a row: sums [rows, chunks, D + 1], the count last.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    sum_directions(KeyDiffScoreArgs a, int lanes, float* sums) {
  __shared__ float shared[kRowThreads * RowPart<T>::kSize];
  const std::int64_t row = blockIdx.x;
  const UnitRows<T> units = unit_rows<T>(a, a.keys, row);
  float* sum = sums + (row * gridDim.y + blockIdx.y) * (a.D + 1);
  const int groups = kRowThreads / lanes, first = blockIdx.y * kChunk;
  RowPart<T> total;
  total.clear();
  int count = 0;
#pragma unroll 4
  for (int i = 0; i < kChunk; i += groups) {
    const int j = first + i + threadIdx.x / lanes;
    const bool valid = units.valid(j);
    RowPart<T> key;
    key.load(units.rows + std::int64_t{j} * a.D, valid, a.D, lanes);
    total.add(key, inverse_norm(row_sum(key.dot(key), lanes)));
    count += valid && threadIdx.x % lanes == 0;
  }
  sum_groups<T>(total, a.D, lanes, shared, [=](int d, float x) { sum[d] = x; });
  const float units_here = block_sum(static_cast<float>(count), shared);
  if (threadIdx.x == 0) sum[a.D] = units_here;
}

// The direction of the mean of each row, means [rows, D]; a block per row.
__global__ void __launch_bounds__(kRowThreads)
    mean_direction(int D, int chunks, const float* sums, float* means) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const float* sum = sums + row * chunks * (D + 1);
  float* mean = means + row * D;
  float count = 0.0f;
  for (int c = 0; c < chunks; ++c) count += sum[c * (D + 1) + D];
  float square = 0.0f;
  for (int d = threadIdx.x; d < D; d += kRowThreads) {
    float x = 0.0f;
    for (int c = 0; c < chunks; ++c) x += sum[c * (D + 1) + d];
    x /= fmaxf(count, 1.0f);
    mean[d] = x;
    square += x * x;
  }
  const float factor = inverse_norm(block_sum(square, scratch));
  for (int d = threadIdx.x; d < D; d += kRowThreads) mean[d] *= factor;
}

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    score_directions(KeyDiffScoreArgs a, int lanes, const float* means) {
  constexpr int kKeys = 8;
  const std::int64_t row = blockIdx.x;
  const UnitRows<T> units = unit_rows<T>(a, a.keys, row);
  const int groups = kRowThreads / lanes;
  RowPart<T> mean;
  mean.load_floats(means + row * a.D, a.D, lanes);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int j = (blockIdx.y * kKeys + i) * groups + threadIdx.x / lanes;
    const bool valid = units.valid(j);
    RowPart<T> key;
    key.load(units.rows + std::int64_t{j} * a.D, valid, a.D, lanes);
    const float factor = inverse_norm(row_sum(key.dot(key), lanes));
    const float along = row_sum(key.dot(mean), lanes);
    if (j < a.N && threadIdx.x % lanes == 0) {
      a.score[row * a.N + j] = valid ? -along * factor : -INFINITY;
    }
  }
}

}  // namespace

std::size_t keydiff_score_workspace(const KeyDiffScoreArgs& a) {
  const std::size_t chunks = ceil_div(a.N, kChunk);
  return sizeof(float) * a.E * a.R * (chunks * (a.D + 1) + a.D);
}

cudaError_t keydiff_score(const KeyDiffScoreArgs& args, void* workspace, cudaStream_t stream) {
  if (!rows_fit(args)) return cudaErrorInvalidValue;
  const unsigned rows = args.E * args.R;
  if (rows == 0 || args.N == 0) return cudaSuccess;
  const int lanes = row_lanes(args.dtype, args.D), chunks = ceil_div(args.N, kChunk);
  float* sums = static_cast<float*>(workspace);
  float* means = sums + std::size_t{rows} * chunks * (args.D + 1);
  const dim3 grid(rows, ceil_div(args.N, kRowThreads / lanes * 8));
  return with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    KERNEL_LAUNCH((sum_directions<T>), dim3(rows, chunks), kRowThreads, 0, stream, args, lanes,
                  sums);
    KERNEL_LAUNCH((mean_direction), rows, kRowThreads, 0, stream, args.D, chunks, sums, means);
    KERNEL_LAUNCH((score_directions<T>), grid, kRowThreads, 0, stream, args, lanes, means);
  });
}

}  // namespace kvsift::kernels
