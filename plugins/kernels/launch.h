// How kernels are launched and declared, by nvcc for a GPU and by other compilers for the CPU.
#pragma once

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
// Shared memory whose size the launch gives.
#define DYN_SHARED(T, name)                                        \
  extern __shared__ __align__(16) unsigned char kvsift_dynamic_[]; \
  T* name = reinterpret_cast<T*>(kvsift_dynamic_)
#define KVSIFT_UNPAREN(...) __VA_ARGS__
#define KERNEL_LAUNCH(kernel, grid, block, dynamic_bytes, stream, ...) \
  KVSIFT_UNPAREN kernel<<<(grid), (block), (dynamic_bytes), (stream)>>>(__VA_ARGS__)
// With dynamic shared memory beyond the 48 KB in all that any launch may have.
#define KERNEL_LAUNCH_SHARED(kernel, grid, block, dynamic_bytes, stream, ...)                \
  do {                                                                                       \
    cudaFuncSetAttribute(KVSIFT_UNPAREN kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, \
                         static_cast<int>(dynamic_bytes));                                   \
    KERNEL_LAUNCH(kernel, grid, block, dynamic_bytes, stream, __VA_ARGS__);                  \
  } while (0)
#define KVSIFT_ON_LOAD(address) ((void)0)
#else
#include "../cpu/cudacpu.h"
#endif
