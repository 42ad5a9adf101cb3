// AccumUpdate: attention that each cached token has received from all queries so far.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// accum [B,Hkv,C], queries [B,S,Hq*D], keys [B,Hkv,C,D], past_lens [B,Rl], n_new [B];
// accum_out [B,Hkv,C], which may be accum itself. Rl is 1 or Hkv.
//
// Keys are read once where a token's logits, written and read again, take no more bytes than its
// key (8 * S * Hq / Hkv <= D * size: decode steps), else twice, as in WindowScore; those of slots
// without new tokens are not read.
struct AccumUpdateArgs : AccumUpdate::Attrs {
  const float* accum;
  const void* queries;
  const void* keys;
  const std::int32_t* past_lens;
  const std::int32_t* n_new;
  float* accum_out;
  std::int32_t B, Hkv, C, S, Hq, D, Rl;
  FloatType dtype;
};

std::size_t accum_update_workspace(const AccumUpdateArgs& args);
cudaError_t accum_update(const AccumUpdateArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
