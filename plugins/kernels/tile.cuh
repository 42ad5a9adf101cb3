// Inner products of 16 query rows with 128 keys, a slice of the head at a time through shared
// memory, for the ops that score tokens by the attention of some queries.
//
// The query rows of a KV head are those of its group's heads in turn: row g * W + w is query w of
// the group's head g.
#pragma once

#include "common.cuh"

namespace kvsift::kernels {

constexpr int kTileRows = 16;
constexpr int kTileTokens = 128;
constexpr int kTileSlice = 32;
constexpr int kTileThreads = 128;
// What a thread holds: 4 rows (of its warp) and 4 tokens (its lane's, 32 apart).
constexpr int kHeldRows = 4;
constexpr int kHeldTokens = kTileTokens / kWarpSize;
constexpr int kNowhere = INT_MAX;  // position of a token that is not valid

struct TileShared {
  // Padded so that rows do not share a bank; a warp reads its four rows as one float4.
  alignas(16) float query[kTileSlice][kTileRows + 4];
  float key[kTileTokens][kTileSlice + 1];
  int position[kTileTokens];
};

using Held = float[kHeldRows][kHeldTokens];

using TileShares = float[kTileRows][kTileTokens + 1];

// The row of the tile, and the token of the tile, that a thread's value [r][i] belongs to.
__device__ __forceinline__ int held_row(int r) {
  return static_cast<int>(threadIdx.x) / kWarpSize * kHeldRows + r;
}
__device__ __forceinline__ int held_token(int i) {
  return static_cast<int>(threadIdx.x) % kWarpSize + i * kWarpSize;
}

// Query rows [rows, D] of one KV head, scaled, and keys [C, D]; with `heads` > 1 a token's key is
// the sum of that many, `stride` elements apart.
template <class T>
struct TileInput {
  const float* query;
  const T* keys;
  std::int64_t stride;
  int rows, heads, D;
};

// Which tokens a query sees: those at positions up to first + w, for the queries w < used.
struct Causal {
  int W, first, used;

  __device__ __forceinline__ int limit(int row, int rows) const {
    const int w = row % W;
    return row < rows && w < used ? first + w : -1;
  }
  // The highest limit of the rows of a tile; -1 if they see nothing.
  __device__ __forceinline__ int highest(int row, int rows) const {
    const int end = min(row + kTileRows, rows), w = row % W;
    const int newest = w + (end - row) > W ? W - 1 : w + (end - row) - 1;
    const bool none = used <= 0 || (w >= used && w + (end - row) <= W);
    return none ? -1 : first + min(newest, used - 1);
  }
};

// Loads a slice of the keys of the tile's valid tokens; every load comes before the first store, so
// that all are in flight together.
template <class T>
__device__ __forceinline__ void load_keys(TileShared& s, const TileInput<T>& in, int first_token,
                                          int slice) {
  constexpr int kPieces = kTileSlice / kVector<T>;
  constexpr int kLoads = kTileTokens * kPieces / kTileThreads;
  [[maybe_unused]] constexpr int kHeads = 16 / kLoads;  // at a time: 16 loads
  float sums[kLoads][kVector<T>] = {};
  const int d = threadIdx.x % kPieces * kVector<T>;  // the same for all of a thread's loads
  if (slice + d < in.D) {
    const T* from = in.keys + std::int64_t{first_token} * in.D + slice + d;
#pragma unroll(kHeads)
    for (int h = 0; h < in.heads; ++h) {
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int token = (k * kTileThreads + static_cast<int>(threadIdx.x)) / kPieces;
        if (s.position[token] == kNowhere) continue;
        float part[kVector<T>];
        load16(from + h * in.stride + token * in.D, part);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sums[k][i] += part[i];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int token = (k * kTileThreads + static_cast<int>(threadIdx.x)) / kPieces;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) s.key[token][d + i] = sums[k][i];
  }
}

template <class T>
__device__ __forceinline__ void load_queries(TileShared& s, const TileInput<T>& in, int first_row,
                                             int slice) {
  static_assert(kTileRows * kTileSlice == 4 * kTileThreads, "a float4 per thread");
  const int row = threadIdx.x / (kTileSlice / 4), d = threadIdx.x % (kTileSlice / 4) * 4;
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (first_row + row < in.rows && slice + d < in.D) {
    v = *reinterpret_cast<const float4*>(in.query + std::int64_t{first_row + row} * in.D + slice +
                                         d);
  }
  s.query[d][row] = v.x;
  s.query[d + 1][row] = v.y;
  s.query[d + 2][row] = v.z;
  s.query[d + 3][row] = v.w;
}

// The inner products of rows first_row .. and tokens first_token .., whose positions are in
// s.position (a __syncthreads must lie between). 0 for tokens and rows that are not valid. Every
// thread must call it.
template <class T>
__device__ void tile_products(TileShared& s, const TileInput<T>& in, int first_row, int first_token,
                              Held& held) {
#pragma unroll
  for (int r = 0; r < kHeldRows; ++r) {
#pragma unroll
    for (int i = 0; i < kHeldTokens; ++i) held[r][i] = 0.0f;
  }
  for (int slice = 0; slice < in.D; slice += kTileSlice) {
    __syncthreads();  // the slice before has been used
    load_keys(s, in, first_token, slice);
    load_queries(s, in, first_row, slice);
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kTileSlice; ++d) {
      const float4 q = *reinterpret_cast<const float4*>(&s.query[d][held_row(0)]);
#pragma unroll
      for (int i = 0; i < kHeldTokens; ++i) {
        const float k = s.key[held_token(i)][d];
        held[0][i] += q.x * k;
        held[1][i] += q.y * k;
        held[2][i] += q.z * k;
        held[3][i] += q.w * k;
      }
    }
  }
}

