// KvAppend: writes the rows of a step behind those of each slot, in place.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// cache [B,Hkv,C,D], rows [B,Hkv,S,D], past_lens [B,Rl] (Rl is 1 or Hkv), n_new [B]; cache_out must
// be cache itself. Token s < n_new[b] becomes row past_lens[b] + s; rows beyond the capacity are
// dropped.
struct KvAppendArgs : KvAppend::Attrs {
  const void* cache;
  const void* rows;
  const std::int32_t* past_lens;
  const std::int32_t* n_new;
  void* cache_out;
  std::int32_t B, Hkv, C, D, S, Rl;
  FloatType dtype;
};

std::size_t kv_append_workspace(const KvAppendArgs& args);
cudaError_t kv_append(const KvAppendArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
