// What every kernel's header shares: the float types and how an op is called.
//
// Each op has an Args struct of raw pointers, sizes and attributes, and two functions:
//
//   size_t op_workspace(const OpArgs&);                              // bytes; pointers may be null
//   cudaError_t op(const OpArgs&, void* workspace, cudaStream_t);    // only enqueues
//
// Nothing is allocated and the host never waits. All pointers are device pointers to contiguous
// tensors, laid out as the op table says (docs/ops.md), whose symbols name the sizes: B slots,
// E evicting slots, L layers, Hq query heads of the window, Hkv KV heads, D head size, W window
// queries, C capacity in tokens, N candidate units, R rows of scores, n draws, P pinned spans,
// S tokens of a step. Keys, values, queries and the workspace are aligned to 16 bytes, and a head
// takes a multiple of 16 bytes. An empty tensor launches nothing. A value that cannot be right
// returns cudaErrorInvalidValue before anything is launched. Heads have at most 512 elements where
// queries meet keys, 1024 bytes elsewhere.
//
// A key or value is read once, by loads of 16 bytes; where a statistic of the row must come first,
// twice (KeyDiffScore, NestedKVScore, and the softmax of WindowScore and AccumUpdate with many
// queries; their headers say more). What a request gets depends neither on the other slots of the
// call nor on the launch, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../ops.gen.h"

// Maths that the host may also call, to check what the device does.
#if defined(__CUDACC__)
#define KVSIFT_HD __host__ __device__ __forceinline__
#else
#define KVSIFT_HD inline
#endif

namespace kvsift::kernels {

// The model's float type: of keys, values and queries.
enum class FloatType : std::int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

// Bytes of one element.
constexpr std::size_t float_size(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

}  // namespace kvsift::kernels
