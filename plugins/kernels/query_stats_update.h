// QueryStatsUpdate: running mean and second moment of the queries before rotation.
#pragma once

#include "types.h"

namespace kvsift::kernels {

// mean [B,Hq,D], moment [B,Hq,D,D], queries [B,S,Hq*D], first_position [B], n_new [B];
// mean_out [B,Hq,D] and moment_out [B,Hq,D,D], which may be mean and moment themselves.
struct QueryStatsUpdateArgs : QueryStatsUpdate::Attrs {
  const float* mean;
  const float* moment;
  const void* queries;
  const std::int32_t* first_position;
  const std::int32_t* n_new;
  float* mean_out;
  float* moment_out;
  std::int32_t B, Hq, D, S;
  FloatType dtype;
};

std::size_t query_stats_update_workspace(const QueryStatsUpdateArgs& args);
cudaError_t query_stats_update(const QueryStatsUpdateArgs& args, void* workspace,
                               cudaStream_t stream);

}  // namespace kvsift::kernels
