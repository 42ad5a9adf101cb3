// The kernels as C functions, for ctypes and any other language.
//
// A call names its op as the op table does. `sizes` are the numbers behind the symbols of the
// shapes, `attributes` the values of the attributes (integers too), `inputs` and `outputs` device
// pointers; each in the order of kvsift_describe(). Results are cudaError_t numbers: 0 is success.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kv_fill_holes.h"
#include "kernels/kv_gather.h"

#define KVSIFT_API extern "C" __attribute__((visibility("default")))

// JSON: {"version", "ops": {name: {"inputs": [[name, dtype, shape], ..], "outputs": the same,
// "attributes": [[name, is_int], ..], "sizes": [[symbol, input, axis, divisor, attribute], ..]}}}.
KVSIFT_API const char* kvsift_describe();

// Bytes of workspace, aligned to 16, that kvsift_run needs; 0 for an unknown op.
KVSIFT_API std::size_t kvsift_workspace(const char* op, int dtype, const std::int32_t* sizes,
                                        const double* attributes);

// Enqueues an op. dtype is 0 for fp32, 1 for fp16, 2 for bf16.
KVSIFT_API int kvsift_run(const char* op, int dtype, const std::int32_t* sizes,
                          const double* attributes, const void* const* inputs, void* const* outputs,
                          void* workspace, void* stream);

KVSIFT_API int kvsift_kv_gather(const kvsift::kernels::KvGatherArgs* args, void* stream);
KVSIFT_API int kvsift_kv_fill_holes(const kvsift::kernels::KvFillHolesArgs* args, void* stream);

// What a result means.
KVSIFT_API const char* kvsift_error(int result);
