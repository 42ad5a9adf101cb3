// Inner products of query rows with a tile of keys, for the ops that score tokens by the attention
// of some queries. A block reads the keys of its tile once, into shared memory, and takes all query
// rows of the KV head past them, 32 at a time.
//
// The query rows of a KV head are those of its group's heads in turn: row g * W + w is query w of
// the group's head g.
#pragma once

#include "common.cuh"

namespace kvsift::kernels {

constexpr int kTileRows = 32;
constexpr int kTileTokens = 64;  // most of a tile; half of it for long heads
constexpr int kTileSlice = 32;   // elements of the queries in shared memory at a time
constexpr int kTileThreads = 128;
constexpr int kTileWarps = kTileThreads / kWarpSize;
// What a thread holds: every fourth row, from its warp on, and its lane's tokens, 32 apart.
constexpr int kHeldRows = kTileRows / kTileWarps;
constexpr int kHeldTokens = kTileTokens / kWarpSize;
constexpr int kNowhere = INT_MAX;  // position of a token that is not valid
// Tokens whose log sums a block makes. Fixed, so that a row's sum depends on the row alone.
constexpr int kTileChunk = 512;
// Elements of a head: up to the first a tile has 64 tokens, up to the second 32.
constexpr int kWideHead = 256, kLongestHead = 512;

KVSIFT_HD int tile_tokens(int D) { return D <= kWideHead ? kTileTokens : kTileTokens / 2; }
// Bytes of dynamic shared memory for the keys of a tile, as floats, whose rows an odd number of
// elements apart do not share a bank.
inline std::size_t tile_bytes(int D) { return sizeof(float) * tile_tokens(D) * (D + 1); }
// Whether heads of D elements fit.
inline bool tiles_fit(FloatType type, int D) { return whole_loads(type, D) && D <= kLongestHead; }

struct TileShared {
  // A warp reads its rows, which lie side by side, as float4.
  alignas(16) float query[kTileSlice][kTileRows + 4];
  int position[kTileTokens];
};

using Held = float[kHeldRows][kHeldTokens];

using TileShares = float[kTileRows][kTileTokens + 1];

// The row of the tile, and the token of the tile, that a thread's value [r][i] belongs to.
__device__ __forceinline__ int held_row(int r) {
  return static_cast<int>(threadIdx.x) / kWarpSize + r * kTileWarps;
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

// Puts the positions of the tile's tokens, as position(token) gives them, into shared memory.
template <class Position>
__device__ __forceinline__ void put_positions(TileShared& s, int D, int first_token,
                                              Position position) {
  const int t = threadIdx.x;
  __syncthreads();  // those of the tile before have been read
  if (t < kTileTokens) s.position[t] = t < tile_tokens(D) ? position(first_token + t) : kNowhere;
  __syncthreads();
}

// Loads some slices of the keys of the tile's valid tokens; every load of a head comes before the
// first store, so that all are in flight together.
template <int SLICES, class T>
__device__ __forceinline__ void load_slices(const TileShared& s, const TileInput<T>& in, float* key,
                                            int first_token, int slice) {
  constexpr int kPieces = kTileSlice / kVector<T>;
  constexpr int kLoads = kTileTokens * kPieces / kTileThreads;
  [[maybe_unused]] constexpr int kHeads = SLICES > 1 ? 1 : 8 / kLoads;  // at a time
  const int d = threadIdx.x % kPieces * kVector<T>;  // the same for all of a thread's loads
  float sums[SLICES][kLoads][kVector<T>] = {};
  const T* from = in.keys + std::int64_t{first_token} * in.D + slice + d;
#pragma unroll(kHeads)
  for (int h = 0; h < in.heads; ++h) {
    float part[SLICES][kLoads][kVector<T>] = {};
#pragma unroll
    for (int p = 0; p < SLICES; ++p) {
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int token = (k * kTileThreads + static_cast<int>(threadIdx.x)) / kPieces;
        if (s.position[token] == kNowhere || slice + p * kTileSlice + d >= in.D) continue;
        load16(from + h * in.stride + token * in.D + p * kTileSlice, part[p][k]);
      }
    }
#pragma unroll
    for (int p = 0; p < SLICES; ++p) {
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sums[p][k][i] += part[p][k][i];
      }
    }
  }
#pragma unroll
  for (int p = 0; p < SLICES; ++p) {
    const int at = slice + p * kTileSlice + d;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int token = (k * kTileThreads + static_cast<int>(threadIdx.x)) / kPieces;
      if (at >= in.D || token >= tile_tokens(in.D)) continue;
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) key[token * (in.D + 1) + at + i] = sums[p][k][i];
    }
  }
}

