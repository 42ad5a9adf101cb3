// NestedKVScore: anomaly of a key against three time scales.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// A scale whose anomalies span less than this says nothing: it counts as constant.
constexpr float kFlat = 1e-5f;

// Tokens of an episodic block in a row of n.
KVSIFT_HD int episodic_size(int n, int div, int shortest, int longest) {
  const int size = n / div > shortest ? n / div : shortest;
  return size < longest ? size : longest;
}

// Tokens at each end of a scale that measure it.
KVSIFT_HD int tail_size(float share, int n) {
  const int size = static_cast<int>(static_cast<double>(share) * n + 1e-3);
  return size > 1 ? size : 1;
}

// keys [B,Hkv,C,D], unit_ids [E,R,N], evict_slots [E]; score [E,R,N] with R = Hkv. Unit j is row j
// of the slot; the valid units of a row come first. Skipped slots score -inf.
//
// Keys are read twice, since the memories of the whole row come before any comparison, and the
// window - 1 keys before each span of 512 tokens once more, where its moving sum begins
// afresh: 2.12 times in all with a window of 64. A window whose keys do not fit into 79 KB of
// shared memory (beyond 213 keys of 128 elements in fp16, 115 in fp32) is read from the cache again
// as it moves: up to 5 times in all.
struct NestedKVScoreArgs : NestedKVScore::Attrs {
  const void* keys;
  const std::int32_t* unit_ids;
  const std::int32_t* evict_slots;
  float* score;
  std::int32_t B, Hkv, C, D, E, R, N;
  FloatType dtype;
};

std::size_t nestedkv_score_workspace(const NestedKVScoreArgs& args);
cudaError_t nestedkv_score(const NestedKVScoreArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
