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
#else
#include "../cpu/cudacpu.h"
#endif
