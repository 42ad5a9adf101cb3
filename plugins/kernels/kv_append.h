// KvAppend: writes the keys and values of a step behind those of each slot, in place.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// keys and values [B,Hkv,C,D], both read and written in place; new_keys and new_values [B,S,Hkv*D];
// past_lens [B,Rl] (Rl is 1 or Hkv), n_new [B]. Token s < n_new[b] becomes row past_lens[b] + s;
// rows beyond the capacity are dropped.
struct KvAppendArgs {
  void* keys;
  void* values;
  const void* new_keys;
  const void* new_values;
  const std::int32_t* past_lens;
  const std::int32_t* n_new;
  std::int32_t B, Hkv, C, D, S, Rl;
  FloatType dtype;
};

std::size_t kv_append_workspace(const KvAppendArgs& args);
cudaError_t kv_append(const KvAppendArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
