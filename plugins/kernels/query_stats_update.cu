#include "common.cuh"
#include "query_stats_update.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;
// A block makes this many rows and columns of a moment, each thread four rows of one column.
constexpr int kTile = 32;
constexpr int kRows = kTile * kTile / kThreads;
constexpr int kSteps = 32;  // tokens in shared memory at a time

// Which tokens of a step count, and how many counted before it.
struct Step {
  int first, last;
  float before, now;

  __device__ Step(const QueryStatsUpdateArgs& a, int b) {
    const int position = a.first_position[b], used = min(a.n_new[b], a.S);
    before = static_cast<float>(max(0, position - a.sink_tokens));
    first = min(used, max(0, a.sink_tokens - position));
    last = used;
    now = static_cast<float>(last - first);
  }
};

template <class T>
__device__ __forceinline__ float query_at(const QueryStatsUpdateArgs& a, std::int64_t head, int s,
                                          int d) {
  const std::int64_t b = head / a.Hq, h = head % a.Hq;
  return to_float(static_cast<const T*>(a.queries)[((b * a.S + s) * a.Hq + h) * a.D + d]);
}

// The mean of the step's tokens, means [B * Hq, D]; a thread per element.
template <class T>
__global__ void __launch_bounds__(kThreads)
    step_means(QueryStatsUpdateArgs a, float* means, std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= total) return;
  const std::int64_t head = t / a.D;
  const int d = static_cast<int>(t % a.D);
  const Step step(a, static_cast<int>(head / a.Hq));
  float sum = 0.0f;
  for (int s = step.first; s < step.last; ++s) sum += query_at<T>(a, head, s, d);
  means[t] = sum / fmaxf(step.now, 1.0f);
}

// With n tokens of mean m before and k tokens of mean m' in the step, the moment grows by the
// step's own about m', and by (m' - m)(m' - m)^T n k / (n + k). The grid is (tiles of columns,
// tiles of rows, B * Hq).
template <class T>
__global__ void __launch_bounds__(kThreads)
    update_moments(QueryStatsUpdateArgs a, const float* means) {
  __shared__ float rows[kSteps][kTile], columns[kSteps][kTile];
  const std::int64_t head = blockIdx.z;
  const int b = static_cast<int>(head / a.Hq);
  const Step step(a, b);
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile;
  const float* mean = means + head * a.D;
  float sums[kRows] = {};
  for (int s0 = step.first; s0 < step.last; s0 += kSteps) {
    const int steps = min(kSteps, step.last - s0);
    __syncthreads();
    for (int i = y; i < steps; i += kThreads / kTile) {
      rows[i][x] = row0 + x < a.D ? query_at<T>(a, head, s0 + i, row0 + x) - mean[row0 + x] : 0.0f;
      columns[i][x] =
          column0 + x < a.D ? query_at<T>(a, head, s0 + i, column0 + x) - mean[column0 + x] : 0.0f;
    }
    __syncthreads();
    for (int i = 0; i < steps; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] += rows[i][y * kRows + r] * columns[i][x];
    }
  }
  const int column = column0 + x;
  if (column >= a.D) return;
  const bool fresh = step.before == 0.0f;  // the state may be an older sequence's
  const float both = step.before + step.now;
  const float weight = both > 0.0f ? step.before * step.now / both : 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row0 + y * kRows + r;
    if (row >= a.D) continue;
    const std::int64_t at = (head * a.D + row) * a.D + column;
    float moment = a.moment[at];
    if (a.n_new[b] > 0) {
      if (fresh) {
        moment = sums[r];
      } else if (step.now > 0.0f) {
        const float dr = mean[row] - a.mean[head * a.D + row];
        const float dc = mean[column] - a.mean[head * a.D + column];
        moment += sums[r] + dr * dc * weight;
      }
    }
    a.moment_out[at] = moment;
  }
}

// Comes last: the moments need the old means.
__global__ void __launch_bounds__(kThreads)
    update_means(QueryStatsUpdateArgs a, const float* means, std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= total) return;
  const int b = static_cast<int>(t / a.D / a.Hq);
  const Step step(a, b);
  float mean = a.mean[t];
  if (a.n_new[b] > 0) {
    if (step.before == 0.0f) {
      mean = means[t];
    } else if (step.now > 0.0f) {
      mean += (means[t] - mean) * (step.now / (step.before + step.now));
    }
  }
  a.mean_out[t] = mean;
}

}  // namespace

std::size_t query_stats_update_workspace(const QueryStatsUpdateArgs& a) {
  return sizeof(float) * a.B * a.Hq * a.D;
}

cudaError_t query_stats_update(const QueryStatsUpdateArgs& args, void* workspace,
                               cudaStream_t stream) {
  const std::int64_t heads = std::int64_t{args.B} * args.Hq, total = heads * args.D;
  if (heads > 65535) return cudaErrorInvalidValue;
  if (total == 0) return cudaSuccess;
  float* means = static_cast<float*>(workspace);
  const unsigned blocks = static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads}));
  const unsigned tiles = ceil_div(args.D, kTile);
  return with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    KERNEL_LAUNCH((step_means<T>), blocks, kThreads, 0, stream, args, means, total);
    KERNEL_LAUNCH((update_moments<T>), dim3(tiles, tiles, static_cast<unsigned>(heads)), kThreads,
                  0, stream, args, means);
    KERNEL_LAUNCH((update_means), blocks, kThreads, 0, stream, args, means, total);
  });
}

}  // namespace kvsift::kernels
