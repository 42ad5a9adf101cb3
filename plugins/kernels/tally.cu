#include "tally.cuh"

namespace kvsift::kernels {
namespace {

constexpr int kThreads = 256;

// The grid is (rows, chunks).
__global__ void __launch_bounds__(kThreads) count(Tally t, Counts* tallies) {
  __shared__ int above_of[kThreads / kWarpSize], equal_of[kThreads / kWarpSize];
  const std::int64_t row = blockIdx.x;
  const unsigned* ranks = t.ranks + row / t.share * t.N;
  const unsigned limit = t.thresholds ? t.thresholds[row / t.per].rank : kPaddingRank;
  const unsigned same = t.thresholds ? limit : kForcedRank;
  const int first = blockIdx.y * kChunk, last = min(t.N, first + kChunk);
  int above = 0, equal = 0;
#pragma unroll
  for (int k = 0; k < kChunk; k += kThreads) {
    const int i = first + k + threadIdx.x;
    const unsigned rank = i < last ? ranks[i] : kPaddingRank;
    above += i < last && rank > limit;
    equal += i < last && rank == same;
  }
  above = __reduce_add_sync(kAllLanes, above);
  equal = __reduce_add_sync(kAllLanes, equal);
  if (threadIdx.x % kWarpSize == 0) {
    above_of[threadIdx.x / kWarpSize] = above;
    equal_of[threadIdx.x / kWarpSize] = equal;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Counts sum{0, 0};
  for (int w = 0; w < kThreads / kWarpSize; ++w) {
    sum.above += above_of[w];
    sum.equal += equal_of[w];
  }
  tallies[row * gridDim.y + blockIdx.y] = sum;
}

}  // namespace

void count_chunks(const Tally& tally, Counts* tallies, std::int64_t rows, cudaStream_t stream) {
  KERNEL_LAUNCH((count), dim3(static_cast<unsigned>(rows), ceil_div(tally.N, kChunk)), kThreads, 0,
                stream, tally, tallies);
}

}  // namespace kvsift::kernels
