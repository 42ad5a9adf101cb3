// HeadTopKSelect: the heads of a layer compete for its budget.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// Added before a share of a budget is rounded down, so that fp32 and fp64 agree on 0.1 * 30.
constexpr double kShareRounding = 1e-3;

// Tensors as of TopKSelect; the R rows of a layer and slot compete.
struct HeadTopKSelectArgs : HeadTopKSelect::Attrs {
  const float* score;
  const std::int32_t* budget;
  const std::int32_t* unit_ids;
  const std::int32_t* tokens_seen;
  const std::int32_t* pin_spans;
  std::int32_t* keep;
  std::int32_t* keep_len;
  float* coverage;
  std::int32_t L, E, R, N, P;
};

std::size_t head_topk_select_workspace(const HeadTopKSelectArgs& args);
cudaError_t head_topk_select(const HeadTopKSelectArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
