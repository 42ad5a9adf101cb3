// Device helpers that several kernels use.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>

#include "launch.h"
#include "types.h"

namespace kvsift::kernels {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// Units or tokens whose sums one block makes. Fixed, so that a sum over a row, which adds the
// chunks in order, depends on the row alone.
constexpr int kChunk = 1024;

template <class T>
KVSIFT_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Calls f with a value of the float type, which only its type matters of.
template <class F>
cudaError_t with_float(FloatType type, F&& f) {
  switch (type) {
    case FloatType::kF32:
      f(float{});
      break;
    case FloatType::kF16:
      f(__half{});
      break;
    case FloatType::kBF16:
      f(__nv_bfloat16{});
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

// Whether a head of D elements is read in whole loads of 16 bytes.
inline bool whole_loads(FloatType type, std::int32_t D) {
  return D > 0 && D * float_size(type) % 16 == 0;
}

// Elements in 16 bytes.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
struct Pair;
template <>
struct Pair<__half> {
  using type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

// 16 bytes as floats.
template <class T>
__device__ __forceinline__ void unpack16(const uint4& raw, float (&to)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    memcpy(to, &raw, sizeof raw);
  } else {
    typename Pair<T>::type pair[4];
    memcpy(static_cast<void*>(pair), &raw, sizeof raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = to_float2(pair[i]);
      to[2 * i] = v.x;
      to[2 * i + 1] = v.y;
    }
  }
}

// One load of 16 bytes that nobody writes during the kernel. Keys and values are read by it alone,
// which lets the CPU count how often.
template <class T>
__device__ __forceinline__ uint4 load_raw(const T* from) {
  KVSIFT_ON_LOAD(from);
  return __ldg(reinterpret_cast<const uint4*>(from));
}
template <class T>
__device__ __forceinline__ void load16(const T* from, float (&to)[kVector<T>]) {
  unpack16<T>(load_raw(from), to);
}

// A sum over aligned groups of WIDTH lanes, in all of them.
template <int WIDTH>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}
__device__ __forceinline__ float warp_sum(float x) { return group_sum<kWarpSize>(x); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Min {
  __device__ float operator()(float a, float b) const { return fminf(a, b); }
};

// A reduction over the threads of a block, in all of them. `scratch` takes one value per warp and
// may be used again at once.
template <class Op>
__device__ __forceinline__ float block_reduce(float x, float* scratch, Op op, float identity) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, offset));
  __syncthreads();  // an earlier reduction has been read
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = lane < warps ? scratch[lane] : identity;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  return block_reduce(x, scratch, Sum{}, 0.0f);
}

// The sum of exp(x_i - max) and the max of a set of logits; -inf and 0 of none.
struct LogSum {
  float max;
  float sum;
};
__device__ __forceinline__ LogSum empty_log_sum() { return {-INFINITY, 0.0f}; }
__device__ __forceinline__ LogSum merged(LogSum a, LogSum b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, 0.0f};
  return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
}
// log(sum of exp), -inf of none.
__device__ __forceinline__ float log_of(LogSum a) {
  return a.sum > 0.0f ? a.max + logf(a.sum) : -INFINITY;
}
// exp(logit - log sum), 0 where nothing was summed.
__device__ __forceinline__ float share_of(float logit, float log_sum) {
  return logit == -INFINITY || log_sum == -INFINITY ? 0.0f : expf(logit - log_sum);
}

}  // namespace kvsift::kernels
