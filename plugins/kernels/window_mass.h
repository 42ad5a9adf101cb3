// WindowMass: share of each window query's attention that each unit of a layer has.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// q_window [E,W,Hq*D], keys [B,Hkv,C,D], unit_ids [E,R,N], tokens_seen [E], evict_slots [E];
// mass [E,R,W,N]. R is Hkv for the mode per_head, else 1. Rows of skipped slots are not written.
struct WindowMassArgs : WindowMass::Attrs {
  const void* q_window;
  const void* keys;
  const std::int32_t* unit_ids;
  const std::int32_t* tokens_seen;
  const std::int32_t* evict_slots;
  float* mass;
  std::int32_t E, W, Hq, D, B, Hkv, C, R, N;
  FloatType dtype;
};

std::size_t window_mass_workspace(const WindowMassArgs& args);
cudaError_t window_mass(const WindowMassArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
