// ReservoirSelect: weighted sampling of units without replacement.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// score [L,E,R,N], u [L,E,R,n,N], budget [L,E,R], unit_ids [L,E,R,N], tokens_seen [E],
// pin_spans [E,P,2]; keep [L,E,R,N], keep_len [L,E,R], coverage [L,E,R].
struct ReservoirSelectArgs : ReservoirSelect::Attrs {
  const float* score;
  const float* u;
  const std::int32_t* budget;
  const std::int32_t* unit_ids;
  const std::int32_t* tokens_seen;
  const std::int32_t* pin_spans;
  std::int32_t* keep;
  std::int32_t* keep_len;
  float* coverage;
  std::int32_t L, E, R, N, n, P;
};

std::size_t reservoir_select_workspace(const ReservoirSelectArgs& args);
cudaError_t reservoir_select(const ReservoirSelectArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
