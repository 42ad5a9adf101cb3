// Every op's kernel behind one name: Kernel<Op>::Args, ::workspace(args) and ::run(args, ...).
#pragma once

#include "accum_update.h"
#include "expected_attention_score.h"
#include "head_topk_select.h"
#include "keydiff_score.h"
#include "knorm_score.h"
#include "kv_append.h"
#include "kv_fill_holes.h"
#include "kv_gather.h"
#include "nestedkv_score.h"
#include "nexus_score.h"
#include "philox_uniform.h"
#include "query_stats_update.h"
#include "reservoir_select.h"
#include "topk_select.h"
#include "window_mass.h"
#include "window_score.h"

namespace kvsift::kernels {

template <class Op>
struct Kernel;

#define KVSIFT_KERNEL(Op, function)                                                 \
  template <>                                                                       \
  struct Kernel<Op> {                                                               \
    using Args = Op##Args;                                                          \
    static std::size_t workspace(const Args& a) { return function##_workspace(a); } \
    static cudaError_t run(const Args& a, void* workspace, cudaStream_t stream) {   \
      return function(a, workspace, stream);                                        \
    }                                                                               \
  };

#define KVSIFT_EACH_KERNEL(f)                                                            \
  f(WindowMass, window_mass) f(NexusScore, nexus_score) f(PhiloxUniform, philox_uniform) \
      f(ReservoirSelect, reservoir_select) f(TopKSelect, topk_select)                    \
          f(HeadTopKSelect, head_topk_select) f(KNormScore, knorm_score)                 \
              f(KeyDiffScore, keydiff_score) f(NestedKVScore, nestedkv_score)            \
                  f(WindowScore, window_score) f(AccumUpdate, accum_update)              \
                      f(QueryStatsUpdate, query_stats_update)                            \
                          f(ExpectedAttentionScore, expected_attention_score)            \
                              f(KvAppend, kv_append)

KVSIFT_EACH_KERNEL(KVSIFT_KERNEL)

// Sets the float type of arguments that have one.
template <class Args>
auto set_dtype(Args& args, FloatType type) -> decltype(args.dtype, void()) {
  args.dtype = type;
}
template <class Args, class... None>
void set_dtype(Args&, None...) {}

}  // namespace kvsift::kernels
