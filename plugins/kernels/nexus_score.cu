#include "common.cuh"
#include "nexus_score.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;
// Most window rows that the walk visits.
constexpr int kMaxSteps = 64;

// Which window row step i of the walk visits.
__device__ __forceinline__ int walk_row(const NexusScoreArgs& a, int steps, int i) {
  switch (static_cast<WalkOrder>(a.walk_order)) {
    case WalkOrder::kNewestFirst:
      return a.W - 1 - i;
    case WalkOrder::kStrided:
      return a.W - 1 - (steps - 1 - i) * a.W / steps;
    default:
      return a.W - steps + i;
  }
}

// Where the inner product of steps j < i lies among the steps' products.
__device__ __forceinline__ int pair_index(int i, int j) { return i * (i - 1) / 2 + j; }

// What the first kernel makes of each chunk of a row: the products of the walk's rows.
struct Layout {
  int steps, pairs, chunks;
};

__device__ __forceinline__ float mass_at(const NexusScoreArgs& a, std::int64_t row, int w, int j) {
  return a.mass[(row * a.W + w) * a.N + j];
}

// Adds the products of a chunk of units; a warp per pair, lanes over the units. The rows of queries
// that see no key get no weight later, so whatever they hold is left out there.
__global__ void __launch_bounds__(kThreads)
    chunk_products(NexusScoreArgs a, Layout layout, float* products) {
  const std::int64_t row = blockIdx.x;
  const int first = blockIdx.y * kChunk, last = min(a.N, first + kChunk);
  float* out = products + (row * layout.chunks + blockIdx.y) * layout.pairs;
  const int lane = threadIdx.x % kWarpSize, warps = kThreads / kWarpSize;
  for (int p = threadIdx.x / kWarpSize; p < layout.pairs; p += warps) {
    int i = 1;
    while (pair_index(i + 1, 0) <= p) ++i;
    const int wi = walk_row(a, layout.steps, i);
    const int wj = walk_row(a, layout.steps, p - pair_index(i, 0));
    float sum = 0.0f;
    for (int n = first + lane; n < last; n += kWarpSize) {
      sum += mass_at(a, row, wi, n) * mass_at(a, row, wj, n);
    }
    sum = warp_sum(sum);
    if (lane == 0) out[p] = sum;
  }
}

// The ids of a row, the queries that see a key, and the factor of each of the walk's rows.
struct Row {
  int lowest, highest;
  int first_seen;  // queries below see no key
  float factors[kMaxSteps];
};

