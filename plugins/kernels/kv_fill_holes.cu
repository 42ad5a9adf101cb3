#include "common.cuh"
#include "kv_fill_holes.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// Copies a block of rows in pieces of the type; the grid is (moves of every slot and head, parts).
template <class Piece>
__global__ void __launch_bounds__(kThreads) fill(KvFillHolesArgs a, int pieces) {
  const int m = blockIdx.x % a.M, h = blockIdx.x / a.M % a.Hkv, e = blockIdx.x / a.M / a.Hkv;
  const std::int64_t move = (std::int64_t{e} * a.R + (a.R > 1 ? h : 0)) * a.M + m;
  const std::int64_t slot = a.slots[e], from = a.from[move], to = a.to[move];
  if (slot < 0 || from < 0 || to < 0) return;
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= pieces) return;
  const std::int64_t row = (slot * a.Hkv + h) * a.C, row_pieces = pieces / a.block_size;
  // A last block may reach beyond a capacity that is no multiple of the block.
  const std::int64_t furthest = (from > to ? from : to) * a.block_size + i / row_pieces;
  if (furthest >= a.C) return;
  for (void* data : {a.data, a.second}) {
    if (!data) continue;
    Piece* base = static_cast<Piece*>(data) + row * row_pieces + i;
    base[to * pieces] = base[from * pieces];
  }
}

}  // namespace

std::size_t kv_fill_holes_workspace(const KvFillHolesArgs&) { return 0; }

cudaError_t kv_fill_holes(const KvFillHolesArgs& args, void*, cudaStream_t stream) {
  if (args.block_size < 1 || args.row_bytes < 4 || args.row_bytes % 4 != 0) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t moves = std::int64_t{args.E} * args.Hkv * args.M;
  if (moves == 0) return cudaSuccess;
  const bool wide = args.row_bytes % 16 == 0;
  const int pieces = args.block_size * (args.row_bytes / (wide ? 16 : 4));
  const dim3 grid(static_cast<unsigned>(moves), ceil_div(pieces, kThreads));
  if (wide) {
    KERNEL_LAUNCH((fill<uint4>), grid, kThreads, 0, stream, args, pieces);
  } else {
    KERNEL_LAUNCH((fill<unsigned>), grid, kThreads, 0, stream, args, pieces);
  }
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
