// Runs CUDA C++ kernels on the CPU: the same source, compiled by g++ instead of nvcc.
//
// A kernel sees threads, blocks, shared memory, barriers, warp functions, atomics and the float
// types of NVIDIA's own headers (a toolkit's, or the PyPI wheels nvidia-cuda-runtime, -crt and
// -cccl). Each thread of a block is a fiber; blocks run one after another, in this process' memory.
// A launch has run when it returns. What the build finds:
//
//   every build          barriers that not all threads reach, deadlocks, masks with absent lanes
//   -fsanitize=address   accesses out of bounds, of global, static and dynamic shared memory (with
//                        -fsanitize-sections=cudacpu_shared)
//   -fsanitize=thread    a missing __syncthreads or __syncwarp: the barriers are the only order
//                        between the threads of a block that ThreadSanitizer is told of
//   CUDACPU_SEED         other orders of threads, see schedule() in fiber.h
//
// Shared memory and the dynamic one start as bytes 0xFF in every block, so that what is read before
// it is written is NaN. Not covered: races between blocks, tensor core and asynchronous copy
// instructions, cooperative groups, textures. A kernel must be launched by KERNEL_LAUNCH, and lie
// in an anonymous namespace, or g++ does not guard its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __restrict__
#undef __align__
#define __global__
#define __device__
#define __host__
// One block is in flight, so plain static memory does; its own section allows it to be poisoned.
#define __shared__ static __attribute__((section("cudacpu_shared")))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) alignas(n)

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "collectives.h"
#include "intrinsics.h"
#include "watch.h"

extern "C" {
extern unsigned char __start_cudacpu_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_cudacpu_shared[] __attribute__((weak, visibility("hidden")));
}

namespace cudacpu {

// The error that cudaGetLastError hands out next, what the kernel did, kernels launched so far,
// and, where a test asks for it, a line for each: the kernel, its blocks and its threads a block.
struct LastError {
  cudaError_t code = cudaSuccess;
  std::string message;
  std::uint64_t launches = 0;
  bool lists = false;
  std::string log;
};
inline LastError& last_error() {
  static LastError error;
  return error;
}

__attribute__((no_sanitize("address", "thread"), noinline)) inline void poison_shared() {
  volatile unsigned char* end = __stop_cudacpu_shared;
  for (volatile unsigned char* p = __start_cudacpu_shared; p != end; ++p) *p = 0xFF;
}

inline std::string deadlock(const Context& c) {
  std::string report = "deadlock in block " + std::to_string(blockIdx.x) + ":";
  int line = -1;
  for (unsigned i = 0; i < c.threads; ++i) {
    const Fiber& f = c.fibers[i];
    if (f.state != State::kBlock && f.state != State::kWarp) continue;
    if (f.line != line) report += " thread " + std::to_string(i) + " waits" + at(f.file, f.line);
    line = f.line;
  }
  return report;
}

CUDACPU_NOSAN inline void run_block(Context& c, std::mt19937_64& random,
                                    std::vector<unsigned>& order) {
  c.live = c.threads;
  c.arrived = 0;
  CUDACPU_RELEASE(&c.begin);  // what the host wrote reaches the threads
  for (unsigned i = 0; i < c.threads; ++i) rewind(c.fibers[i]);
  const std::uint64_t kind = schedule();
  while (c.live) {
    bool progress = false;
    if (kind > 2) std::shuffle(order.begin(), order.end(), random);
    for (unsigned k = 0; k < c.threads && c.live; ++k) {
      Fiber& f = c.fibers[kind == 1 ? c.threads - 1 - k : kind > 2 ? order[k] : k];
      if (f.state != State::kReady) continue;
      progress = true;
      swap_to(c.main, f);
    }
    if (c.error.empty() && !progress && c.live) c.error = deadlock(c);
    if (!c.error.empty()) break;
  }
  CUDACPU_ACQUIRE(&c.end);
}

// Runs every block; throws Error at the first that cannot go on.
template <class F>
void run_grid(dim3 grid, dim3 block, std::size_t dynamic_bytes, std::size_t most, F& body) {
  Context& c = context();
  const unsigned threads = block.x * block.y * block.z;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || dynamic_bytes > most || blocks == 0 ||
      grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw Error("invalid launch configuration");
  }
  grow(c, threads);
  c.threads = threads;
  for (unsigned i = 0; i < threads; ++i) {
    c.fibers[i].tid = make_uint3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    c.fibers[i].linear = i;
  }
  c.entry = [](void* p) { (*static_cast<F*>(p))(); };
  c.arg = &body;
#if defined(__SANITIZE_THREAD__)
  c.main.tsan = __tsan_get_current_fiber();
#endif
  blockDim = block;
  gridDim = grid;
  std::mt19937_64 random(schedule());
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) order[i] = i;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t b = schedule() == 1 ? blocks - 1 - i : i;
    blockIdx = make_uint3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    // Of the exact size, so that AddressSanitizer sees an overrun.
    std::unique_ptr<void, void (*)(void*)> dynamic(std::malloc(dynamic_bytes), std::free);
    if (dynamic_bytes) std::memset(dynamic.get(), 0xFF, dynamic_bytes);
    c.dynamic = static_cast<unsigned char*>(dynamic.get());
    poison_shared();
    run_block(c, random, order);
    if (c.error.empty()) continue;
    const std::string error = c.error;
    c.error.clear();
    c.fibers.clear();  // their stacks hold half-run threads
    throw Error(error);
  }
}

// As a launch on a stream that has run: errors wait for cudaGetLastError, and nothing more runs.
template <class F>
void launch(const char* kernel, dim3 grid, dim3 block, std::size_t dynamic_bytes, std::size_t most,
            F&& body) {
  LastError& last = last_error();
  if (last.code != cudaSuccess) return;
  ++last.launches;
  if (last.lists) {
    last.log += std::string(kernel) + " " +
                std::to_string(std::uint64_t{grid.x} * grid.y * grid.z) + " " +
                std::to_string(block.x * block.y * block.z) + "\n";
    return;
  }
  try {
    run_grid(grid, block, dynamic_bytes, most, body);
  } catch (const std::exception& error) {
    last.code = cudaErrorLaunchFailure;
    last.message = error.what();
  }
}

}  // namespace cudacpu

#define DYN_SHARED(T, name) T* name = reinterpret_cast<T*>(cudacpu::context().dynamic)
#define CUDACPU_UNPAREN(...) __VA_ARGS__
#define CUDACPU_LAUNCH(most, kernel, grid, block, dynamic_bytes, stream, ...) \
  do {                                                                        \
    (void)(stream);                                                           \
    cudacpu::launch(#kernel, (grid), (block), (dynamic_bytes), (most),        \
                    [&] { CUDACPU_UNPAREN kernel(__VA_ARGS__); });            \
  } while (0)
// Most dynamic shared memory of any launch, and of one that has asked for more: what is left of
// the 99 KB of the smallest GPUs beside 20 KB of static memory.
#define KERNEL_LAUNCH(...) CUDACPU_LAUNCH(48 * 1024, __VA_ARGS__)
#define KERNEL_LAUNCH_SHARED(...) CUDACPU_LAUNCH(79 * 1024, __VA_ARGS__)
// Counts reads of watched memory, see watch.h.
#define KVSIFT_ON_LOAD(address) cudacpu::watch().count(address)