// Finds the lowest and highest id; padding is -1.
__device__ void find_range(const NexusScoreArgs& a, std::int64_t row, Row& r) {
  if (threadIdx.x == 0) {
    r.lowest = INT_MAX;
    r.highest = -1;
  }
  __syncthreads();
  int lowest = INT_MAX, highest = -1;
  for (int j = threadIdx.x; j < a.N; j += kThreads) {
    const int id = a.unit_ids[row * a.N + j];
    if (id < 0) continue;
    lowest = min(lowest, id);
    highest = max(highest, id);
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (threadIdx.x % kWarpSize == 0) {
    atomicMin(&r.lowest, lowest);
    atomicMax(&r.highest, highest);
  }
  __syncthreads();
}

// gamma_i = 1 + sum over j < i of <row_i, row_j> gamma_j, then divided by the norm of the walk,
// which is the sum of gamma over the rows in use since each row sums to 1. The products of a pair
// are the sum over chunks, in order.
__device__ void solve_walk(const NexusScoreArgs& a, Layout layout, const float* products,
                           std::int64_t row, float* pairs, Row& r) {
  for (int p = threadIdx.x; p < layout.pairs; p += kThreads) {
    float sum = 0.0f;
    for (int c = 0; c < layout.chunks; ++c) {
      sum += products[(row * layout.chunks + c) * layout.pairs + p];
    }
    pairs[p] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  const int lane = threadIdx.x;
  float norm = 0.0f;
  for (int i = 0; i < layout.steps; ++i) {
    float gamma = 0.0f;
    const bool used = walk_row(a, layout.steps, i) >= r.first_seen;
    for (int j = lane; used && j < i; j += kWarpSize) {
      if (r.factors[j] != 0.0f) gamma += pairs[pair_index(i, j)] * r.factors[j];
    }
    gamma = used ? 1.0f + warp_sum(gamma) : 0.0f;
    if (lane == 0) r.factors[i] = gamma;
    __syncwarp();
    norm += gamma;
  }
  for (int i = lane; i < layout.steps; i += kWarpSize) {
    r.factors[i] *= a.walk_lambda / fmaxf(norm, 1.0f);
  }
}

// Every block of a row repeats the small work on its range and its walk.
__global__ void __launch_bounds__(kThreads)
    score_units(NexusScoreArgs a, Layout layout, const float* products) {
  __shared__ Row r;
  DYN_SHARED(float, pairs);
  const std::int64_t row = blockIdx.x;
  const int e = static_cast<int>(row / a.R % a.E);
  find_range(a, row, r);
  if (threadIdx.x == 0) {
    // Query w stands at seen - W + w and sees the keys from lowest * block_size on.
    const std::int64_t oldest = std::int64_t{r.lowest} * a.block_size;
    const std::int64_t first = oldest - (std::int64_t{a.tokens_seen[e]} - a.W);
    r.first_seen = static_cast<int>(min(max(first, std::int64_t{0}), std::int64_t{a.W}));
  }
  __syncthreads();
  solve_walk(a, layout, products, row, pairs, r);
  __syncthreads();

  const float queries = static_cast<float>(max(1, a.W - r.first_seen));
  const float span = static_cast<float>(max(1, r.highest - r.lowest));
  for (int j = blockIdx.y * kChunk + threadIdx.x;
       j < min(a.N, (static_cast<int>(blockIdx.y) + 1) * kChunk); j += kThreads) {
    const int id = a.unit_ids[row * a.N + j];
    if (id < 0) {
      a.score[row * a.N + j] = -INFINITY;
      continue;
    }
    float mean = 0.0f, walk = 0.0f;
    for (int w = r.first_seen; w < a.W; ++w) mean += mass_at(a, row, w, j);
    for (int i = 0; i < layout.steps; ++i) {
      const int w = walk_row(a, layout.steps, i);
      if (w >= r.first_seen) walk += r.factors[i] * mass_at(a, row, w, j);
    }
    const float ramp = static_cast<float>(id - r.lowest) / span;
    a.score[row * a.N + j] = mean / queries + walk + a.tie_eps * ramp;
  }
}

Layout layout_of(const NexusScoreArgs& a) {
  const bool walks = a.walk_lambda != 0.0f;
  const int steps = walks ? (a.walk_steps < a.W ? a.walk_steps : a.W) : 0;
  return {steps, steps * (steps - 1) / 2, ceil_div(a.N, kChunk)};
}

}  // namespace

std::size_t nexus_score_workspace(const NexusScoreArgs& a) {
  const Layout layout = layout_of(a);
  return sizeof(float) * a.L * a.E * a.R * layout.chunks * layout.pairs;
}

cudaError_t nexus_score(const NexusScoreArgs& args, void* workspace, cudaStream_t stream) {
  if (args.walk_steps < 0 || args.walk_steps > kMaxSteps || args.block_size < 1) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t rows = std::int64_t{args.L} * args.E * args.R;
  if (rows * args.N == 0) return cudaSuccess;
  const Layout layout = layout_of(args);
  float* products = static_cast<float*>(workspace);
  const dim3 grid(static_cast<unsigned>(rows), layout.chunks);
  if (layout.pairs > 0) {
    KERNEL_LAUNCH((chunk_products), grid, kThreads, 0, stream, args, layout, products);
  }
  KERNEL_LAUNCH((score_units), grid, kThreads, sizeof(float) * layout.pairs, stream, args, layout,
                products);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
