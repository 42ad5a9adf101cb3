// KeyDiffScore: keys unlike the mean key score high.
// Keys are read twice: the mean of all comes first.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// keys [B,Hkv,C,D], unit_ids [E,R,N], evict_slots [E]; score [E,R,N] with R = Hkv. Unit j is row j
// of the slot; the valid units of a row come first. Skipped slots score -inf.
struct KeyDiffScoreArgs : KeyDiffScore::Attrs {
  const void* keys;
  const std::int32_t* unit_ids;
  const std::int32_t* evict_slots;
  float* score;
  std::int32_t B, Hkv, C, D, E, R, N;
  FloatType dtype;
};

std::size_t keydiff_score_workspace(const KeyDiffScoreArgs& args);
cudaError_t keydiff_score(const KeyDiffScoreArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
