#include "tile.cuh"
#include "window_mass.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;
// How the heads are grouped, and where the parts of the workspace begin.
struct Layout {
  bool averaged;  // mean_qk: one head, the mean of all
  int heads;      // heads with a softmax of their own
  int groups;     // of heads that share keys
  int rows;       // query rows of a group
  int chunks;     // of kChunk units of a row
};

Layout layout_of(const WindowMassArgs& a) {
  const bool averaged = static_cast<HeadReduce>(a.head_reduce) == HeadReduce::kMeanQk;
  const int heads = averaged ? 1 : a.Hq, groups = averaged ? 1 : a.Hkv;
  return {averaged, heads, groups, groups ? heads / groups * a.W : 0, ceil_div(a.N, kChunk)};
}

// Units that a block scores: as many as fill a tile, at least one.
KVSIFT_HD int units_per_block(int block_size, int D) {
  return block_size < tile_tokens(D) ? tile_tokens(D) / block_size : 1;
}

// log sum of exp(logit) over the tokens of one unit in a row of a tile.
__device__ __forceinline__ float unit_log_sum(const float* logit, int first, int last) {
  LogSum sum = empty_log_sum();
  for (int t = first; t < last; ++t) sum.max = fmaxf(sum.max, logit[t]);
  if (sum.max == -INFINITY) return -INFINITY;
  for (int t = first; t < last; ++t) sum.sum += expf(logit[t] - sum.max);
  return log_of(sum);
}

// log(exp(a) + exp(b)).
__device__ __forceinline__ float log_added(float a, float b) {
  return log_of(merged({a, a == -INFINITY ? 0.0f : 1.0f}, {b, b == -INFINITY ? 0.0f : 1.0f}));
}

// log sum of exp(logit) of each unit, unit_logs [E, heads, W, N]; the grid is (units, groups, E).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 3)
    unit_log_sums(WindowMassArgs a, Layout layout, const float* queries, float* unit_logs) {
  __shared__ TileShared shared;
  __shared__ TileShares logits;  // -inf where a query does not see the token
  DYN_SHARED(float, key);
  const int g = blockIdx.y, e = blockIdx.z, slot = a.evict_slots[e], seen = a.tokens_seen[e];
  if (slot < 0) return;
  const int per_block = units_per_block(a.block_size, a.D);
  const int first_unit = blockIdx.x * per_block, units = min(per_block, a.N - first_unit);
  const std::int64_t head = std::int64_t{e} * layout.groups + g;
  const std::int64_t cache_row = std::int64_t{slot} * a.Hkv + g;
  const TileInput<T> in{queries + head * layout.rows * a.D,
                        static_cast<const T*>(a.keys) + cache_row * a.C * a.D,
                        std::int64_t{a.C} * a.D,
                        layout.rows,
                        layout.averaged ? a.Hkv : 1,
                        a.D};
  const Causal causal{a.W, seen - a.W, a.W};
  const std::int32_t* ids = a.unit_ids + (std::int64_t{e} * a.R + (a.R > 1 ? g : 0)) * a.N;
  const int first_token = first_unit * a.block_size;  // below C, or the tile is not valid
  const int tokens = units * a.block_size;
  unit_logs += head * layout.rows * a.N + first_unit;

  for (int offset = 0; offset < tokens; offset += tile_tokens(a.D)) {
    put_positions(shared, a.D, first_token + offset, [&](int t) {
      const int unit = t / a.block_size;
      if (t >= first_token + tokens || t >= a.C || ids[unit] < 0) return kNowhere;
      const std::int64_t position =
          static_cast<std::int64_t>(ids[unit]) * a.block_size + t % a.block_size;
      return position < seen ? static_cast<int>(position) : kNowhere;
    });
    load_keys(shared, in, key, first_token + offset);
    for (int row = 0; row < layout.rows; row += kTileRows) {
      Held logit;
      tile_products(shared, in, key, row, logit);
      __syncthreads();  // the logits before have been read
#pragma unroll
      for (int r = 0; r < kHeldRows; ++r) {
        const int limit = causal.limit(row + held_row(r), layout.rows);
#pragma unroll
        for (int i = 0; i < kHeldTokens; ++i) {
          const bool sees = shared.position[held_token(i)] <= limit;
          logits[held_row(r)][held_token(i)] = sees ? logit[r][i] : -INFINITY;
        }
      }
      __syncthreads();
      for (int p = threadIdx.x; p < kTileRows * units; p += kTileThreads) {
        const int r = p / units, u = p % units, first = u * a.block_size;
        if (row + r >= layout.rows) continue;
        float sum = unit_log_sum(logits[r], first, min(first + a.block_size, tile_tokens(a.D)));
        float* log = &unit_logs[std::int64_t{row + r} * a.N + u];
        if (offset) sum = log_added(*log, sum);  // one unit, longer than a tile
        *log = sum;
      }
    }
  }
}

