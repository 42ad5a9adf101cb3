// ExpectedAttentionScore: attention that future queries are expected to pay.
#pragma once

#include <cmath>

#include "types.h"

namespace kvsift::kernels {

struct Turn {
  double cos, sin;
};

// The mean rotation of `count` positions from `first` on, at one frequency. The sum over positions
// in closed form, in fp64 since an angle may be thousands of turns.
KVSIFT_HD Turn mean_rotation(int first, int count, double frequency) {
  const double half = std::sin(0.5 * frequency);
  const double middle = (first + 0.5 * (count - 1)) * frequency;
  const double length =
      std::fabs(half) < 1e-12 ? 1.0 : std::sin(0.5 * count * frequency) / (count * half);
  return {std::cos(middle) * length, std::sin(middle) * length};
}

// mean [B,Hq,D], moment [B,Hq,D,D], inv_freq [D/2], keys and values [B,Hkv,C,D], unit_ids [E,R,N],
// tokens_seen [E], evict_slots [E]; score [E,R,N] with R = Hkv. Skipped slots score -inf.
struct ExpectedAttentionScoreArgs : ExpectedAttentionScore::Attrs {
  const float* mean;
  const float* moment;
  const float* inv_freq;
  const void* keys;
  const void* values;
  const std::int32_t* unit_ids;
  const std::int32_t* tokens_seen;
  const std::int32_t* evict_slots;
  float* score;
  std::int32_t B, Hq, D, Hkv, C, E, R, N, Dh;
  FloatType dtype;
};

std::size_t expected_attention_score_workspace(const ExpectedAttentionScoreArgs& args);
cudaError_t expected_attention_score(const ExpectedAttentionScoreArgs& args, void* workspace,
                                     cudaStream_t stream);

}  // namespace kvsift::kernels
