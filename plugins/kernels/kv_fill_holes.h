// kv_fill_holes: moves blocks of a slot into its evicted blocks, in place.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// Moves one tensor or two (second may be null) [B,Hkv,C,row] of row_bytes a row, a multiple of 4.
// slots [E], -1 is skipped; from and to [E,R,M] are block numbers, -1 moves nothing; R is 1 or Hkv.
// No block is both in from and in to, and to names none twice.
struct KvFillHolesArgs {
  void* data;
  void* second;
  const std::int32_t* slots;
  const std::int32_t* from;
  const std::int32_t* to;
  std::int32_t B, Hkv, C, E, R, M;
  std::int32_t row_bytes;
  std::int32_t block_size;
};

std::size_t kv_fill_holes_workspace(const KvFillHolesArgs& args);
cudaError_t kv_fill_holes(const KvFillHolesArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
