// kv_gather: copies the kept units of slots to the front of slots, in order.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// Moves one tensor or two (keys and values; second_* may be null) whose rows take row_bytes, a
// multiple of 4: source [Bs,Hkv,Cs,row], target [Bt,Hkv,Ct,row]. For a per-token state row_bytes
// is 4. source_slots and target_slots [E], skipped where either is -1; units [E,R,N] as a selector
// keeps them: ascending, then -1; R is 1 or Hkv. Unit j is the block_size rows from j * block_size
// on, less those at or beyond lens [E,Rl], the valid rows of the source (Rl is 1 or Hkv). The
// target may be the source, slot for slot: rows then move towards the front in place, which
// in_place must say.
struct KvGatherArgs {
  const void* source;
  const void* second_source;
  void* target;
  void* second_target;
  const std::int32_t* source_slots;
  const std::int32_t* target_slots;
  const std::int32_t* units;
  const std::int32_t* lens;
  std::int32_t Bs, Bt, Hkv, Cs, Ct, E, R, N, Rl;
  std::int32_t row_bytes;
  std::int32_t block_size;
  bool in_place;
};

std::size_t kv_gather_workspace(const KvGatherArgs& args);
cudaError_t kv_gather(const KvGatherArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
