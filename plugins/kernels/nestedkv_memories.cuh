// The three memories of NestedKV, and how unlike each of them every key of a row is.
#pragma once

#include "find.cuh"
#include "nestedkv_score.h"
#include "rows.cuh"

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
  FindSpace find;    // [rows, 3, 2] of the tails, where they are asked for
  float* parts;      // [rows, 3, chunks, 4] what `scales` is made from
  float* surprise;   // [rows, chunks, 3] least, greatest and sum of the spread between them
};

// Enqueues counts, memories and anomalies.
cudaError_t compare_with_memories(const NestedKVScoreArgs& args, const NestedSpace& space,
                                  cudaStream_t stream);

}  // namespace kvsift::kernels
