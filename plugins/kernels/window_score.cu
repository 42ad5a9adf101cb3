#include "tile.cuh"
#include "window_score.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;
// The choices of group_reduce are the same.
using Reduce = WindowReduce;

__device__ __forceinline__ float reduced(Reduce kind, float a, float b) {
  return kind == Reduce::kMax ? fmaxf(a, b) : a + b;
}

// What the kernels over tokens of evicting slot e and KV head g have in common.
template <class T>
struct Head {
  TileInput<T> in;
  Causal causal;
  const std::int32_t* ids;
  int Hkv, C, N, seen;

  __device__ Head(const WindowScoreArgs& a, const float* queries, int e, int g) {
    const int rows = a.Hq / a.Hkv * a.W;
    const std::int64_t cache_row = std::int64_t{a.evict_slots[e]} * a.Hkv + g;
    in = {queries + (std::int64_t{e} * a.Hkv + g) * rows * a.D,
          static_cast<const T*>(a.keys) + cache_row * a.C * a.D,
          0,
          rows,
          1,
          a.D};
    seen = a.tokens_seen[e];
    causal = {a.W, seen - a.W, a.W};
    ids = a.unit_ids + (std::int64_t{e} * a.R + (a.R > 1 ? g : 0)) * a.N;
    Hkv = a.Hkv;
    C = a.C;
    N = a.N;
  }
  __device__ __forceinline__ KeptLogits kept(float* all, int e, int g) const {
    return {all ? all + (std::int64_t{e} * Hkv + g) * in.rows * N : nullptr, N};
  }
  __device__ __forceinline__ int position(int t) const {
    return t < N && t < C && ids[t] >= 0 && ids[t] < seen ? ids[t] : kNowhere;
  }
};

// parts [E, Hkv, rows, chunks]; the grid is (chunks, Hkv, E).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    token_log_sums(WindowScoreArgs a, const float* queries, LogSum* parts, float* kept) {
  __shared__ TileShared shared;
  DYN_SHARED(float, key);
  const int g = blockIdx.y, e = blockIdx.z, first = blockIdx.x * kTileChunk;
  if (a.evict_slots[e] < 0) return;
  const Head<T> head(a, queries, e, g);
  row_log_sums(
      shared, head.in, key, head.causal, head.kept(kept, e, g), first, min(a.N, first + kTileChunk),
      [&](int t) { return head.position(t); }, [](int) { return 0; },
      parts + (std::int64_t{e} * a.Hkv + g) * head.in.rows * gridDim.x + blockIdx.x, gridDim.x);
}

// What the window pays to each token: paid [E, Hq, N]; the grid is (tiles of tokens, Hkv, E).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    pay(WindowScoreArgs a, const float* queries, const float* log_sums, float* kept, float* paid) {
  __shared__ TileShared shared;
  __shared__ TileShares shares;
  DYN_SHARED(float, key);
  const int tokens = tile_tokens(a.D), token = threadIdx.x;
  const int g = blockIdx.y, e = blockIdx.z, first_token = blockIdx.x * tokens;
  if (a.evict_slots[e] < 0) return;
  const Head<T> head(a, queries, e, g);
  const KeptLogits logits = head.kept(kept, e, g);
  const int rows = head.in.rows;
  const Reduce kind = static_cast<Reduce>(a.window_reduce);
  const float factor = kind == Reduce::kMean ? 1.0f / a.W : 1.0f;
  log_sums += (std::int64_t{e} * a.Hkv + g) * rows;
  paid += (std::int64_t{e} * a.Hq + g * (a.Hq / a.Hkv)) * a.N;

  put_positions(shared, a.D, first_token, [&](int t) { return head.position(t); });
  if (!logits.at) load_keys(shared, head.in, key, first_token);
  const bool mine = token < tokens && first_token + token < a.N;
  const bool older = mine && shared.position[token] < head.seen - a.W;
  float sum = 0.0f;
  for (int row = 0; row < rows; row += kTileRows) {
    tile_shares(shared, head.in, key, head.causal, logits, log_sums, row, first_token, shares);
    for (int r = 0; mine && r < kTileRows && row + r < rows; ++r) {
      const int w = (row + r) % a.W;
      sum = w == 0 ? shares[r][token] : reduced(kind, sum, shares[r][token]);
      if (w < a.W - 1) continue;
      paid[std::int64_t{(row + r) / a.W} * a.N + first_token + token] = older ? sum * factor : 0.0f;
    }
  }
}

