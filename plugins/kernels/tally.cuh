// How many ranks of each chunk of a row are chosen by a threshold, or are units: with the sums of
// the chunks before it every chunk knows where its choice begins.
#pragma once

#include "selection.cuh"

namespace kvsift::kernels {

// What is counted: row r has the ranks r / share and the threshold r / per. `above` and `equal` are
// those of the threshold; without thresholds the units, and how many of them are forced.
struct Tally {
  const unsigned* ranks;
  std::int32_t N;
  std::int32_t share;
  const Threshold* thresholds;
  std::int32_t per;
};

// Enqueues the count: tallies [rows, chunks].
void count_chunks(const Tally& tally, Counts* tallies, std::int64_t rows, cudaStream_t stream);

// Sums the tallies of `chunks` chunks with a whole warp, in all of its lanes.
__device__ __forceinline__ Counts sum_tallies(const Counts* tallies, int chunks) {
  Counts sum{0, 0};
  for (int c = threadIdx.x % kWarpSize; c < chunks; c += kWarpSize) {
    sum.above += tallies[c].above;
    sum.equal += tallies[c].equal;
  }
  return {__reduce_add_sync(kAllLanes, sum.above), __reduce_add_sync(kAllLanes, sum.equal)};
}

}  // namespace kvsift::kernels