// Loads the keys of the tile from first_token on, whose positions are in s.position: key [tokens,
// D + 1] in shared memory, 0 for tokens that are not valid. The only reading of the keys.
template <class T>
__device__ __forceinline__ void load_keys(const TileShared& s, const TileInput<T>& in, float* key,
                                          int first_token) {
  constexpr int kSlices = sizeof(T) == 2 ? 4 : 2;
  __syncthreads();  // the tile before has been used
  if (in.heads == 1) {
    for (int slice = 0; slice < in.D; slice += kSlices * kTileSlice) {
      load_slices<kSlices>(s, in, key, first_token, slice);
    }
  } else {
    for (int slice = 0; slice < in.D; slice += kTileSlice) {
      load_slices<1>(s, in, key, first_token, slice);
    }
  }
  __syncthreads();
}

template <class T>
__device__ __forceinline__ void load_queries(TileShared& s, const TileInput<T>& in, int first_row,
                                             int slice) {
  constexpr int kFours = kTileSlice / 4;
#pragma unroll
  for (int i = threadIdx.x; i < kTileRows * kFours; i += kTileThreads) {
    const int row = i / kFours, d = i % kFours * 4;
    const int at = row % kTileWarps * kHeldRows + row / kTileWarps;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first_row + row < in.rows && slice + d < in.D) {
      v = *reinterpret_cast<const float4*>(in.query + std::int64_t{first_row + row} * in.D + slice +
                                           d);
    }
    s.query[d][at] = v.x;
    s.query[d + 1][at] = v.y;
    s.query[d + 2][at] = v.z;
    s.query[d + 3][at] = v.w;
  }
}

// Adds the products of a slice of `depth` elements to the first ROWS rows that a thread holds.
template <int ROWS>
__device__ __forceinline__ void multiply(const TileShared& s, const float* key, int D, int depth,
                                         Held& held) {
  const int warp = threadIdx.x / kWarpSize;
  const float* mine[kHeldTokens];
#pragma unroll
  for (int i = 0; i < kHeldTokens; ++i) {  // a short tile has no second token: any key will do
    mine[i] = key + (held_token(i) < tile_tokens(D) ? held_token(i) : held_token(0)) * (D + 1);
  }
#pragma unroll 8
  for (int d = 0; d < depth; ++d) {
    float q[ROWS];
    const float* from = &s.query[d][warp * kHeldRows];
    if constexpr (ROWS == 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      q[0] = two.x;
      q[1] = two.y;
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + r);
        q[r] = four.x;
        q[r + 1] = four.y;
        q[r + 2] = four.z;
        q[r + 3] = four.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeldTokens; ++i) {
      const float k = mine[i][d];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) held[r][i] += q[r] * k;
    }
  }
}

// The inner products of rows first_row .. with the tile's keys; 0 for tokens and rows that are not
// valid. Every thread must call it.
template <class T>
__device__ void tile_products(TileShared& s, const TileInput<T>& in, const float* key,
                              int first_row, Held& held) {
#pragma unroll
  for (int r = 0; r < kHeldRows; ++r) {
#pragma unroll
    for (int i = 0; i < kHeldTokens; ++i) held[r][i] = 0.0f;
  }
  const int rows = in.rows - first_row;
  for (int slice = 0; slice < in.D; slice += kTileSlice) {
    const int depth = min(kTileSlice, in.D - slice);
    __syncthreads();  // the slice before has been used
    load_queries(s, in, first_row, slice);
    __syncthreads();
    if (rows <= 2 * kTileWarps) {
      multiply<2>(s, key + slice, in.D, depth, held);
    } else if (rows <= 4 * kTileWarps) {
      multiply<4>(s, key + slice, in.D, depth, held);
    } else {
      multiply<kHeldRows>(s, key + slice, in.D, depth, held);
    }
  }
}

