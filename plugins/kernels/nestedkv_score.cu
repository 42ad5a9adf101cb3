#include "nestedkv_memories.cuh"
#include "nestedkv_score.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// The sum of the p greatest of n values, with a whole block; `sign` -1 takes the p least.
__device__ float tail_sum(const float* values, int n, int p, float sign, SelectShared& shared,
                          float* scratch) {
  const auto rank = [=](int i) { return rank_of(sign * values[i]); };
  const Threshold threshold = radix_select(n, p, rank, shared);
  float sum = 0.0f, tied = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    if (rank(i) > threshold.rank) sum += values[i];
    if (rank(i) == threshold.rank) tied = values[i];
  }
  // The tied values are one and the same.
  tied = block_reduce(tied, scratch, [](float a, float b) { return a != 0.0f ? a : b; }, 0.0f);
  return block_sum(sum, scratch) + threshold.ties * tied;
}

// Measures a memory's scale; the grid is (rows, memories).
__global__ void __launch_bounds__(1024) measure(NestedKVScoreArgs a, NestedSpace space) {
  __shared__ SelectShared shared;
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row];
  if (n == 0) return;
  const float* values = space.anomalies + (row * kMemories + blockIdx.y) * a.N;
  float least = INFINITY, greatest = -INFINITY;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    least = fminf(least, values[i]);
    greatest = fmaxf(greatest, values[i]);
  }
  least = block_reduce(least, scratch, Min{}, INFINITY);
  greatest = block_reduce(greatest, scratch, Max{}, -INFINITY);
  float difference = 0.0f;
  if (a.adaptive && greatest - least >= kFlat) {
    const int p = tail_size(a.tail, n);
    const float top = tail_sum(values, n, p, 1.0f, shared, scratch);
    const float bottom = tail_sum(values, n, p, -1.0f, shared, scratch);
    difference = (top - bottom) / (p * (greatest - least));
  }
  if (threadIdx.x == 0) {
    float* scale = space.scales + (row * kMemories + blockIdx.y) * 3;
    scale[0] = least;
    scale[1] = greatest;
    scale[2] = difference;
  }
}

// (x - least) / (greatest - least), 0 where the span says nothing.
__device__ __forceinline__ float scaled(float x, float least, float greatest) {
  const float span = greatest - least;
  return span >= kFlat ? (x - least) / span : 0.0f;
}

// A token's three anomalies on their scales.
struct Token {
  float x[kMemories];

  __device__ __forceinline__ Token(const NestedKVScoreArgs& a, const NestedSpace& space,
                                   std::int64_t row, int j) {
    for (int k = 0; k < kMemories; ++k) {
      const std::int64_t at = row * kMemories + k;
      x[k] = scaled(space.anomalies[at * a.N + j], space.scales[at * 3], space.scales[at * 3 + 1]);
    }
  }
  // Population standard deviation.
  __device__ __forceinline__ float spread() const {
    const float mean = (x[0] + x[1] + x[2]) / 3.0f;
    float square = 0.0f;
    for (int k = 0; k < kMemories; ++k) square += (x[k] - mean) * (x[k] - mean);
    return sqrtf(square / 3.0f);
  }
};

// Least, greatest and sum of the spread over a chunk; the grid is (rows, chunks).
__global__ void __launch_bounds__(kThreads) surprise(NestedKVScoreArgs a, NestedSpace space) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const int first = blockIdx.y * kChunk, last = min(space.counts[row], first + kChunk);
  float least = INFINITY, greatest = -INFINITY, sum = 0.0f;
  for (int j = first + threadIdx.x; j < last; j += kThreads) {
    const float s = Token(a, space, row, j).spread();
    least = fminf(least, s);
    greatest = fmaxf(greatest, s);
    sum += s;
  }
  least = block_reduce(least, scratch, Min{}, INFINITY);
  greatest = block_reduce(greatest, scratch, Max{}, -INFINITY);
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) {
    float* part = space.surprise + (row * gridDim.y + blockIdx.y) * 3;
    part[0] = least;
    part[1] = greatest;
    part[2] = sum;
  }
}

// The weights of the memories: softmax(log prior + beta * difference).
__device__ void blend_weights(const NestedKVScoreArgs& a, const float* scales, float* weights) {
  const float priors[kMemories] = {a.prior_stable, a.prior_episodic, a.prior_current};
  float most = -INFINITY, sum = 0.0f;
  for (int k = 0; k < kMemories; ++k) most = fmaxf(most, a.beta * scales[3 * k + 2]);
  for (int k = 0; k < kMemories; ++k) {
    weights[k] = priors[k] * expf(a.beta * scales[3 * k + 2] - most);
    sum += weights[k];
  }
  for (int k = 0; k < kMemories; ++k) weights[k] /= sum;
}

