// PhiloxUniform: a uniform per unit and draw, of the request's seed and history only.
#pragma once

#include "types.h"

namespace kvsift::kernels {

struct Words {
  std::uint32_t x[4];
};

// Philox4x32-10 of Salmon et al. (SC 2011): ten rounds of two 32 x 32 -> 64 bit products.
KVSIFT_HD Words philox4x32(Words c, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c.x[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c.x[2];
    c = {{static_cast<std::uint32_t>(b >> 32) ^ c.x[1] ^ key0, static_cast<std::uint32_t>(b),
          static_cast<std::uint32_t>(a >> 32) ^ c.x[3] ^ key1, static_cast<std::uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// A word as an fp32 number strictly inside (0, 1), without rounding.
KVSIFT_HD float uniform(std::uint32_t word) {
  return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
}

// unit_ids [L,E,R,N], seed [E,2], step [E]; u [L,E,R,n,N] with n = draws.
struct PhiloxUniformArgs : PhiloxUniform::Attrs {
  const std::int32_t* unit_ids;
  const std::int32_t* seed;
  const std::int32_t* step;
  float* u;
  std::int32_t L, E, R, N, n;
};

std::size_t philox_uniform_workspace(const PhiloxUniformArgs& args);
cudaError_t philox_uniform(const PhiloxUniformArgs& args, void* workspace, cudaStream_t stream);

}  // namespace kvsift::kernels
