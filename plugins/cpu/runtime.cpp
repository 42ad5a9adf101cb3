// The CUDA runtime functions that code around the kernels calls, for builds without the runtime.
#include "cudacpu.h"

#if !defined(__CUDACC__)

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t code = cudacpu::last_error().code;
  cudacpu::last_error().code = cudaSuccess;
  return code;
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  if (!cudacpu::last_error().lists) std::memset(to, value, bytes);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorLaunchFailure:
      return cudacpu::last_error().message.c_str();
    default:
      return "CUDA error";
  }
}

// For tests: sets the order of threads, and counts the kernels launched so far.
__attribute__((visibility("default"))) void cudacpu_set_schedule(std::uint64_t seed) {
  cudacpu::schedule() = seed;
}
__attribute__((visibility("default"))) std::uint64_t cudacpu_launches() {
  return cudacpu::last_error().launches;
}
// From now on lists launches instead of running them, or runs them; returns those listed.
__attribute__((visibility("default"))) const char* cudacpu_list_launches(int lists) {
  static std::string log;
  log.swap(cudacpu::last_error().log);
  cudacpu::last_error().log.clear();
  cudacpu::last_error().lists = lists != 0;
  return log.c_str();
}
// Counts the 16-byte loads of an array from now on; null ends it.
__attribute__((visibility("default"))) void cudacpu_watch(const void* base, std::size_t bytes,
                                                          std::uint32_t* counts) {
  cudacpu::watch() = {reinterpret_cast<std::uintptr_t>(base), bytes, counts};
}

}  // extern "C"

#endif
