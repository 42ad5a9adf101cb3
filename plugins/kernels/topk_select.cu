#include "selection.cuh"
#include "topk_select.h"

namespace kvsift::kernels {
std::size_t topk_select_workspace(const TopKSelectArgs& a) {
  const std::int64_t rows = std::int64_t{a.L} * a.E * a.R;
  return select_workspace(rows, a.N) + sizeof(unsigned) * rows * a.N;
}

cudaError_t topk_select(const TopKSelectArgs& args, void* workspace, cudaStream_t stream) {
  if (args.block_size < 1) return cudaErrorInvalidValue;
  const std::int64_t rows = std::int64_t{args.L} * args.E * args.R, total = rows * args.N;
  if (total == 0) return cudaSuccess;
  unsigned* ranks =
      reinterpret_cast<unsigned*>(static_cast<char*>(workspace) + select_workspace(rows, args.N));
  rank_scores(forcing(args), args.score, args.unit_ids, ranks, args.N, rows, stream);
  return select_rows({ranks, args.score, args.unit_ids, args.budget, nullptr, args.keep,
                      args.keep_len, args.coverage, args.N, args.score_is_mass != 0},
                     rows, workspace, stream);
}

}  // namespace kvsift::kernels
