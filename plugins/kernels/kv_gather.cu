#include "common.cuh"
#include "kv_gather.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;
// Bytes of a row that a block of the in-place form moves, so that more blocks share a row.
constexpr int kPart = 64;

// Target row `i` of a slot and head, which is row `from` of its source; -1 if there is none.
struct Move {
  std::int64_t source, target;
  __device__ bool exists() const { return source >= 0; }
};
__device__ __forceinline__ Move move_of(const KvGatherArgs& a, int e, int h, int i) {
  const std::int64_t row = std::int64_t{e} * a.R + (a.R > 1 ? h : 0);
  const int unit = a.units[row * a.N + i / a.block_size];
  const std::int64_t from = std::int64_t{unit} * a.block_size + i % a.block_size;
  const int len = min(a.lens[e * a.Rl + (a.Rl > 1 ? h : 0)], a.Cs);
  const std::int64_t source = a.source_slots[e], target = a.target_slots[e];
  if (source < 0 || target < 0 || unit < 0 || from >= len || i >= a.Ct) return {-1, -1};
  return {(source * a.Hkv + h) * a.Cs + from, (target * a.Hkv + h) * a.Ct + i};
}

// Every piece on its own: the grid is (parts of the rows of a head, heads of every slot).
template <class Piece>
__global__ void __launch_bounds__(kThreads) gather(KvGatherArgs a, unsigned rows, unsigned pieces) {
  const int e = blockIdx.y / a.Hkv, h = blockIdx.y % a.Hkv;
  const unsigned t = blockIdx.x * kThreads + threadIdx.x;  // 32-bit: the divisions count here
  const unsigned i = t / pieces, piece = t % pieces;
  if (i >= rows) return;
  const Move move = move_of(a, e, h, static_cast<int>(i));
  if (!move.exists()) return;
  static_cast<Piece*>(a.target)[move.target * pieces + piece] =
      static_cast<const Piece*>(a.source)[move.source * pieces + piece];
  if (a.second_source) {
    static_cast<Piece*>(a.second_target)[move.target * pieces + piece] =
        static_cast<const Piece*>(a.second_source)[move.source * pieces + piece];
  }
}

// In place: a block moves some pieces of all rows of a head, a batch of rows at a time. Kept rows
// ascend, so a batch lands in rows that no later batch reads.
template <class Piece>
__global__ void __launch_bounds__(kThreads) compact(KvGatherArgs a, int pieces, int width) {
  const int e = blockIdx.y / a.Hkv, h = blockIdx.y % a.Hkv;
  const int piece = blockIdx.x * width + threadIdx.x % width, batch = kThreads / width;
  const int rows = static_cast<int>(min(std::int64_t{a.N} * a.block_size, std::int64_t{a.Ct}));
  for (int base = 0; base < rows; base += batch) {
    const int i = base + threadIdx.x / width;
    Move move{-1, -1};
    if (i < rows && piece < pieces && static_cast<int>(threadIdx.x) < batch * width) {
      move = move_of(a, e, h, i);
    }
    Piece held{}, second{};
    if (move.exists()) {
      held = static_cast<const Piece*>(a.source)[move.source * pieces + piece];
      if (a.second_source) {
        second = static_cast<const Piece*>(a.second_source)[move.source * pieces + piece];
      }
    }
    __syncthreads();
    if (move.exists()) {
      static_cast<Piece*>(a.target)[move.target * pieces + piece] = held;
      if (a.second_source) {
        static_cast<Piece*>(a.second_target)[move.target * pieces + piece] = second;
      }
    }
    if (!__syncthreads_or(move.exists())) break;  // only -1 follows
  }
}

template <class Piece>
void launch(const KvGatherArgs& a, cudaStream_t stream) {
  const int pieces = a.row_bytes / static_cast<int>(sizeof(Piece));
  const unsigned heads = a.E * a.Hkv;
  if (a.in_place) {
    const int width = min(pieces, kPart / static_cast<int>(sizeof(Piece)));
    KERNEL_LAUNCH((compact<Piece>), dim3(ceil_div(pieces, width), heads), kThreads, 0, stream, a,
                  pieces, width);
  } else {
    const unsigned rows =
        static_cast<unsigned>(min(std::int64_t{a.N} * a.block_size, std::int64_t{a.Ct}));
    KERNEL_LAUNCH((gather<Piece>), dim3(ceil_div(rows * pieces, unsigned{kThreads}), heads),
                  kThreads, 0, stream, a, rows, static_cast<unsigned>(pieces));
  }
}

}  // namespace

std::size_t kv_gather_workspace(const KvGatherArgs&) { return 0; }

cudaError_t kv_gather(const KvGatherArgs& args, void*, cudaStream_t stream) {
  if (args.block_size < 1 || args.row_bytes < 4 || args.row_bytes % 4 != 0) {
    return cudaErrorInvalidValue;
  }
  if (!args.in_place && args.source == args.target) return cudaErrorInvalidValue;
  if (args.in_place && (args.source != args.target || args.second_source != args.second_target)) {
    return cudaErrorInvalidValue;
  }
  if (std::int64_t{args.Ct} * args.row_bytes / 4 > INT_MAX) return cudaErrorInvalidValue;
  if (args.E == 0 || args.Hkv == 0 || args.N == 0 || args.Ct == 0) return cudaSuccess;
  if (args.row_bytes % 16 == 0) {
    launch<uint4>(args, stream);
  } else {
    launch<unsigned>(args, stream);
  }
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
