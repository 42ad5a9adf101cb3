// The creator of every op's plugin.
#pragma once

#include <NvInferRuntime.h>

#include <new>
#include <vector>

#include "attributes.h"
#include "plugin.h"

namespace kvsift::trt {

template <typename Op>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : fields_(fields<Op>(nullptr)) {
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
  }

  const char* getPluginName() const noexcept override { return Op::kName.data(); }
  const char* getPluginVersion() const noexcept override { return kOpsVersion.data(); }
  const char* getPluginNamespace() const noexcept override { return ""; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }

  // Both from a network's attributes and from what a plugin serialised: the same fields.
  nvinfer1::IPluginV3* createPlugin(const char* /*layer*/,
                                    const nvinfer1::PluginFieldCollection* given,
                                    nvinfer1::TensorRTPhase /*phase*/) noexcept override {
    const auto attrs = read<Op>(given);
    return attrs ? new (std::nothrow) Plugin<Op>(*attrs) : nullptr;
  }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace kvsift::trt
