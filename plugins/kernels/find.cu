#include "find.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// The state before pass `pass`, from the state and the histogram of the pass before. Every thread
// must call it.
__device__ Threshold state_of(const FindSpace& space, std::int64_t group, int pass,
                              SelectShared& s) {
  if (pass == 0) return {0, space.wanted[group]};
  const Threshold before = space.states[group * 4 + pass - 1];
  return narrowed(space.bins + (group * 4 + pass - 1) * 256, before, 32 - 8 * pass, s);
}

// The grid is (groups, chunks).
template <Ranks KIND>
__global__ void __launch_bounds__(kThreads) count_bytes(Group g, FindSpace space, int pass) {
  __shared__ SelectShared s;
  const std::int64_t group = blockIdx.x;
  if (space.wanted[group] <= 0) return;
  const Threshold state = state_of(space, group, pass, s);
  if (blockIdx.y == 0 && threadIdx.x == 0) space.states[group * 4 + pass] = state;
  const int shift = 24 - 8 * pass, n = g.length(group), first = blockIdx.y * kChunk;
  const unsigned mask = pass == 0 ? 0 : ~0u << (shift + 8);
  s.bins[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = first + threadIdx.x; i < first + kChunk; i += kThreads) {
    const unsigned rank = i < n ? rank_at<KIND>(g, group, i) : 0;
    count_digit(s.bins, i < n && (rank & mask) == state.rank, rank >> shift & 255);
  }
  __syncthreads();
  const unsigned count = s.bins[threadIdx.x];
  if (count) atomicAdd(&space.bins[(group * 4 + pass) * 256 + threadIdx.x], count);
}

// A warp per group.
__global__ void __launch_bounds__(kWarpSize) settle(FindSpace space, unsigned none) {
  __shared__ SelectShared s;
  const std::int64_t group = blockIdx.x;
  const Threshold found =
      space.wanted[group] > 0 ? state_of(space, group, 4, s) : Threshold{none, 0};
  if (threadIdx.x == 0) space.thresholds[group] = found;
}

}  // namespace

template <Ranks KIND>
void find_thresholds(const Group& group, const FindSpace& space, std::int64_t groups, unsigned none,
                     cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(groups) * 4 * 256 * sizeof(unsigned);
  cudaMemsetAsync(space.bins, 0, bytes, stream);
  const dim3 grid(static_cast<unsigned>(groups),
                  static_cast<unsigned>(ceil_div(group.n, std::int64_t{kChunk})));
  for (int pass = 0; pass < 4; ++pass) {
    KERNEL_LAUNCH((count_bytes<KIND>), grid, kThreads, 0, stream, group, space, pass);
  }
  KERNEL_LAUNCH((settle), static_cast<unsigned>(groups), kWarpSize, 0, stream, space, none);
}

template void find_thresholds<Ranks::kGiven>(const Group&, const FindSpace&, std::int64_t, unsigned,
                                             cudaStream_t);
template void find_thresholds<Ranks::kRivals>(const Group&, const FindSpace&, std::int64_t,
                                              unsigned, cudaStream_t);
template void find_thresholds<Ranks::kTails>(const Group&, const FindSpace&, std::int64_t, unsigned,
                                             cudaStream_t);

}  // namespace kvsift::kernels