// Averages the shares over the heads of a row; the grid is (units, W, E * R).
__global__ void __launch_bounds__(kThreads)
    average(WindowMassArgs a, Layout layout, const float* unit_logs, const LogSum* parts) {
  DYN_SHARED(float, log_sums);
  const int e = blockIdx.z / a.R, r = blockIdx.z % a.R, w = blockIdx.y;
  if (a.evict_slots[e] < 0) return;
  const int heads = layout.heads / a.R;
  const std::int64_t first = std::int64_t{e} * layout.heads + r * heads;
  for (int h = threadIdx.x; h < heads; h += kThreads) {
    LogSum sum = empty_log_sum();
    for (int c = 0; c < layout.chunks; ++c) {
      sum = merged(sum, parts[((first + h) * a.W + w) * layout.chunks + c]);
    }
    log_sums[h] = log_of(sum);
  }
  __syncthreads();
  const int j = blockIdx.x * kThreads + threadIdx.x;
  if (j >= a.N) return;
  float sum = 0.0f;
  for (int h = 0; h < heads; ++h) {
    sum += share_of(unit_logs[((first + h) * a.W + w) * a.N + j], log_sums[h]);
  }
  a.mass[((std::int64_t{e} * a.R + r) * a.W + w) * a.N + j] = sum / heads;
}

}  // namespace

std::size_t window_mass_workspace(const WindowMassArgs& a) {
  const Layout layout = layout_of(a);
  const std::size_t rows = std::size_t{1} * a.E * layout.heads * a.W;
  return rows * (sizeof(float) * (a.D + a.N) + sizeof(LogSum) * layout.chunks);
}

cudaError_t window_mass(const WindowMassArgs& args, void* workspace, cudaStream_t stream) {
  const Layout layout = layout_of(args);
  const bool per_head = static_cast<HeadReduce>(args.head_reduce) == HeadReduce::kPerHead;
  if (!tiles_fit(args.dtype, args.D) || args.block_size < 1 || args.Hkv < 1 ||
      args.R != (per_head ? args.Hkv : 1) || (!layout.averaged && args.Hq % args.Hkv != 0)) {
    return cudaErrorInvalidValue;
  }
  if (args.E == 0 || args.W == 0 || args.N == 0) return cudaSuccess;
  const std::size_t rows = std::size_t{1} * args.E * layout.heads * args.W;
  float* queries = static_cast<float*>(workspace);  // 16-byte aligned rows
  LogSum* parts = reinterpret_cast<LogSum*>(queries + rows * args.D);
  float* unit_logs = reinterpret_cast<float*>(parts + rows * layout.chunks);
  const float summed = layout.averaged ? static_cast<float>(args.Hq) * args.Hkv : 1.0f;
  const float scale = 1.0f / (std::sqrt(static_cast<float>(args.D)) * summed);
  cudaError_t error = spread_queries(args.dtype,
                                     {args.q_window, queries, args.E, args.W, args.Hq, args.D,
                                      layout.groups, scale, layout.averaged},
                                     stream);
  if (error != cudaSuccess) return error;
  const dim3 tiles(ceil_div(args.N, units_per_block(args.block_size, args.D)), layout.groups,
                   args.E);
  error = with_float(args.dtype, [&](auto type) {
    KERNEL_LAUNCH_SHARED((unit_log_sums<decltype(type)>), tiles, kTileThreads, tile_bytes(args.D),
                         stream, args, layout, queries, unit_logs);
  });
  if (error != cudaSuccess) return error;
  sum_logits(unit_logs, parts, static_cast<std::int64_t>(rows), args.N, stream);
  KERNEL_LAUNCH((average), dim3(ceil_div(args.N, kThreads), args.W, args.E * args.R), kThreads,
                sizeof(float) * (layout.heads / args.R), stream, args, layout, unit_logs, parts);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
