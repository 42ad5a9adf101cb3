// The three memories of NestedKV, and how unlike each of them every key of a row is.
#pragma once

#include "nestedkv_score.h"
#include "rows.cuh"
#include "selection.cuh"

namespace kvsift::kernels {

constexpr int kMemories = 3;  // stable, episodic, current

// Parts of the workspace.
struct NestedSpace {
  std::int64_t rows;
  int blocks;        // most episodic blocks of a row
  int* counts;       // [rows] units
  float* memories;   // [rows, 1 + blocks, D] directions: stable, then the episodic ones
  float* anomalies;  // [rows, 3, N]; of the stable memory alone without a continuum
  float* scales;     // [rows, 3, 3] least, greatest and tail difference of each memory
  float* surprise;   // [rows, chunks, 3] least, greatest and sum of the spread between them
};

// Enqueues counts, memories and anomalies.
cudaError_t compare_with_memories(const NestedKVScoreArgs& args, const NestedSpace& space,
                                  cudaStream_t stream);

}  // namespace kvsift::kernels
