#include "expected_attention_score.h"
#include "rows.cuh"
#include "tile.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// Mean rotation of each evicting slot, turns [E, D / 2], with the factor on it.
__global__ void __launch_bounds__(kThreads)
    average_rotations(ExpectedAttentionScoreArgs a, float2* turns) {
  const int t = blockIdx.x * kThreads + threadIdx.x, half = a.D / 2;
  if (t >= a.E * half) return;
  const Turn turn = mean_rotation(a.tokens_seen[t / half], a.n_future, a.inv_freq[t % half]);
  turns[t] = make_float2(static_cast<float>(turn.cos * a.rope_factor),
                         static_cast<float>(turn.sin * a.rope_factor));
}

// Row d of M as two entries: M x = first * x[d % half] + second * x[d % half + half].
__device__ __forceinline__ float2 rotation_row(const float2* turns, int d, int half) {
  const float2 turn = turns[d % half];
  return d < half ? make_float2(turn.x, -turn.y) : make_float2(turn.y, turn.x);
}

// mu' / sqrt(D) as means [E, Hq, D] and cov' / (2 D) as moments [E, Hq, D, D]; the grid is
// (elements of a head, Hq, E).
__global__ void __launch_bounds__(kThreads)
    rotate(ExpectedAttentionScoreArgs a, const float2* all_turns, float* means, float* moments) {
  const int h = blockIdx.y, e = blockIdx.z, slot = a.evict_slots[e], half = a.D / 2;
  const int t = blockIdx.x * kThreads + threadIdx.x, i = t / a.D, j = t % a.D;
  if (slot < 0 || i >= a.D) return;
  const std::int64_t from = std::int64_t{slot} * a.Hq + h, to = std::int64_t{e} * a.Hq + h;
  const float2* turns = all_turns + e * half;
  const float2 row = rotation_row(turns, i, half);
  if (j == 0) {
    const float* mean = a.mean + from * a.D + i % half;
    means[to * a.D + i] = (row.x * mean[0] + row.y * mean[half]) / sqrtf(static_cast<float>(a.D));
  }
  if (!a.use_covariance) return;
  const float2 column = rotation_row(turns, j, half);
  const float* upper = a.moment + (from * a.D + i % half) * a.D + j % half;
  const float* lower = upper + half * a.D;
  const float sum = row.x * (column.x * upper[0] + column.y * upper[half]) +
                    row.y * (column.x * lower[0] + column.y * lower[half]);
  const float count = static_cast<float>(max(1, a.tokens_seen[e] - a.sink_tokens));
  moments[(to * a.D + i) * a.D + j] = sum / (count * 2.0f * a.D);
}

// logits [E, Hq, N], -inf where a unit is not rated; the grid is (tiles of units, Hkv, E).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    rate(ExpectedAttentionScoreArgs a, const float* means, const float* moments, float* logits) {
  __shared__ TileShared shared;
  __shared__ float parts[kTileWarps][kTileTokens];
  DYN_SHARED(float, key);
  const int g = blockIdx.y, e = blockIdx.z, slot = a.evict_slots[e], group = a.Hq / a.Hkv;
  const int first_token = blockIdx.x * tile_tokens(a.D), token = threadIdx.x;
  if (slot < 0) return;
  const T* keys = static_cast<const T*>(a.keys) + (std::int64_t{slot} * a.Hkv + g) * a.C * a.D;
  const std::int32_t* ids = a.unit_ids + (std::int64_t{e} * a.R + g) * a.N;
  put_positions(shared, a.D, first_token, [&](int t) {
    return t < a.N && t < a.C && ids[t] >= 0 && ids[t] >= a.sink_tokens ? t : kNowhere;
  });
  const int rows = a.use_covariance ? a.D : 1;
  TileInput<T> in{nullptr, keys, 0, rows, 1, a.D};
  load_keys(shared, in, key, first_token);
  for (int h = 0; h < group; ++h) {
    const std::int64_t head = std::int64_t{e} * a.Hq + g * group + h;
    const float* mean = means + head * a.D;
    in.query = a.use_covariance ? moments + head * a.D * a.D : mean;
    // k^T cov' k + mu' k = sum over rows i of k_i ((cov' k)_i + mu'_i).
    float sums[kHeldTokens] = {};
    for (int row = 0; row < rows; row += kTileRows) {
      Held held;
      tile_products(shared, in, key, row, held);
#pragma unroll
      for (int r = 0; r < kHeldRows; ++r) {
        const int at = row + held_row(r);
        if (at >= rows) break;
#pragma unroll
        for (int i = 0; i < kHeldTokens; ++i) {
          if (shared.position[held_token(i)] == kNowhere) continue;
          sums[i] += a.use_covariance
                         ? (held[r][i] + mean[at]) * key[held_token(i) * (a.D + 1) + at]
                         : held[r][i];
        }
      }
    }
    __syncthreads();  // those of the head before have been added
#pragma unroll
    for (int i = 0; i < kHeldTokens; ++i) parts[threadIdx.x / kWarpSize][held_token(i)] = sums[i];
    __syncthreads();
    if (token >= tile_tokens(a.D) || first_token + token >= a.N) continue;
    float logit = 0.0f;
    for (int w = 0; w < kTileWarps; ++w) logit += parts[w][token];
    logits[head * a.N + first_token + token] =
        shared.position[token] == kNowhere ? -INFINITY : logit;
  }
}

