// Reading rows of a cache, a group of lanes per row: 16 bytes a lane and load.
#pragma once

#include "common.cuh"

namespace kvsift::kernels {

// Loads of 16 bytes that a lane holds of one row; a warp holds 2 * 32 * 16 bytes.
constexpr int kHeld = 2;
constexpr int kRowThreads = 256;

// Lanes that read a row of D elements together: a power of two up to a warp.
inline int row_lanes(FloatType type, std::int32_t D) {
  const int pieces = static_cast<int>(D * float_size(type) / 16);
  int lanes = 1;
  while (lanes < pieces && lanes < kWarpSize) lanes *= 2;
  return lanes;
}

// Whether rows of D elements can be read so.
inline bool readable(FloatType type, std::int32_t D) {
  return whole_loads(type, D) && D * float_size(type) <= kHeld * kWarpSize * 16;
}

// This lane's part of a row, as floats; 0 beyond the row.
template <class T>
struct RowPart {
  float x[kHeld * kVector<T>];

  static constexpr int kSize = kHeld * kVector<T>;

  // Which element of the row x[i] is; may be D or more.
  static __device__ __forceinline__ int element(int i, int lanes) {
    return (i / kVector<T> * lanes + threadIdx.x % lanes) * kVector<T> + i % kVector<T>;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = 0.0f;
  }

  // Takes each 16 bytes of a row that piece(element) gives; nothing if the row does not exist.
  template <class Piece>
  __device__ __forceinline__ void load_pieces(bool exists, int D, int lanes, Piece piece) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int at = element(h * kVector<T>, lanes);
      float part[kVector<T>] = {};
      if (exists && at < D) unpack16<T>(piece(at), part);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) x[h * kVector<T> + i] = part[i];
    }
  }

  // Reads row `from`.
  __device__ __forceinline__ void load(const T* from, bool exists, int D, int lanes) {
    load_pieces(exists, D, lanes, [=](int at) { return load_raw(from + at); });
  }

  // Reads row `from` and keeps it in shared memory.
  __device__ __forceinline__ void load_and_keep(const T* from, bool exists, int D, int lanes,
                                                T* kept) {
    load_pieces(exists, D, lanes, [=](int at) {
      const uint4 raw = load_raw(from + at);
      *reinterpret_cast<uint4*>(kept + at) = raw;
      return raw;
    });
  }

  // Reads a row from shared memory.
  __device__ __forceinline__ void load_kept(const T* kept, bool exists, int D, int lanes) {
    load_pieces(exists, D, lanes,
                [=](int at) { return *reinterpret_cast<const uint4*>(kept + at); });
  }

  // Reads a row of floats.
  __device__ __forceinline__ void load_floats(const float* from, int D, int lanes) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int at = element(i, lanes);
      x[i] = at < D ? from[at] : 0.0f;
    }
  }

  __device__ __forceinline__ void store_floats(float* to, int D, int lanes) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int at = element(i, lanes);
      if (at < D) to[at] = x[i];
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= factor;
  }

  // this += factor * other.
  __device__ __forceinline__ void add(const RowPart& other, float factor) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] += factor * other.x[i];
  }

  // This lane's part of the inner product.
  __device__ __forceinline__ float dot(const RowPart& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += x[i] * other.x[i];
    return sum;
  }
};

// A sum over the lanes of a row, in all of them. Every lane of the warp must call it.
__device__ __forceinline__ float row_sum(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, offset);
  }
  return x;
}

// 1 / |k|, 0 for no length.
__device__ __forceinline__ float inverse_norm(float square) {
  return square > 0.0f ? 1.0f / sqrtf(square) : 0.0f;
}

// Where the rows of one head of an evicting slot lie, and which of them are units.
template <class T>
struct UnitRows {
  const T* rows;
  const std::int32_t* ids;
  std::int32_t N, C, D;
  bool skipped;

  __device__ __forceinline__ bool valid(int j) const {
    return !skipped && j < N && j < C && ids[j] >= 0;
  }
};

// The rows of evicting row `row` = e * Hkv + h of a cache [B,Hkv,C,D], with ids [E,Hkv,N].
template <class T, class Args>
__device__ __forceinline__ UnitRows<T> unit_rows(const Args& a, const void* cache,
                                                 std::int64_t row) {
  const std::int64_t slot = a.evict_slots[row / a.Hkv], head = row % a.Hkv;
  const T* rows = static_cast<const T*>(cache);
  if (slot >= 0) rows += (slot * a.Hkv + head) * a.C * a.D;
  return {rows, a.unit_ids + row * a.N, a.N, a.C, a.D, slot < 0};
}

// Whether the arguments of a scorer that reads cache rows make sense.
template <class Args>
bool rows_fit(const Args& a) {
  return readable(a.dtype, a.D) && a.R == a.Hkv;
}

// Adds the parts that the block's groups hold of a row of D elements, in the order of the groups,
// and calls put(element, sum) for each element. `shared` takes kRowThreads * RowPart::kSize
// floats; every thread must call it.
template <class T, class Put>
__device__ void sum_groups(const RowPart<T>& part, int D, int lanes, float* shared, Put put) {
  constexpr int kSize = RowPart<T>::kSize;
  __syncthreads();  // an earlier use has been read
#pragma unroll
  for (int i = 0; i < kSize; ++i) shared[i * kRowThreads + threadIdx.x] = part.x[i];
  __syncthreads();
  for (int s = threadIdx.x; s < kSize * lanes; s += kRowThreads) {
    const int i = s / lanes, lane = s % lanes;
    const int element = (i / kVector<T> * lanes + lane) * kVector<T> + i % kVector<T>;
    float sum = 0.0f;
    for (int g = lane; g < kRowThreads; g += lanes) sum += shared[i * kRowThreads + g];
    if (element < D) put(element, sum);
  }
}

}  // namespace kvsift::kernels
