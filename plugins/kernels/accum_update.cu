#include "accum_update.h"
#include "tile.cuh"

namespace kvsift::kernels {
namespace {

// What the kernels over the rows of slot b and KV head g have in common: row past + s holds token
// s of the step, which sees the rows up to its own.
template <class T>
struct Head {
  TileInput<T> in;
  Causal causal;
  int past, end;  // rows before the step, and with it

  __device__ Head(const AccumUpdateArgs& a, const float* queries, int b, int g) {
    const int rows = a.Hq / a.Hkv * a.S;
    const std::int64_t head = std::int64_t{b} * a.Hkv + g;
    in = {queries + head * rows * a.D,
          static_cast<const T*>(a.keys) + head * a.C * a.D,
          0,
          rows,
          1,
          a.D};
    const int used = min(a.n_new[b], a.S);
    past = a.past_lens[b * a.Rl + (a.Rl > 1 ? g : 0)];
    end = min(past + used, a.C);
    causal = {a.S, past, used};
  }
  __device__ __forceinline__ KeptLogits kept(const AccumUpdateArgs& a, float* all, int b,
                                             int g) const {
    return {all ? all + (std::int64_t{b} * a.Hkv + g) * in.rows * a.C : nullptr, a.C};
  }
  // A slot without new tokens has no keys to read.
  __device__ __forceinline__ int read_end() const { return causal.used > 0 ? end : 0; }
  __device__ __forceinline__ int position(int t) const { return t < end ? t : kNowhere; }
};

// parts [B, Hkv, rows, chunks]; the grid is (chunks, Hkv, B).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    token_log_sums(AccumUpdateArgs a, const float* queries, LogSum* parts, float* kept) {
  __shared__ TileShared shared;
  DYN_SHARED(float, key);
  const int g = blockIdx.y, b = blockIdx.z, first = blockIdx.x * kTileChunk;
  const Head<T> head(a, queries, b, g);
  row_log_sums(
      shared, head.in, key, head.causal, head.kept(a, kept, b, g), first,
      min(head.read_end(), first + kTileChunk), [&](int t) { return head.position(t); },
      [](int t) { return t; },
      parts + (std::int64_t{b} * a.Hkv + g) * head.in.rows * gridDim.x + blockIdx.x, gridDim.x);
}

// Adds what every query of the step pays to a tile of rows; the grid is (tiles, Hkv, B).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    accumulate(AccumUpdateArgs a, const float* queries, const float* log_sums, float* kept) {
  __shared__ TileShared shared;
  __shared__ TileShares shares;
  DYN_SHARED(float, key);
  const int tokens = tile_tokens(a.D), token = threadIdx.x;
  const int g = blockIdx.y, b = blockIdx.z, first_token = blockIdx.x * tokens;
  const Head<T> head(a, queries, b, g);
  const KeptLogits logits = head.kept(a, kept, b, g);
  const int rows = head.in.rows, j = first_token + token;
  log_sums += (std::int64_t{b} * a.Hkv + g) * rows;

  put_positions(shared, a.D, first_token, [&](int t) { return head.position(t); });
  if (!logits.at && rows > 0 && first_token < head.read_end()) {
    load_keys(shared, head.in, key, first_token);
  }
  float sum = 0.0f;
  for (int row = 0; row < rows && first_token < head.read_end(); row += kTileRows) {
    if (head.causal.highest(row, rows) < first_token) continue;
    tile_shares(shared, head.in, key, head.causal, logits, log_sums, row, first_token, shares);
    for (int r = 0; r < kTileRows && token < tokens; ++r) sum += shares[r][token];
  }
  if (j >= a.C || token >= tokens) return;
  const std::int64_t at = (std::int64_t{b} * a.Hkv + g) * a.C + j;
  const float before = j < head.past ? a.accum[at] : 0.0f;
  a.accum_out[at] = j < head.end ? before + sum : 0.0f;
}

// Whether the logits of a step, a decode step mostly, are kept.
bool keeps(const AccumUpdateArgs& a) {
  return a.Hkv > 0 && keeps_logits(a.dtype, a.Hq / a.Hkv * a.S, a.D);
}

}  // namespace

std::size_t accum_update_workspace(const AccumUpdateArgs& a) {
  const std::size_t rows = std::size_t{1} * a.B * a.Hq * a.S;
  const std::size_t kept =
      sizeof(float) * a.B * a.C * most_kept_rows(a.dtype, a.Hq * a.S, a.Hkv, a.D);
  return kept + rows * (sizeof(float) * (a.D + 1) + sizeof(LogSum) * ceil_div(a.C, kTileChunk));
}

cudaError_t accum_update(const AccumUpdateArgs& args, void* workspace, cudaStream_t stream) {
  if (!tiles_fit(args.dtype, args.D) || args.Hkv < 1 || args.Hq % args.Hkv != 0 ||
      (args.Rl != 1 && args.Rl != args.Hkv)) {
    return cudaErrorInvalidValue;
  }
  if (args.B == 0 || args.C == 0) return cudaSuccess;
  const std::size_t rows = std::size_t{1} * args.B * args.Hq * args.S;
  const int chunks = ceil_div(args.C, kTileChunk);
  const std::size_t bytes = tile_bytes(args.D);
  float* queries = static_cast<float*>(workspace);
  LogSum* parts = reinterpret_cast<LogSum*>(queries + rows * args.D);
  float* log_sums = reinterpret_cast<float*>(parts + rows * chunks);
  float* kept = keeps(args) ? log_sums + rows : nullptr;
  const float scale = 1.0f / std::sqrt(static_cast<float>(args.D));
  if (rows > 0) {
    const cudaError_t error = spread_queries(
        args.dtype,
        {args.queries, queries, args.B, args.S, args.Hq, args.D, args.Hkv, scale, false}, stream);
    if (error != cudaSuccess) return error;
  }
  return with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (rows > 0) {
      KERNEL_LAUNCH_SHARED((token_log_sums<T>), dim3(chunks, args.Hkv, args.B), kTileThreads, bytes,
                           stream, args, queries, parts, kept);
      merge_log_sums(parts, log_sums, static_cast<std::int64_t>(rows), chunks, stream);
    }
    KERNEL_LAUNCH_SHARED((accumulate<T>),
                         dim3(ceil_div(args.C, tile_tokens(args.D)), args.Hkv, args.B),
                         kTileThreads, bytes, stream, args, queries, log_sums, kept);
  });
}

}  // namespace kvsift::kernels
