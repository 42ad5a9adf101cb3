#include "nestedkv_memories.cuh"
#include "nestedkv_score.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// What a chunk of a memory's anomalies tells of their scale.
struct Scale {
  float least, greatest;
  float top, bottom;  // sums of those above the upper threshold, and below the lower one
};

// How many anomalies of each memory are in a tail: wanted [rows, memories, 2]; a thread each.
__global__ void __launch_bounds__(kThreads)
    count_tails(NestedKVScoreArgs a, NestedSpace space, std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= total) return;
  const int n = space.counts[t / (2 * kMemories)];
  space.find.wanted[t] = n > 0 ? tail_size(a.tail, n) : 0;
}

// The grid is (rows * memories, chunks).
__global__ void __launch_bounds__(kThreads) measure_chunk(NestedKVScoreArgs a, NestedSpace space) {
  __shared__ float scratch[32];
  const std::int64_t memory = blockIdx.x;
  const int n = space.counts[memory / kMemories], first = blockIdx.y * kChunk;
  const float* values = space.anomalies + memory * a.N;
  unsigned upper = kForcedRank, lower = kForcedRank;
  if (a.adaptive) {
    upper = space.find.thresholds[memory * 2].rank;
    lower = space.find.thresholds[memory * 2 + 1].rank;
  }
  Scale scale{INFINITY, -INFINITY, 0.0f, 0.0f};
  for (int i = first + threadIdx.x; i < min(n, first + kChunk); i += kThreads) {
    const float x = values[i];
    scale.least = fminf(scale.least, x);
    scale.greatest = fmaxf(scale.greatest, x);
    if (rank_of(x) > upper) scale.top += x;
    if (rank_of(-x) > lower) scale.bottom += x;
  }
  scale.least = block_reduce(scale.least, scratch, Min{}, INFINITY);
  scale.greatest = block_reduce(scale.greatest, scratch, Max{}, -INFINITY);
  scale.top = block_sum(scale.top, scratch);
  scale.bottom = block_sum(scale.bottom, scratch);
  if (threadIdx.x == 0) {
    reinterpret_cast<Scale*>(space.parts)[memory * gridDim.y + blockIdx.y] = scale;
  }
}

// Measures a memory's scale; a warp per row and memory. The ties of a tail are one and the same.
__global__ void __launch_bounds__(kWarpSize)
    measure(NestedKVScoreArgs a, NestedSpace space, int chunks) {
  const std::int64_t memory = blockIdx.x;
  const int n = space.counts[memory / kMemories];
  const Scale* parts = reinterpret_cast<const Scale*>(space.parts) + memory * chunks;
  Scale all{INFINITY, -INFINITY, 0.0f, 0.0f};
  for (int c = threadIdx.x; c < chunks; c += kWarpSize) {
    all.least = fminf(all.least, parts[c].least);
    all.greatest = fmaxf(all.greatest, parts[c].greatest);
    all.top += parts[c].top;
    all.bottom += parts[c].bottom;
  }
  const float least = -warp_max(-all.least), greatest = warp_max(all.greatest);
  float top = warp_sum(all.top), bottom = warp_sum(all.bottom);
  if (threadIdx.x != 0 || n == 0) return;
  float difference = 0.0f;
  if (a.adaptive && greatest - least >= kFlat) {
    const Threshold upper = space.find.thresholds[memory * 2];
    const Threshold lower = space.find.thresholds[memory * 2 + 1];
    top += upper.ties * key_of(upper.rank);
    bottom -= lower.ties * key_of(lower.rank);
    difference = (top - bottom) / (tail_size(a.tail, n) * (greatest - least));
  }
  float* scale = space.scales + memory * 3;
  scale[0] = least;
  scale[1] = greatest;
  scale[2] = difference;
}

// Enqueues the scales of all memories.
void measure_scales(const NestedKVScoreArgs& args, const NestedSpace& space, cudaStream_t stream) {
  const std::int64_t memories = space.rows * kMemories;
  const int chunks = ceil_div(args.N, kChunk);
  if (args.adaptive) {
    KERNEL_LAUNCH((count_tails),
                  static_cast<unsigned>(ceil_div(2 * memories, std::int64_t{kThreads})), kThreads,
                  0, stream, args, space, 2 * memories);
    find_thresholds<Ranks::kTails>({space.anomalies, args.N, 2, space.counts, 2 * kMemories},
                                   space.find, 2 * memories, kForcedRank, stream);
  }
  KERNEL_LAUNCH((measure_chunk), dim3(static_cast<unsigned>(memories), chunks), kThreads, 0, stream,
                args, space);
  KERNEL_LAUNCH((measure), static_cast<unsigned>(memories), kWarpSize, 0, stream, args, space,
                chunks);
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
  if (a.continuum && a.adaptive) {
    const std::int64_t tails = space.rows * kMemories * 2;
    space.find = find_space(part(tails * kFindBytes / sizeof(float)), tails);
  }
  space.blocks = ceil_div(a.N, shortest);
  space.counts = reinterpret_cast<int*>(part(rows));
  space.memories = reinterpret_cast<float*>(part(rows * (1 + space.blocks) * width));
  space.anomalies = reinterpret_cast<float*>(part(rows * kMemories * tokens));
  space.scales = reinterpret_cast<float*>(part(rows * kMemories * 3));
  space.parts = reinterpret_cast<float*>(part(rows * kMemories * ceil_div(a.N, kChunk) * 4));
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
    measure_scales(args, space, stream);
    if (args.gate) KERNEL_LAUNCH((surprise), chunks, kThreads, 0, stream, args, space);
  }
  KERNEL_LAUNCH((blend), chunks, kThreads, 0, stream, args, space);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
