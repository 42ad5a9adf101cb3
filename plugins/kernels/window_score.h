// WindowScore: attention of the newest queries to each token, pooled over neighbours.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// q_window [E,W,Hq*D], keys [B,Hkv,C,D], unit_ids [E,R,N], tokens_seen [E], evict_slots [E];
// score [E,R,N]. R is 1 if shared, else Hkv. Skipped slots score -inf.
//
// Keys are read once where a token's logits, written and read again, take no more bytes than its
// key (8 * W * Hq / Hkv <= D * size: tova), else twice: what a query pays to a token needs the log
// sum of its row, and the logits of all queries would move more bytes than the keys do.
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
