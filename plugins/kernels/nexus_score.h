// NexusScore: mean attention of the window plus a short walk that lifts bridge blocks.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// mass [L,E,R,W,N], unit_ids [L,E,R,N], tokens_seen [E]; score [L,E,R,N].
struct NexusScoreArgs : NexusScore::Attrs {
  const float* mass;
  const std::int32_t* unit_ids;
  const std::int32_t* tokens_seen;
  float* score;
  std::int32_t L, E, R, W, N;
};

std::size_t nexus_score_workspace(const NexusScoreArgs& args);
cudaError_t nexus_score(const NexusScoreArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
