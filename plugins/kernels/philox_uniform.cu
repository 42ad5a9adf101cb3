#include "common.cuh"
#include "philox_uniform.h"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// A thread makes the four draws of one counter: draws 4q .. 4q + 3 of a unit.
__global__ void __launch_bounds__(kThreads) draw(PhiloxUniformArgs a, std::int64_t total) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= total) return;
  const int quads = ceil_div(a.draws, 4);
  const int j = static_cast<int>(t % a.N);
  const int quad = static_cast<int>(t / a.N % quads);
  const std::int64_t row = t / a.N / quads;  // (layer * E + e) * R + r
  const int e = static_cast<int>(row / a.R % a.E);
  const std::uint32_t stream =
      static_cast<std::uint32_t>(row / a.R / a.E) * a.heads_per_layer + row % a.R;
  const std::uint32_t id = a.unit_ids[row * a.N + j];
  const Words words = philox4x32(
      {{id, static_cast<std::uint32_t>(quad), stream, static_cast<std::uint32_t>(a.step[e])}},
      static_cast<std::uint32_t>(a.seed[2 * e]), static_cast<std::uint32_t>(a.seed[2 * e + 1]));
  float* u = a.u + (row * a.draws + 4 * quad) * a.N + j;
  for (int i = 0; i < 4 && 4 * quad + i < a.draws; ++i) {
    u[static_cast<std::int64_t>(i) * a.N] = uniform(words.x[i]);
  }
}

}  // namespace

std::size_t philox_uniform_workspace(const PhiloxUniformArgs&) { return 0; }

cudaError_t philox_uniform(const PhiloxUniformArgs& args, void*, cudaStream_t stream) {
  if (args.draws < 1 || args.heads_per_layer < 1) return cudaErrorInvalidValue;
  const std::int64_t total =
      std::int64_t{args.L} * args.E * args.R * args.N * ceil_div(args.draws, 4);
  if (total == 0) return cudaSuccess;
  KERNEL_LAUNCH((draw), static_cast<unsigned>(ceil_div(total, std::int64_t{kThreads})), kThreads, 0,
                stream, args, total);
  return cudaGetLastError();
}

}  // namespace kvsift::kernels
