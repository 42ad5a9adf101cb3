// KNormScore: keys of small norm score high.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// keys [B,Hkv,C,D], unit_ids [E,R,N], evict_slots [E]; score [E,R,N] with R = Hkv. Unit j is row j
// of the slot; the valid units of a row come first. Skipped slots score -inf.
struct KNormScoreArgs : KNormScore::Attrs {
  const void* keys;
  const std::int32_t* unit_ids;
  const std::int32_t* evict_slots;
  float* score;
  std::int32_t B, Hkv, C, D, E, R, N;
  FloatType dtype;
};

std::size_t knorm_score_workspace(const KNormScoreArgs& args);
cudaError_t knorm_score(const KNormScoreArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
