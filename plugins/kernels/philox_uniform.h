// PhiloxUniform: a uniform per unit and draw, of the request's seed and history only.
#pragma once

#include "types.h"

namespace kvsift::kernels {

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
