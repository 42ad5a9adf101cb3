// The threshold of the k highest of many ranks, by as many blocks as the ranks fill: a radix select
// of four passes, each a histogram of one byte that all blocks of a group add to. Counts are whole
// numbers, so the order in which blocks add changes nothing.
#pragma once

#include "selection.cuh"

namespace kvsift::kernels {

// Rows longer than this are chosen from by several blocks, a chunk each; in a shorter one a block
// does it all.
constexpr int kOneBlock = 8 * kChunk;
inline bool spreads(std::int64_t n) { return n > kOneBlock; }

// What the ranks of a group are made from.
enum class Ranks {
  kGiven,   // they are there
  kRivals,  // those too, but forced ones do not compete
  kTails,   // floats: the greatest for even groups, the least for odd ones
};

// Groups of n ranks or floats; `share` groups in a row have the same.
struct Group {
  const void* ranks;
  std::int64_t n;
  int share;
  const int* lengths;  // of the ranks of each `lengths_of` groups, or null: all n
  int lengths_of;

  __device__ __forceinline__ int length(std::int64_t group) const {
    return lengths ? lengths[group / lengths_of] : static_cast<int>(n);
  }
};

template <Ranks KIND>
__device__ __forceinline__ unsigned rank_at(const Group& g, std::int64_t group, int i) {
  const std::int64_t at = group / g.share * g.n + i;
  if constexpr (KIND == Ranks::kTails) {
    const float x = static_cast<const float*>(g.ranks)[at];
    return rank_of(group % 2 == 0 ? x : -x);
  } else {
    const unsigned rank = static_cast<const unsigned*>(g.ranks)[at];
    return KIND == Ranks::kRivals && rank == kForcedRank ? kPaddingRank : rank;
  }
}

// What finding a group's threshold needs in the workspace.
struct FindSpace {
  unsigned* bins;         // [groups, 4, 256]
  Threshold* states;      // [groups, 4]: before each pass, the bytes found and the ranks needed
  Threshold* thresholds;  // [groups]
  int* wanted;            // [groups]: how many of the highest; none if 0 or less
};
constexpr std::size_t kFindBytes =
    4 * 256 * sizeof(unsigned) + (4 + 1) * sizeof(Threshold) + 2 * sizeof(int);
// Parts of kFindBytes * groups bytes, aligned to 8.
inline FindSpace find_space(void* workspace, std::int64_t groups) {
  FindSpace space{};
  space.bins = static_cast<unsigned*>(workspace);
  space.states = reinterpret_cast<Threshold*>(space.bins + groups * 4 * 256);
  space.thresholds = space.states + groups * 4;
  space.wanted = reinterpret_cast<int*>(space.thresholds + groups);
  return space;
}

// Enqueues the search for the thresholds of the `wanted` highest ranks of each group. A group that
// wants none gets the threshold {none, 0}.
template <Ranks KIND>
void find_thresholds(const Group& group, const FindSpace& space, std::int64_t groups, unsigned none,
                     cudaStream_t stream);

}  // namespace kvsift::kernels
