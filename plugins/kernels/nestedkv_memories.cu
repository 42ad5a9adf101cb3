#include "nestedkv_memories.cuh"

namespace kvsift::kernels {
namespace {

// Tokens in a row that a group of lanes compares at a time.
constexpr int kRun = 4;
// Least tokens that a block compares: it also reads the window before them once more.
constexpr int kSpan = 512;
// Most dynamic shared memory of a block.
constexpr std::size_t kMostShared = 79 * 1024;

// How a block walks over its span, and the parts of its dynamic shared memory.
struct Walk {
  int lanes, tile, span;  // lanes of a key; tokens of a step, and of a block
  int ring;  // keys that are kept: those of the window and of a step, or of a step only
  bool far;  // the window is too long to keep: leaving keys are read again

  std::size_t ring_bytes(FloatType type, int D) const {
    return ring * (D * float_size(type) + sizeof(float));
  }
  // With the sums of the groups, and the window's.
  std::size_t bytes(FloatType type, int D) const {
    return ring_bytes(type, D) + sizeof(float) * D * (kRowThreads / lanes + 1);
  }
};

Walk walk_of(const NestedKVScoreArgs& a) {
  Walk walk{row_lanes(a.dtype, a.D), 0, 0, 0, false};
  walk.tile = kRowThreads / walk.lanes * kRun;
  const int least = a.continuum && a.window > kSpan ? a.window : kSpan;
  walk.span = ceil_div(least, walk.tile) * walk.tile;
  if (!a.continuum) return walk;
  walk.far = a.window > kSpan;
  walk.ring = walk.tile + (walk.far ? 0 : a.window);
  if (walk.bytes(a.dtype, a.D) > kMostShared) {
    walk.far = true;
    walk.ring = walk.tile;
  }
  return walk;
}

// A block per row.
__global__ void __launch_bounds__(1024) count_row(NestedKVScoreArgs a, int* counts) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const std::int32_t* ids = a.unit_ids + row * a.N;
  const bool skipped = a.evict_slots[row / a.Hkv] < 0;
  int count = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < min(a.N, a.C); i += blockDim.x) count += ids[i] >= 0;
  // A float counts exactly up to 2^24.
  const float all = block_sum(static_cast<float>(count), scratch);
  if (threadIdx.x == 0) counts[row] = skipped ? 0 : static_cast<int>(all);
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
#pragma unroll 4
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

// Scales a key to length 1; returns the factor.
template <class T>
__device__ __forceinline__ float to_direction(RowPart<T>& key, int lanes) {
  const float factor = inverse_norm(row_sum(key.dot(key), lanes));
  key.scale(factor);
  return factor;
}

// The keys of the newest tokens, in shared memory, with the factors that make them directions.
template <class T>
struct Ring {
  T* keys;         // [size, D]
  float* factors;  // [size]
  int size, D, lanes;

