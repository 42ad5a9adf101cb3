#include "knorm_score.h"
#include "rows.cuh"

namespace kvsift::kernels {
namespace {

// Keys that a group of lanes reads; all their loads are in flight together.
constexpr int kKeys = 8;

// The grid is (rows, parts of a row); a block's keys lie side by side.
template <class T>
__global__ void __launch_bounds__(kRowThreads) score_norms(KNormScoreArgs a, int lanes) {
  const std::int64_t row = blockIdx.x;
  const UnitRows<T> units = unit_rows<T>(a, a.keys, row);
  const int groups = kRowThreads / lanes;
  const int first = blockIdx.y * groups * kKeys + threadIdx.x / lanes;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int j = first + i * groups;
    const bool valid = units.valid(j);
    RowPart<T> key;
    key.load(units.rows + std::int64_t{j} * a.D, valid, a.D, lanes);
    const float square = row_sum(key.dot(key), lanes);
    if (j < a.N && threadIdx.x % lanes == 0) {
      a.score[row * a.N + j] = valid ? -sqrtf(square) : -INFINITY;
    }
  }
}

}  // namespace

std::size_t knorm_score_workspace(const KNormScoreArgs&) { return 0; }

cudaError_t knorm_score(const KNormScoreArgs& args, void*, cudaStream_t stream) {
  if (!rows_fit(args)) return cudaErrorInvalidValue;
  const unsigned rows = args.E * args.R;
  if (rows == 0 || args.N == 0) return cudaSuccess;
  const int lanes = row_lanes(args.dtype, args.D);
  const dim3 grid(rows, ceil_div(args.N, kRowThreads / lanes * kKeys));
  return with_float(args.dtype, [&](auto type) {
    KERNEL_LAUNCH((score_norms<decltype(type)>), grid, kRowThreads, 0, stream, args, lanes);
  });
}

}  // namespace kvsift::kernels
