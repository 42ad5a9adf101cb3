#include "selection.cuh"
#include "topk_select.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    rank_scores(Forcing f, const float* score, const std::int32_t* ids, unsigned* ranks, int N,
                std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t < total) ranks[t] = unit_rank(f, t / N, ids[t], score[t]);
}

}  // namespace

std::size_t topk_select_workspace(const TopKSelectArgs& a) {
  return sizeof(unsigned) * a.L * a.E * a.R * a.N;
}

cudaError_t topk_select(const TopKSelectArgs& args, void* workspace, cudaStream_t stream) {
  if (args.block_size < 1) return cudaErrorInvalidValue;
  const std::int64_t rows = std::int64_t{args.L} * args.E * args.R, total = rows * args.N;
  if (total == 0) return cudaSuccess;
  unsigned* ranks = static_cast<unsigned*>(workspace);
  KERNEL_LAUNCH((rank_scores), static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads})),
                kThreads, 0, stream, forcing(args), args.score, args.unit_ids, ranks, args.N,
                total);
  return select_rows({ranks, args.score, args.budget, args.keep, args.keep_len, args.coverage,
                      args.N, args.score_is_mass != 0},
                     rows, stream);
}

}  // namespace kvsift::kernels