// Whether `rows` logits per token are written and read again for less than another read of a key.
inline bool keeps_logits(FloatType type, int rows, int D) {
  return 2 * sizeof(float) * rows <= D * float_size(type);
}

// Most query rows of a slot whose logits are kept at these sizes or smaller ones: fewer queries may
// keep theirs where many do not.
inline std::size_t most_kept_rows(FloatType type, std::size_t rows, int heads, int D) {
  const std::size_t most = heads * (D * float_size(type) / (2 * sizeof(float)));
  return rows < most ? rows : most;
}

// Logits [rows, N] of one KV head, kept from one kernel to the next; null if they are not.
struct KeptLogits {
  float* at;
  int N;
};

// Sums exp(logit) over the tokens [first, last) that each row sees, into sums[row * stride]. A row
// sees no token before `lowest(token)`'s position, which saves whole tiles. Logits of tokens that
// are seen are kept where that is asked for.
template <class T, class Position, class Lowest>
__device__ void row_log_sums(TileShared& s, const TileInput<T>& in, float* key,
                             const Causal& causal, KeptLogits kept, int first, int last,
                             Position position, Lowest lowest, LogSum* sums, int stride) {
  for (int row = threadIdx.x; row < in.rows; row += kTileThreads) {
    sums[std::int64_t{row} * stride] = empty_log_sum();
  }
  for (int token = first; token < last; token += tile_tokens(in.D)) {
    put_positions(s, in.D, token, [&](int t) { return t < last ? position(t) : kNowhere; });
    load_keys(s, in, key, token);
    for (int row0 = 0; row0 < in.rows; row0 += kTileRows) {
      if (causal.highest(row0, in.rows) < lowest(token)) continue;
      Held logit;
      tile_products(s, in, key, row0, logit);
#pragma unroll
      for (int r = 0; r < kHeldRows; ++r) {
        const int row = row0 + held_row(r), limit = causal.limit(row, in.rows);
        if (row >= in.rows) break;  // the same for the whole warp
        LogSum here = empty_log_sum();
#pragma unroll
        for (int i = 0; i < kHeldTokens; ++i) {
          if (s.position[held_token(i)] > limit) continue;
          here.max = fmaxf(here.max, logit[r][i]);
          if (kept.at) kept.at[std::int64_t{row} * kept.N + token + held_token(i)] = logit[r][i];
        }
        here.max = warp_max(here.max);
        if (here.max == -INFINITY) continue;
#pragma unroll
        for (int i = 0; i < kHeldTokens; ++i) {
          if (s.position[held_token(i)] <= limit) here.sum += expf(logit[r][i] - here.max);
        }
        here.sum = warp_sum(here.sum);
        LogSum& sum = sums[std::int64_t{row} * stride];
        if (threadIdx.x % kWarpSize == 0) sum = merged(sum, here);
      }
    }
  }
}

// The shares that rows first_row .. pay to the tile's tokens, given the log sums of the rows; 0 for
// what a row does not see. Logits that were kept are read instead of made again, from keys that
// must then be loaded.
template <class T>
__device__ __forceinline__ void tile_shares(TileShared& s, const TileInput<T>& in, const float* key,
                                            const Causal& causal, KeptLogits kept,
                                            const float* log_sums, int first_row, int first_token,
                                            TileShares& shares) {
  Held logit;
  if (!kept.at) tile_products(s, in, key, first_row, logit);
  __syncthreads();  // the shares before have been read
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
void sum_logits(const float* logits, LogSum* parts, std::int64_t rows, int N, cudaStream_t stream);

// log_sums [n] of parts [n, chunks], merged in a fixed order.
void merge_log_sums(const LogSum* parts, float* log_sums, std::int64_t n, int chunks,
                    cudaStream_t stream);

}  // namespace kvsift::kernels
