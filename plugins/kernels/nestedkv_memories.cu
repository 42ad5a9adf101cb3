#include "nestedkv_memories.cuh"

namespace kvsift::kernels {
namespace {

// Tokens in a row that a group of lanes compares; the sum over the window starts afresh for each.
constexpr int kRun = 64;

// A block per row.
__global__ void __launch_bounds__(kRowThreads) count_row(NestedKVScoreArgs a, int* counts) {
  __shared__ SelectShared shared;
  const std::int64_t row = blockIdx.x;
  const std::int32_t* ids = a.unit_ids + row * a.N;
  const bool skipped = a.evict_slots[row / a.Hkv] < 0;
  const int n = min(a.N, a.C);
  const auto valid = [=](int i) { return ids[i] >= 0 ? 1u : kPaddingRank; };
  const int count = skipped ? 0 : count_units(n, valid, shared).above;
  if (threadIdx.x == 0) counts[row] = count;
}

// Sums k / |k| over each episodic block, into its memory; the grid is (rows, blocks).
template <class T>
__global__ void __launch_bounds__(kRowThreads, 2)
    sum_blocks(NestedKVScoreArgs a, NestedSpace space, int lanes) {
  __shared__ float shared[kRowThreads * RowPart<T>::kSize];
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row];
  const int size = episodic_size(n, a.block_div, a.block_min, a.block_max);
  const std::int64_t first = std::int64_t{blockIdx.y} * size;
  if (first >= n) return;
  const int last = min(n, static_cast<int>(first) + size);
  const UnitRows<T> units = unit_rows<T>(a, a.keys, row);
  RowPart<T> total;
  total.clear();
  for (int base = static_cast<int>(first); base < last; base += kRowThreads / lanes) {
    const int j = base + threadIdx.x / lanes;
    RowPart<T> key;
    key.load(units.rows + std::int64_t{j} * a.D, j < last, a.D, lanes);
    total.add(key, inverse_norm(row_sum(key.dot(key), lanes)));
  }
  float* sum = space.memories + (row * (1 + space.blocks) + 1 + blockIdx.y) * a.D;
  sum_groups<T>(total, a.D, lanes, shared, [=](int d, float x) { sum[d] = x; });
}

// The stable memory is the sum of the blocks; a block per row.
__global__ void __launch_bounds__(kRowThreads) sum_row(NestedKVScoreArgs a, NestedSpace space) {
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row];
  const int blocks = ceil_div(n, episodic_size(n, a.block_div, a.block_min, a.block_max));
  float* memories = space.memories + row * (1 + space.blocks) * a.D;
  for (int d = threadIdx.x; d < a.D; d += kRowThreads) {
    float sum = 0.0f;
    for (int b = 1; b <= blocks; ++b) sum += memories[b * a.D + d];
    memories[d] = sum;
  }
}

// Scales every memory to length 1; the grid is (rows, 1 + blocks).
__global__ void __launch_bounds__(kRowThreads) normalize(NestedKVScoreArgs a, NestedSpace space) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row];
  const int size = episodic_size(n, a.block_div, a.block_min, a.block_max);
  if (n == 0 || (static_cast<std::int64_t>(blockIdx.y) - 1) * size >= n) return;
  float* memory = space.memories + (row * (1 + space.blocks) + blockIdx.y) * a.D;
  float square = 0.0f;
  for (int d = threadIdx.x; d < a.D; d += kRowThreads) square += memory[d] * memory[d];
  const float factor = inverse_norm(block_sum(square, scratch));
  for (int d = threadIdx.x; d < a.D; d += kRowThreads) memory[d] *= factor;
}

// Reads a key as a direction.
template <class T>
__device__ __forceinline__ void load_direction(RowPart<T>& key, const UnitRows<T>& units, int j,
                                               bool exists, int lanes) {
  key.load(units.rows + std::int64_t{j} * units.D, exists, units.D, lanes);
  const float factor = inverse_norm(row_sum(key.dot(key), lanes));
#pragma unroll
  for (int i = 0; i < RowPart<T>::kSize; ++i) key.x[i] *= factor;
}

// The grid is (rows, parts of a row); a group of lanes handles kRun tokens in turn.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 2)
    compare(NestedKVScoreArgs a, NestedSpace space, int lanes) {
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row];
  const int size = episodic_size(n, a.block_div, a.block_min, a.block_max);
  const UnitRows<T> units = unit_rows<T>(a, a.keys, row);
  const float* memories = space.memories + row * (1 + space.blocks) * a.D;
  float* anomalies = space.anomalies + row * kMemories * a.N;
  const bool writes = threadIdx.x % lanes == 0;
  const int first = (blockIdx.y * (kRowThreads / lanes) + threadIdx.x / lanes) * kRun;
  if (blockIdx.y * (kRowThreads / lanes) * kRun >= static_cast<unsigned>(n)) return;

  RowPart<T> key, stable, episodic, current;
  stable.load_floats(memories, a.D, lanes);
  current.clear();
  // Every lane of a warp takes every turn, whatever exists for its group.
  for (int back = a.continuum ? a.window - 1 : 0; back > 0; --back) {
    const int j = first - back;
    load_direction(key, units, j, j >= 0 && j < n, lanes);
    current.add(key, 1.0f);
  }
  int block = -1;
  for (int i = 0; i < kRun; ++i) {
    const int j = first + i;
    const bool exists = j < n;
    load_direction(key, units, j, exists, lanes);
    const float along = row_sum(key.dot(stable), lanes);
    if (exists && writes) anomalies[j] = -along;
    if (!a.continuum) continue;
    if (exists && j / size != block) {
      block = j / size;
      episodic.load_floats(memories + (1 + block) * a.D, a.D, lanes);
    }
    const float with_block = row_sum(key.dot(episodic), lanes);
    current.add(key, 1.0f);
    const float with_window = row_sum(key.dot(current), lanes);
    const float length = row_sum(current.dot(current), lanes);
    if (exists && writes) {
      anomalies[a.N + j] = -with_block;
      anomalies[2 * a.N + j] = -with_window * inverse_norm(length);
    }
    const int oldest = j - a.window + 1;
    load_direction(key, units, oldest, exists && oldest >= 0, lanes);
    current.add(key, -1.0f);
  }
}

}  // namespace

cudaError_t compare_with_memories(const NestedKVScoreArgs& args, const NestedSpace& space,
                                  cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(space.rows);
  const int lanes = row_lanes(args.dtype, args.D);
  const int run = kRowThreads / lanes * kRun;
  KERNEL_LAUNCH((count_row), rows, kRowThreads, 0, stream, args, space.counts);
  return with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    KERNEL_LAUNCH((sum_blocks<T>), dim3(rows, space.blocks), kRowThreads, 0, stream, args, space,
                  lanes);
    KERNEL_LAUNCH((sum_row), rows, kRowThreads, 0, stream, args, space);
    KERNEL_LAUNCH((normalize), dim3(rows, 1 + space.blocks), kRowThreads, 0, stream, args, space);
    KERNEL_LAUNCH((compare<T>), dim3(rows, ceil_div(args.N, run)), kRowThreads, 0, stream, args,
                  space, lanes);
  });
}

}  // namespace kvsift::kernels
