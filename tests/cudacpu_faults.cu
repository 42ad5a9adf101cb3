// Small kernels for the tests of plugins/cpu: right ones, and one for each fault to be found.
#include "../plugins/kernels/launch.h"

namespace {

constexpr int kThreads = 64;

// Reverses 64 numbers through shared memory.
__global__ void reverse(const int* from, int* to, bool barrier) {
  __shared__ int held[kThreads];
  held[threadIdx.x] = from[threadIdx.x];
  if (barrier) __syncthreads();
  to[threadIdx.x] = held[kThreads - 1 - threadIdx.x];
}

// The same within a warp.
__global__ void reverse_warps(const int* from, int* to, bool barrier) {
  __shared__ int held[kThreads];
  held[threadIdx.x] = from[threadIdx.x];
  if (barrier) __syncwarp();
  to[threadIdx.x] = held[threadIdx.x ^ 31];
}

// Writes beyond an array by `excess` elements: global, static shared or dynamic shared.
__global__ void overrun(int* global, int which, int excess) {
  __shared__ int fixed[kThreads];
  DYN_SHARED(int, dynamic);
  int* array = which == 0 ? global : which == 1 ? fixed : dynamic;
  array[threadIdx.x + excess] = 1;
}

__global__ void diverge(int kind) {
  if (kind == 0 && threadIdx.x < 32) return;  // exited threads
  if (kind == 1 && threadIdx.x < 32) {
    __syncthreads();  // another barrier than the others'
  } else if (kind == 2 && threadIdx.x == 5) {
    __syncwarp();  // for which nobody else comes
  } else if (kind == 3) {
    if (threadIdx.x % 32 < 16) __shfl_sync(0xffff0000u, 1, 0);  // lanes that the mask lacks
  } else {
    __syncthreads();
  }
}

// Reads shared memory that nobody wrote.
__global__ void uninitialised(float* to) {
  __shared__ float held[kThreads];
  DYN_SHARED(float, dynamic);
  to[threadIdx.x] = threadIdx.x % 2 ? held[threadIdx.x] : dynamic[threadIdx.x];
}

// Warp and block functions: every result of one thread in 16 ints.
__global__ void functions(int* out) {
  const int t = threadIdx.x, lane = t % 32;
  __shared__ int total;
  if (t == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, t);
  int* mine = out + 16 * t;
  mine[0] = __shfl_sync(0xffffffffu, lane, 3);
  mine[1] = __shfl_up_sync(0xffffffffu, lane, 2);
  mine[2] = __shfl_down_sync(0xffffffffu, lane, 2);
  mine[3] = __shfl_xor_sync(0xffffffffu, lane, 5);
  mine[4] = __shfl_xor_sync(0xffffffffu, lane, 1, 4);
  mine[5] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0));
  mine[6] = __all_sync(0xffffffffu, lane < 32) + 2 * __any_sync(0xffffffffu, lane == 40);
  mine[7] = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(lane)));
  mine[8] = __reduce_max_sync(0xffffffffu, lane) + 100 * __reduce_min_sync(0xffffffffu, lane + 1);
  mine[9] = __syncthreads_count(t % 2);
  mine[10] = __syncthreads_and(t < 64) + 2 * __syncthreads_or(t == 64);
  mine[11] = total;
  mine[12] = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  mine[13] = static_cast<int>(__half2float(__float2half(0.1f)) * 1e6f);
  mine[14] = static_cast<int>(__bfloat162float(__float2bfloat16(0.1f)) * 1e6f);
  mine[15] = __popc(0xf0u) + 10 * __ffs(8) + 100 * __clz(1);
}

}  // namespace

#define ENTRY extern "C" __attribute__((visibility("default"))) int

ENTRY run_reverse(const int* from, int* to, int warps, int barrier) {
  if (warps) {
    KERNEL_LAUNCH((reverse_warps), 1, kThreads, 0, 0, from, to, barrier != 0);
  } else {
    KERNEL_LAUNCH((reverse), 1, kThreads, 0, 0, from, to, barrier != 0);
  }
  return cudaGetLastError();
}

ENTRY run_overrun(int* global, int which, int excess) {
  KERNEL_LAUNCH((overrun), 1, kThreads, kThreads * sizeof(int), 0, global, which, excess);
  return cudaGetLastError();
}

ENTRY run_diverge(int kind) {
  KERNEL_LAUNCH((diverge), 1, kThreads, 0, 0, kind);
  return cudaGetLastError();
}

ENTRY run_uninitialised(float* to) {
  KERNEL_LAUNCH((uninitialised), 1, kThreads, kThreads * sizeof(float), 0, to);
  return cudaGetLastError();
}

ENTRY run_functions(int* out) {
  KERNEL_LAUNCH((functions), dim3(2, 3, 1), 64, 0, 0, out);
  return cudaGetLastError();
}

ENTRY run_threads(int threads) {
  KERNEL_LAUNCH((diverge), 1, threads, 0, 0, 9);
  return cudaGetLastError();
}

extern "C" __attribute__((visibility("default"))) const char* message(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