// Pools over neighbours, then reduces over heads; the grid is (units, R, E).
__global__ void __launch_bounds__(kThreads) pool(WindowScoreArgs a, const float* paid) {
  const int j = blockIdx.x * kThreads + threadIdx.x, r = blockIdx.y, e = blockIdx.z;
  if (j >= a.N) return;
  const std::int64_t row = std::int64_t{e} * a.R + r;
  const int id = a.unit_ids[row * a.N + j];
  if (a.evict_slots[e] < 0 || id < 0 || id >= a.tokens_seen[e] || j >= a.C) {
    a.score[row * a.N + j] = -INFINITY;
    return;
  }
  const int heads = a.Hq / a.R, side = a.pool_size / 2;
  const Reduce kind = static_cast<Reduce>(a.group_reduce);
  float total = 0.0f;
  for (int h = 0; h < heads; ++h) {
    const float* mine = paid + (std::int64_t{e} * a.Hq + r * heads + h) * a.N;
    float sum = 0.0f;
    for (int k = max(0, j - side); k <= min(a.N - 1, j + side); ++k) sum += mine[k];
    total = h == 0 ? sum : reduced(kind, total, sum);
  }
  const float factor = kind == Reduce::kMean ? 1.0f / heads : 1.0f;
  a.score[row * a.N + j] = total * factor / a.pool_size;
}

// Parts of the workspace.
struct Space {
  std::size_t rows, queries, log_sums, parts, paid, kept;
};
Space space_of(const WindowScoreArgs& a) {
  const std::size_t rows = std::size_t{1} * a.E * a.Hq * a.W;
  const bool keeps = a.Hkv > 0 && keeps_logits(a.dtype, a.Hq / a.Hkv * a.W, a.D);
  return {rows,
          rows * a.D,
          rows,
          rows * ceil_div(a.N, kTileChunk),
          std::size_t{1} * a.E * a.Hq * a.N,
          keeps ? rows * a.N : 0};
}

}  // namespace

std::size_t window_score_workspace(const WindowScoreArgs& a) {
  const Space space = space_of(a);
  return sizeof(LogSum) * space.parts +
         sizeof(float) *
             (space.queries + space.log_sums + space.paid +
              std::size_t{1} * a.E * a.N * most_kept_rows(a.dtype, a.Hq * a.W, a.Hkv, a.D));
}

cudaError_t window_score(const WindowScoreArgs& args, void* workspace, cudaStream_t stream) {
  if (!tiles_fit(args.dtype, args.D) || args.Hkv < 1 || args.Hq % args.Hkv != 0 ||
      args.R != (args.shared ? 1 : args.Hkv) || args.pool_size < 1 || args.pool_size % 2 == 0) {
    return cudaErrorInvalidValue;
  }
  if (args.E == 0 || args.N == 0 || args.W == 0) return cudaSuccess;
  const Space space = space_of(args);
  const int chunks = ceil_div(args.N, kTileChunk);
  const std::size_t bytes = tile_bytes(args.D);
  float* queries = static_cast<float*>(workspace);
  LogSum* parts = reinterpret_cast<LogSum*>(queries + space.queries);
  float* log_sums = reinterpret_cast<float*>(parts + space.parts);
  float* paid = log_sums + space.log_sums;
  float* kept = space.kept ? paid + space.paid : nullptr;
  const float scale = 1.0f / std::sqrt(static_cast<float>(args.D));
  cudaError_t error = spread_queries(
      args.dtype, {args.q_window, queries, args.E, args.W, args.Hq, args.D, args.Hkv, scale, false},
      stream);
  if (error != cudaSuccess) return error;
  error = with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    KERNEL_LAUNCH_SHARED((token_log_sums<T>), dim3(chunks, args.Hkv, args.E), kTileThreads, bytes,
                         stream, args, queries, parts, kept);
    merge_log_sums(parts, log_sums, static_cast<std::int64_t>(space.rows), chunks, stream);
    KERNEL_LAUNCH_SHARED((pay<T>), dim3(ceil_div(args.N, tile_tokens(args.D)), args.Hkv, args.E),
                         kTileThreads, bytes, stream, args, queries, log_sums, kept, paid);
  });
  if (error != cudaSuccess) return error;
  KERNEL_LAUNCH((pool), dim3(ceil_div(args.N, kThreads), args.R, args.E), kThreads, 0, stream, args,
                paid);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
