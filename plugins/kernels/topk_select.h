// TopKSelect: the units with the highest score of each row.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// score [L,E,R,N], budget [L,E,R], unit_ids [L,E,R,N], tokens_seen [E], pin_spans [E,P,2];
// keep [L,E,R,N], keep_len [L,E,R], coverage [L,E,R].
struct TopKSelectArgs : TopKSelect::Attrs {
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

std::size_t topk_select_workspace(const TopKSelectArgs& args);
cudaError_t topk_select(const TopKSelectArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