// Puts the positions of the tile's tokens, as position(token) gives them, into shared memory.
template <class Position>
__device__ __forceinline__ void put_positions(TileShared& s, int first_token, Position position) {
  __syncthreads();  // those of the tile before have been read
  s.position[threadIdx.x] = position(first_token + static_cast<int>(threadIdx.x));
  __syncthreads();
}

// Whether `rows` logits per token are written and read again for less than another read of a key.
inline bool keeps_logits(FloatType type, int rows, int D) {
  return 2 * sizeof(float) * rows <= D * float_size(type);
}

// Logits [rows, N] of one KV head, kept from one kernel to the next; null if they are not.
struct KeptLogits {
  float* at;
  int N;
};

// Sums exp(logit) over the tokens [first, last) that each row of the tile sees: put(row, LogSum).
// Logits of tokens that are seen are kept where that is asked for.
template <class T, class Position, class Put>
__device__ void row_log_sums(TileShared& s, const TileInput<T>& in, const Causal& causal,
                             KeptLogits kept, int first_row, int first, int last, Position position,
                             Put put) {
  LogSum sums[kHeldRows];
  for (int r = 0; r < kHeldRows; ++r) sums[r] = empty_log_sum();
  const int highest = causal.highest(first_row, in.rows);
  for (int token = first; token < last && highest >= 0; token += kTileTokens) {
    put_positions(s, token, [&](int t) { return t < last ? position(t) : kNowhere; });
    Held logit;
    tile_products(s, in, first_row, token, logit);
#pragma unroll
    for (int r = 0; r < kHeldRows; ++r) {
      const int row = first_row + held_row(r), limit = causal.limit(row, in.rows);
      LogSum here = empty_log_sum();
#pragma unroll
      for (int i = 0; i < kHeldTokens; ++i) {
        if (s.position[held_token(i)] > limit) continue;
        here.max = fmaxf(here.max, logit[r][i]);
        if (kept.at) kept.at[std::int64_t{row} * kept.N + token + held_token(i)] = logit[r][i];
      }
      if (here.max == -INFINITY) continue;
#pragma unroll
      for (int i = 0; i < kHeldTokens; ++i) {
        if (s.position[held_token(i)] <= limit) here.sum += expf(logit[r][i] - here.max);
      }
      sums[r] = merged(sums[r], here);
    }
  }
  for (int r = 0; r < kHeldRows; ++r) {
    const float max = warp_max(sums[r].max);
    const float part = sums[r].sum > 0.0f ? sums[r].sum * expf(sums[r].max - max) : 0.0f;
    const LogSum sum{max, warp_sum(part)};
    const int row = first_row + held_row(r);
    if (threadIdx.x % kWarpSize == 0 && row < in.rows) put(row, sum);
  }
}

// The shares that a tile's rows pay to its tokens, given the log sums of the rows; 0 for what a row
// does not see. Logits that were kept are read instead of made again.
template <class T>
__device__ __forceinline__ void tile_shares(TileShared& s, const TileInput<T>& in,
                                            const Causal& causal, KeptLogits kept,
                                            const float* log_sums, int first_row, int first_token,
                                            TileShares& shares) {
  Held logit;
  if (kept.at) {
    __syncthreads();  // the shares before have been read
  } else {
    tile_products(s, in, first_row, first_token, logit);
  }
#pragma unroll
  for (int r = 0; r < kHeldRows; ++r) {
    const int row = first_row + held_row(r), limit = causal.limit(row, in.rows);
#pragma unroll
    for (int i = 0; i < kHeldTokens; ++i) {
      const int token = held_token(i);
      float share = 0.0f;
      if (s.position[token] <= limit) {
        const std::int64_t at = std::int64_t{row} * kept.N + first_token + token;
        share = share_of(kept.at ? kept.at[at] : logit[r][i], log_sums[row]);
      }
      shares[held_row(r)][token] = share;
    }
  }
  __syncthreads();
}

// Queries [E,W,Hq*D] of any float type to rows [E,groups,Hq/groups*W,D] of floats, times `scale`;
// with `averaged` to rows [E,1,W,D], summed over the heads.
struct SpreadArgs {
  const void* queries;
  float* rows;
  std::int32_t E, W, Hq, D, groups;
  float scale;
  bool averaged;
};
cudaError_t spread_queries(FloatType type, const SpreadArgs& args, cudaStream_t stream);

// parts [rows, chunks of N] of logits [rows, N].
cudaError_t sum_logits(const float* logits, LogSum* parts, std::int64_t rows, int N,
                       cudaStream_t stream);

// log_sums [n] of parts [n, chunks], merged in order.
cudaError_t merge_log_sums(const LogSum* parts, float* log_sums, std::int64_t n, int chunks,
                           cudaStream_t stream);

}  // namespace kvsift::kernels
