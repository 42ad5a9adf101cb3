#include "reservoir_select.h"
#include "selection.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;
// Least weight: keeps ln(u) / w finite in fp32.
constexpr float kWeightFloor = 1e-20f;
// What normalised weights of a row sum to.
constexpr float kWeightSum = 1.5f;

// Sums the finite positive weights of a chunk of a row; the grid is (rows, chunks).
__global__ void __launch_bounds__(kThreads) sum_weights(ReservoirSelectArgs a, float* sums) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const int first = blockIdx.y * kChunk, last = min(a.N, first + kChunk);
  float sum = 0.0f;
  for (int i = first + threadIdx.x; i < last; i += kThreads) {
    const float w = a.score[row * a.N + i];
    if (a.unit_ids[row * a.N + i] >= 0 && isfinite(w) && w > 0.0f) sum += w;
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) sums[row * gridDim.y + blockIdx.y] = sum;
}

// log pi = logsumexp_i(ln(u_i) / w) - ln n, of draws that are `stride` apart.
__device__ float priority(const float* u, std::int64_t stride, int n, float w) {
  w = fmaxf(w, kWeightFloor);
  LogSum total = empty_log_sum();
  for (int i = 0; i < n; ++i) total = merged(total, {logf(u[i * stride]) / w, 1.0f});
  return log_of(total) - logf(static_cast<float>(n));
}

__global__ void __launch_bounds__(kThreads)
    rank_draws(ReservoirSelectArgs a, Forcing f, const float* sums, unsigned* ranks) {
  __shared__ float total;
  const std::int64_t row = blockIdx.x;
  if (a.normalize) {
    if (threadIdx.x == 0) {
      const int chunks = ceil_div(a.N, kChunk);
      total = 0.0f;
      for (int c = 0; c < chunks; ++c) total += sums[row * chunks + c];
    }
    __syncthreads();
  }
  const int j = blockIdx.y * kThreads + threadIdx.x;
  if (j >= a.N) return;
  const std::int64_t at = row * a.N + j;
  const int id = a.unit_ids[at];
  float key = NAN;
  float w = a.score[at];
  if (id >= 0 && !isnan(w)) {
    if (a.normalize) w *= kWeightSum / fmaxf(total, kWeightFloor);
    key = priority(a.u + row * a.n * a.N + j, a.N, a.n, w);
  }
  ranks[at] = unit_rank(f, row, id, key);
}

}  // namespace

std::size_t reservoir_select_workspace(const ReservoirSelectArgs& a) {
  const std::size_t rows = std::size_t{1} * a.L * a.E * a.R;
  return select_workspace(rows, a.N) +
         rows * (sizeof(unsigned) * a.N + sizeof(float) * ceil_div(a.N, kChunk));
}

cudaError_t reservoir_select(const ReservoirSelectArgs& args, void* workspace,
                             cudaStream_t stream) {
  if (args.block_size < 1 || args.n < 1) return cudaErrorInvalidValue;
  const std::int64_t rows = std::int64_t{args.L} * args.E * args.R;
  if (rows * args.N == 0) return cudaSuccess;
  unsigned* ranks =
      reinterpret_cast<unsigned*>(static_cast<char*>(workspace) + select_workspace(rows, args.N));
  float* sums = reinterpret_cast<float*>(ranks + rows * args.N);
  const unsigned blocks = static_cast<unsigned>(rows);
  if (args.normalize) {
    KERNEL_LAUNCH((sum_weights), dim3(blocks, ceil_div(args.N, kChunk)), kThreads, 0, stream, args,
                  sums);
  }
  KERNEL_LAUNCH((rank_draws), dim3(blocks, ceil_div(args.N, kThreads)), kThreads, 0, stream, args,
                forcing(args), sums, ranks);
  return select_rows({ranks, args.score, args.unit_ids, args.budget, nullptr, args.keep,
                      args.keep_len, args.coverage, args.N, args.score_is_mass != 0},
                     rows, workspace, stream);
}

}  // namespace kvsift::kernels
