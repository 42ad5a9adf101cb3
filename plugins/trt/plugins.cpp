// The plugin library: every op, and both ways in which TensorRT finds them.
#include <array>
#include <mutex>

#include "../kernels/accum_update.h"
#include "../kernels/expected_attention_score.h"
#include "../kernels/head_topk_select.h"
#include "../kernels/keydiff_score.h"
#include "../kernels/knorm_score.h"
#include "../kernels/kv_append.h"
#include "../kernels/nestedkv_score.h"
#include "../kernels/nexus_score.h"
#include "../kernels/philox_uniform.h"
#include "../kernels/query_stats_update.h"
#include "../kernels/reservoir_select.h"
#include "../kernels/topk_select.h"
#include "../kernels/window_mass.h"
#include "../kernels/window_score.h"
#include "creator.h"
#include "tensorrt.h"

// Op and its kernel's function.
#define KVSIFT_OPS(X)                                 \
  X(WindowMass, window_mass)                          \
  X(NexusScore, nexus_score)                          \
  X(PhiloxUniform, philox_uniform)                    \
  X(ReservoirSelect, reservoir_select)                \
  X(TopKSelect, topk_select)                          \
  X(HeadTopKSelect, head_topk_select)                 \
  X(KNormScore, knorm_score)                          \
  X(KeyDiffScore, keydiff_score)                      \
  X(NestedKVScore, nestedkv_score)                    \
  X(WindowScore, window_score)                        \
  X(AccumUpdate, accum_update)                        \
  X(QueryStatsUpdate, query_stats_update)             \
  X(ExpectedAttentionScore, expected_attention_score) \
  X(KvAppend, kv_append)

namespace kvsift::trt {

#define KVSIFT_KERNEL(op, function)                                                                \
  template <>                                                                                      \
  struct Kernel<op> {                                                                              \
    using Args = kernels::op##Args;                                                                \
    static std::size_t workspace(const Args& args) { return kernels::function##_workspace(args); } \
    static cudaError_t run(const Args& args, void* workspace, cudaStream_t stream) {               \
      return kernels::function(args, workspace, stream);                                           \
    }                                                                                              \
  };
KVSIFT_OPS(KVSIFT_KERNEL)
#undef KVSIFT_KERNEL

namespace {

using Interface = nvinfer1::IPluginCreatorInterface;

#define KVSIFT_COUNT(op, function) +1
constexpr std::int32_t kCreators = 0 KVSIFT_OPS(KVSIFT_COUNT);
#undef KVSIFT_COUNT

const std::array<Interface*, kCreators>& creators() {
#define KVSIFT_CREATOR(op, function) static Creator<op> function##_creator;
  KVSIFT_OPS(KVSIFT_CREATOR)
#undef KVSIFT_CREATOR
#define KVSIFT_ADDRESS(op, function) &function##_creator,
  static const std::array<Interface*, kCreators> all{KVSIFT_OPS(KVSIFT_ADDRESS)};
#undef KVSIFT_ADDRESS
  return all;
}

// A plain dlopen (Triton, ctypes) registers every op with the TensorRT in the process. A registry's
// own loadLibrary refuses a library whose plugins it knows already, so the registration is taken
// back when it asks for the creators.
class Registration {
 public:
  Registration() {
    registries_ = loaded_registries();
    for (nvinfer1::IPluginRegistry* registry : registries_) {
      for (Interface* creator : creators()) {
        registry->registerCreator(*creator, "");
      }
    }
  }

  void withdraw() {
    const std::lock_guard lock(mutex_);
    for (nvinfer1::IPluginRegistry* registry : registries_) {
      for (Interface* creator : creators()) {
        registry->deregisterCreator(*creator);
      }
    }
    registries_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<nvinfer1::IPluginRegistry*> registries_;
};

Registration registration;

}  // namespace
}  // namespace kvsift::trt

#define KVSIFT_EXPORT extern "C" __attribute__((visibility("default")))

// What IPluginRegistry::loadLibrary, trtexec and version-compatible engines look for.
KVSIFT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
  kvsift::trt::registration.withdraw();
  count = kvsift::trt::kCreators;
  return kvsift::trt::creators().data();
}

KVSIFT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  kvsift::trt::set_logger_finder(finder);
}
