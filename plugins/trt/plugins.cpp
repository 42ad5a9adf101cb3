// The plugin library: every op that has a kernel (kernels/all.h has a line for each), and both ways
// in which TensorRT finds them.
#include <array>
#include <mutex>

#include "../kernels/all.h"
#include "creator.h"
#include "tensorrt.h"

namespace kvsift::trt {
namespace {

using Interface = nvinfer1::IPluginCreatorInterface;

#define KVSIFT_COUNT(op, function) +1
constexpr std::int32_t kCreators = 0 KVSIFT_EACH_KERNEL(KVSIFT_COUNT);
#undef KVSIFT_COUNT

const std::array<Interface*, kCreators>& creators() {
// Never destroyed: TensorRT may look at a creator while the process ends.
#define KVSIFT_CREATOR(op, function) static auto& function##_creator = *new Creator<op>;
  KVSIFT_EACH_KERNEL(KVSIFT_CREATOR)
#undef KVSIFT_CREATOR
#define KVSIFT_ADDRESS(op, function) &function##_creator,
  static const std::array<Interface*, kCreators> all{KVSIFT_EACH_KERNEL(KVSIFT_ADDRESS)};
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