  __device__ __forceinline__ T* key(int i) const { return keys + i % size * D; }
  __device__ __forceinline__ void get(RowPart<T>& to, int i, bool exists) const {
    to.load_kept(key(i), exists, D, lanes);
    to.scale(exists ? factors[i % size] : 0.0f);
  }
};

// Compares the tokens of a span with the memories; the grid is (rows, spans). The window's sum
// moves along: every step adds its keys and takes away those that leave, group by group of lanes,
// whose sums are then added up in order.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 2)
    compare(NestedKVScoreArgs a, NestedSpace space, Walk walk) {
  DYN_SHARED(unsigned char, bytes);
  const int lanes = walk.lanes, groups = kRowThreads / lanes, group = threadIdx.x / lanes;
  const std::int64_t row = blockIdx.x;
  const int n = space.counts[row], start = blockIdx.y * walk.span;
  if (start >= n) return;
  const int end = min(n, start + walk.span);
  const int size = episodic_size(n, a.block_div, a.block_min, a.block_max);
  const UnitRows<T> units = unit_rows<T>(a, a.keys, row);
  const float* memories = space.memories + row * (1 + space.blocks) * a.D;
  float* anomalies = space.anomalies + row * kMemories * a.N;
  const bool writes = threadIdx.x % lanes == 0;
  T* keys = reinterpret_cast<T*>(bytes);
  float* factors = reinterpret_cast<float*>(keys + walk.ring * a.D);
  const Ring<T> ring{keys, factors, walk.ring, a.D, lanes};
  float* sums = factors + walk.ring;  // [groups, D]
  float* window = sums + groups * a.D;

  // The window of the first token begins at `oldest`; steps begin at a multiple of a tile before.
  const int before = a.continuum ? a.window - 1 : 0, oldest = max(0, start - before);
  const int origin = start - ceil_div(before, walk.tile) * walk.tile;
  const auto leaving = [&](RowPart<T>& key, int j) {
    const bool leaves = j - a.window >= oldest;
    if (walk.far) {
      key.load(units.rows + std::int64_t{j - a.window} * a.D, leaves, a.D, lanes);
      to_direction(key, lanes);
    } else {
      ring.get(key, j - a.window - origin, leaves);
    }
  };
  for (int d = threadIdx.x; a.continuum && d < a.D; d += kRowThreads) window[d] = 0.0f;

  RowPart<T> key, stable;
  stable.load_floats(memories, a.D, lanes);
  for (int base = origin; base < end; base += walk.tile) {
    const int first = base + group * kRun;
    RowPart<T> sum, episodic;
    sum.clear();
    int block = -1;
    // Every lane of a warp takes every turn; more of them at once would spill registers.
#pragma unroll 2
    for (int i = 0; i < kRun; ++i) {
      const int j = first + i;
      const bool exists = j >= oldest && j < end;
      const T* from = units.rows + std::int64_t{j} * a.D;
      if (a.continuum) {
        key.load_and_keep(from, exists, a.D, lanes, ring.key(j - origin));
      } else {
        key.load(from, exists, a.D, lanes);
      }
      const float factor = to_direction(key, lanes);
      if (a.continuum && writes) factors[(j - origin) % walk.ring] = factor;
      sum.add(key, 1.0f);
      const float along = row_sum(key.dot(stable), lanes);
      const bool put = exists && j >= start && writes;
      if (put) anomalies[j] = -along;
      if (!a.continuum) continue;
      if (exists && j / size != block) {
        block = j / size;
        episodic.load_floats(memories + (1 + block) * a.D, a.D, lanes);
      }
      const float with_block = row_sum(key.dot(episodic), lanes);
      if (put) anomalies[a.N + j] = -with_block;
    }
    if (!a.continuum) continue;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      leaving(key, first + i);
      sum.add(key, -1.0f);
    }
    sum.store_floats(sums + group * a.D, a.D, lanes);
    __syncthreads();
    for (int d = threadIdx.x; d < a.D; d += kRowThreads) {
      float so_far = window[d];
      for (int g = 0; g < groups; ++g) {
        const float mine = sums[g * a.D + d];
        sums[g * a.D + d] = so_far;
        so_far += mine;
      }
      window[d] = so_far;
    }
    __syncthreads();
    sum.load_floats(sums + group * a.D, a.D, lanes);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int j = first + i;
      const bool exists = j >= oldest && j < end;
      leaving(key, j);
      sum.add(key, -1.0f);
      ring.get(key, j - origin, exists);
      sum.add(key, 1.0f);
      const float with_window = row_sum(key.dot(sum), lanes);
      const float length = row_sum(sum.dot(sum), lanes);
      if (exists && j >= start && writes) {
        anomalies[2 * a.N + j] = -with_window * inverse_norm(length);
      }
    }
    __syncthreads();  // the next step writes over the ring and the sums
  }
}

}  // namespace

cudaError_t compare_with_memories(const NestedKVScoreArgs& args, const NestedSpace& space,
                                  cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(space.rows);
  const Walk walk = walk_of(args);
  const int lanes = walk.lanes;
  KERNEL_LAUNCH((count_row), rows, 1024, 0, stream, args, space.counts);
  return with_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    KERNEL_LAUNCH((sum_blocks<T>), dim3(rows, space.blocks), kRowThreads, 0, stream, args, space,
                  lanes);
    KERNEL_LAUNCH((sum_row), rows, kRowThreads, 0, stream, args, space);
    KERNEL_LAUNCH((normalize), dim3(rows, 1 + space.blocks), kRowThreads, 0, stream, args, space);
    KERNEL_LAUNCH_SHARED((compare<T>), dim3(rows, ceil_div(args.N, walk.span)), kRowThreads,
                         args.continuum ? walk.bytes(args.dtype, args.D) : 0, stream, args, space,
                         walk);
  });
}

}  // namespace kvsift::kernels
