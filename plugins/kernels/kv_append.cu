#include "common.cuh"
#include "kv_append.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// A thread moves 16 bytes; the grid covers [B, Hkv, S, pieces of a row].
__global__ void __launch_bounds__(kThreads) append(KvAppendArgs a, int pieces, std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= total) return;
  const int s = static_cast<int>(t / pieces % a.S);
  const std::int64_t row = t / pieces / a.S;  // b * Hkv + h
  const int b = static_cast<int>(row / a.Hkv), h = static_cast<int>(row % a.Hkv);
  if (s >= a.n_new[b]) return;
  const int to = a.past_lens[b * a.Rl + (a.Rl > 1 ? h : 0)] + s;
  if (to < 0 || to >= a.C) return;
  static_cast<uint4*>(a.cache_out)[(row * a.C + to) * pieces + t % pieces] =
      static_cast<const uint4*>(a.rows)[t];
}

}  // namespace

std::size_t kv_append_workspace(const KvAppendArgs&) { return 0; }

cudaError_t kv_append(const KvAppendArgs& args, void*, cudaStream_t stream) {
  if (args.cache != args.cache_out || !whole_loads(args.dtype, args.D)) {
    return cudaErrorInvalidValue;
  }
  const int pieces = static_cast<int>(args.D * float_size(args.dtype) / 16);
  const std::int64_t total = std::int64_t{args.B} * args.Hkv * args.S * pieces;
  if (total == 0) return cudaSuccess;
  KERNEL_LAUNCH((append), static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads})), kThreads,
                0, stream, args, pieces, total);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