// Averages over the group and multiplies by |v|; the grid is (rows, parts of a row).
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    weigh(ExpectedAttentionScoreArgs a, int lanes, const float* logits, const float* log_sums) {
  constexpr int kUnits = 8;
  const std::int64_t row = blockIdx.x;
  const UnitRows<T> units = unit_rows<T>(a, a.values, row);
  const int group = a.Hq / a.Hkv, groups = kRowThreads / lanes;
  for (int i = 0; i < kUnits; ++i) {
    const int j = (blockIdx.y * kUnits + i) * groups + threadIdx.x / lanes;
    const bool valid = units.valid(j), rated = valid && units.ids[j] >= a.sink_tokens;
    RowPart<T> value;
    value.load(units.rows + std::int64_t{j} * a.D, rated && a.use_vnorm, a.D, lanes);
    const float square = row_sum(value.dot(value), lanes);
    if (j >= a.N || threadIdx.x % lanes != 0) continue;
    float score = valid ? 0.0f : -INFINITY;
    if (rated) {
      float sum = 0.0f;
      for (int h = 0; h < group; ++h) {
        const std::int64_t head = row * group + h;
        sum += share_of(logits[head * a.N + j], log_sums[head]);
      }
      score = (sum / group + a.epsilon) * (a.use_vnorm ? sqrtf(square) : 1.0f);
    }
    a.score[row * a.N + j] = score;
  }
}

// Parts of the workspace in floats, the 16-byte aligned ones first.
struct Space {
  std::size_t heads, means, moments, logits, parts;
};
Space space_of(const ExpectedAttentionScoreArgs& a) {
  const std::size_t heads = std::size_t{1} * a.E * a.Hq;
  return {heads, heads * a.D, a.use_covariance ? heads * a.D * a.D : 0, heads * a.N,
          heads * ceil_div(a.N, kChunk)};
}

}  // namespace

std::size_t expected_attention_score_workspace(const ExpectedAttentionScoreArgs& a) {
  const Space space = space_of(a);
  return sizeof(float) * (space.means + space.moments + space.logits + space.heads) +
         sizeof(LogSum) * space.parts + sizeof(float2) * a.E * (a.D / 2);
}

cudaError_t expected_attention_score(const ExpectedAttentionScoreArgs& args, void* workspace,
                                     cudaStream_t stream) {
  if (!rows_fit(args) || !tiles_fit(args.dtype, args.D) || args.D % 2 != 0 ||
      args.Dh != args.D / 2 || args.Hkv < 1 || args.Hq % args.Hkv != 0 || args.n_future < 1) {
    return cudaErrorInvalidValue;
  }
  if (args.E == 0 || args.N == 0) return cudaSuccess;
  const Space space = space_of(args);
  float* means = static_cast<float*>(workspace);
  float* moments = means + space.means;
  float2* turns = reinterpret_cast<float2*>(moments + space.moments);
  LogSum* parts = reinterpret_cast<LogSum*>(turns + args.E * (args.D / 2));
  float* logits = reinterpret_cast<float*>(parts + space.parts);
  float* log_sums = logits + space.logits;
  const std::int64_t heads = static_cast<std::int64_t>(space.heads);
  const int lanes = row_lanes(args.dtype, args.D);
  KERNEL_LAUNCH((average_rotations), ceil_div(args.E * (args.D / 2), kThreads), kThreads, 0, stream,
                args, turns);
  KERNEL_LAUNCH((rotate), dim3(ceil_div(args.D * args.D, kThreads), args.Hq, args.E), kThreads, 0,
                stream, args, turns, means, moments);
  return with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    KERNEL_LAUNCH_SHARED((rate<T>), dim3(ceil_div(args.N, tile_tokens(args.D)), args.Hkv, args.E),
                         kTileThreads, tile_bytes(args.D), stream, args, means, moments, logits);
    sum_logits(logits, parts, heads, args.N, stream);
    merge_log_sums(parts, log_sums, heads, ceil_div(args.N, kChunk), stream);
    KERNEL_LAUNCH((weigh<T>), dim3(args.E * args.R, ceil_div(args.N, kRowThreads / lanes * 8)),
                  kRowThreads, 0, stream, args, lanes, logits, log_sums);
  });
}

}  // namespace kvsift::kernels
