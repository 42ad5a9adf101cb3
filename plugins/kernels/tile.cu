#include "tile.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) spread(SpreadArgs a, std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= total) return;
  const int d = static_cast<int>(t % a.D), w = static_cast<int>(t / a.D % a.W);
  const T* queries = static_cast<const T*>(a.queries) + d;
  float sum = 0.0f;
  if (a.averaged) {
    const std::int64_t e = t / a.D / a.W;
    for (int h = 0; h < a.Hq; ++h) {
      sum += to_float(queries[((e * a.W + w) * a.Hq + h) * a.D]);
    }
  } else {
    const std::int64_t head = t / a.D / a.W;  // e * Hq + h
    sum = to_float(queries[((head / a.Hq * a.W + w) * a.Hq + head % a.Hq) * a.D]);
  }
  a.rows[t] = sum * a.scale;
}

// A warp per row of parts: lanes take every 32nd, then pairs of lanes merge. What an empty part
// adds changes no bit.
__global__ void __launch_bounds__(kThreads)
    merge(const LogSum* parts, float* log_sums, std::int64_t n, int chunks) {
  const std::int64_t row = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  LogSum sum = empty_log_sum();
  for (int c = lane; row < n && c < chunks; c += kWarpSize) {
    sum = merged(sum, parts[row * chunks + c]);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const LogSum other{__shfl_xor_sync(kAllLanes, sum.max, offset),
                       __shfl_xor_sync(kAllLanes, sum.sum, offset)};
    sum = merged(sum, other);
  }
  if (row < n && lane == 0) log_sums[row] = log_of(sum);
}

// Sums over a chunk of a row; the grid is (rows, chunks).
__global__ void __launch_bounds__(kThreads)
    chunk_log_sums(int N, const float* logits, LogSum* parts) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const int first = blockIdx.y * kChunk, last = min(N, first + kChunk);
  float max = -INFINITY, sum = 0.0f;
  for (int j = first + threadIdx.x; j < last; j += kThreads) {
    max = fmaxf(max, logits[row * N + j]);
  }
  max = block_reduce(max, scratch, Max{}, -INFINITY);
  for (int j = first + threadIdx.x; j < last; j += kThreads) {
    if (max != -INFINITY) sum += expf(logits[row * N + j] - max);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) parts[row * gridDim.y + blockIdx.y] = {max, sum};
}

}  // namespace

cudaError_t spread_queries(FloatType type, const SpreadArgs& args, cudaStream_t stream) {
  const std::int64_t heads = args.averaged ? 1 : args.Hq;
  const std::int64_t total = heads * args.E * args.W * args.D;
  const unsigned blocks = static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads}));
  return with_float(type, [&](auto zero) {
    KERNEL_LAUNCH((spread<decltype(zero)>), blocks, kThreads, 0, stream, args, total);
  });
}

void sum_logits(const float* logits, LogSum* parts, std::int64_t rows, int N, cudaStream_t stream) {
  KERNEL_LAUNCH((chunk_log_sums), dim3(static_cast<unsigned>(rows), ceil_div(N, kChunk)), kThreads,
                0, stream, N, logits, parts);
}

void merge_log_sums(const LogSum* parts, float* log_sums, std::int64_t n, int chunks,
                    cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(n, std::int64_t{kThreads / kWarpSize}));
  KERNEL_LAUNCH((merge), blocks, kThreads, 0, stream, parts, log_sums, n, chunks);
}

}  // namespace kvsift::kernels
