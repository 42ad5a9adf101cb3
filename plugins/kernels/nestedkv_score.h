// NestedKVScore: anomaly of a key against three time scales.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// keys [B,Hkv,C,D], unit_ids [E,R,N], evict_slots [E]; score [E,R,N] with R = Hkv. Unit j is row j
// of the slot; the valid units of a row come first. Skipped slots score -inf.
struct NestedKVScoreArgs : NestedKVScore::Attrs {
  const void* keys;
  const std::int32_t* unit_ids;
  const std::int32_t* evict_slots;
  float* score;
  std::int32_t B, Hkv, C, D, E, R, N;
  FloatType dtype;
};

std::size_t nestedkv_score_workspace(const NestedKVScoreArgs& args);
cudaError_t nestedkv_score(const NestedKVScoreArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
