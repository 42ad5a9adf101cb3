// WindowScore: attention of the newest queries to each token, pooled over neighbours.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// q_window [E,W,Hq*D], keys [B,Hkv,C,D], unit_ids [E,R,N], tokens_seen [E], evict_slots [E];
// score [E,R,N]. R is 1 if shared, else Hkv. Skipped slots score -inf.
struct WindowScoreArgs : WindowScore::Attrs {
  const void* q_window;
  const void* keys;
  const std::int32_t* unit_ids;
  const std::int32_t* tokens_seen;
  const std::int32_t* evict_slots;
  float* score;
  std::int32_t E, W, Hq, D, B, Hkv, C, R, N;
  FloatType dtype;
};

std::size_t window_score_workspace(const WindowScoreArgs& args);
cudaError_t window_score(const WindowScoreArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