// The grid is (rows, chunks).
__global__ void __launch_bounds__(kThreads) blend(NestedKVScoreArgs a, NestedSpace space) {
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row];
  const int first = blockIdx.y * kChunk, last = min(a.N, first + kChunk);
  float least = INFINITY, greatest = -INFINITY, sum = 0.0f, weights[kMemories] = {};
  if (n > 0 && a.continuum) {
    blend_weights(a, space.scales + row * kMemories * 3, weights);
    for (int c = 0; c < static_cast<int>(gridDim.y) && a.gate; ++c) {
      const float* part = space.surprise + (row * gridDim.y + c) * 3;
      least = fminf(least, part[0]);
      greatest = fmaxf(greatest, part[1]);
      sum += part[2];
    }
  }
  const float mean = n > 0 ? scaled(sum / n, least, greatest) : 0.0f;
  for (int j = first + threadIdx.x; j < last; j += kThreads) {
    float score = -INFINITY;
    if (j < n && !a.continuum) {
      score = space.anomalies[row * kMemories * a.N + j];
    } else if (j < n) {
      const Token t(a, space, row, j);
      score = weights[0] * t.x[0] + weights[1] * t.x[1] + weights[2] * t.x[2];
      if (a.gate) {
        const float s = fmaxf(0.0f, scaled(t.spread(), least, greatest) - mean);
        const float alpha = 1.0f / (1.0f + expf(-a.kappa * (s - a.tau)));
        score = (1.0f - alpha) * score + alpha * fmaxf(t.x[0], fmaxf(t.x[1], t.x[2]));
      }
    }
    a.score[row * a.N + j] = score;
  }
}

// Takes the parts of the workspace in turn; from null it measures them.
NestedSpace space_of(const NestedKVScoreArgs& a, char* workspace, std::size_t& bytes) {
  bytes = 0;
  const auto part = [&](std::size_t size) {
    char* at = workspace ? workspace + bytes : nullptr;
    bytes += size * sizeof(float);
    return at;
  };
  const std::size_t rows = std::size_t{1} * a.E * a.R, tokens = a.N, width = a.D;
  const int shortest = a.block_min < a.block_max ? a.block_min : a.block_max;
  NestedSpace space{};
  space.rows = static_cast<std::int64_t>(rows);
  space.blocks = ceil_div(a.N, shortest);
  space.counts = reinterpret_cast<int*>(part(rows));
  space.memories = reinterpret_cast<float*>(part(rows * (1 + space.blocks) * width));
  space.anomalies = reinterpret_cast<float*>(part(rows * kMemories * tokens));
  space.scales = reinterpret_cast<float*>(part(rows * kMemories * 3));
  space.surprise = reinterpret_cast<float*>(part(rows * ceil_div(a.N, kChunk) * 3));
  return space;
}

}  // namespace

std::size_t nestedkv_score_workspace(const NestedKVScoreArgs& args) {
  if (args.block_min < 1 || args.block_max < 1) return 0;
  std::size_t bytes;
  space_of(args, nullptr, bytes);
  return bytes;
}

cudaError_t nestedkv_score(const NestedKVScoreArgs& args, void* workspace, cudaStream_t stream) {
  if (!rows_fit(args) || args.block_min < 1 || args.block_max < 1 || args.block_div < 1 ||
      args.window < 1) {
    return cudaErrorInvalidValue;
  }
  if (args.E * args.R == 0 || args.N == 0) return cudaSuccess;
  std::size_t bytes;
  const NestedSpace space = space_of(args, static_cast<char*>(workspace), bytes);
  if (space.blocks >= 65535) return cudaErrorInvalidValue;
  const cudaError_t error = compare_with_memories(args, space, stream);
  if (error != cudaSuccess) return error;
  const unsigned rows = static_cast<unsigned>(space.rows);
  const dim3 chunks(rows, ceil_div(args.N, kChunk));
  if (args.continuum) {
    KERNEL_LAUNCH((measure), dim3(rows, kMemories), row_threads(args.N), 0, stream, args, space);
    if (args.gate) KERNEL_LAUNCH((surprise), chunks, kThreads, 0, stream, args, space);
  }
  KERNEL_LAUNCH((blend), chunks, kThreads, 0, stream, args, space);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
