// The TensorRT plugin of every op: one template over the generated description of the op and its
// kernel. Shapes, types, formats, attributes and aliases all follow from the op table.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../kernels/all.h"
#include "attributes.h"
#include "sizes.h"
#include "tensorrt.h"

namespace kvsift::trt {

using kernels::Kernel;

// The first input of the model's float type, or -1: the others of that type must equal it.
template <typename Op>
constexpr std::int32_t float_input() {
  for (std::size_t i = 0; i < Op::kInputs.size(); ++i) {
    if (Op::kInputs[i].dtype == DType::kT) {
      return static_cast<std::int32_t>(i);
    }
  }
  return -1;
}

template <typename Op>
constexpr bool writes_inputs() {
  for (const std::int32_t input : Op::kAliases) {
    if (input >= 0) {
      return true;
    }
  }
  return false;
}

template <typename Op>
constexpr const Tensor& tensor(std::int32_t position) {
  constexpr auto kInputs = static_cast<std::int32_t>(Op::kInputs.size());
  return position < kInputs ? Op::kInputs[position] : Op::kOutputs[position - kInputs];
}

inline bool is_model_float(nvinfer1::DataType type) {
  return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kHALF ||
         type == nvinfer1::DataType::kBF16;
}

inline kernels::FloatType float_type(nvinfer1::DataType type) {
  return type == nvinfer1::DataType::kHALF   ? kernels::FloatType::kF16
         : type == nvinfer1::DataType::kBF16 ? kernels::FloatType::kBF16
                                             : kernels::FloatType::kF32;
}

// Only ops that write over an input ask for the interface with aliases, which TensorRT heeds under
// PreviewFeature kALIASED_PLUGIN_IO_10_03; all others work without it.
template <typename Op>
using BuildInterface = std::conditional_t<writes_inputs<Op>(), nvinfer1::IPluginV3OneBuildV2,
                                          nvinfer1::IPluginV3OneBuild>;

template <typename Op>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public BuildInterface<Op>,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  using Attrs = typename Op::Attrs;
  using Dims = nvinfer1::Dims;
  using Desc = nvinfer1::PluginTensorDesc;
  using DynamicDesc = nvinfer1::DynamicPluginTensorDesc;

  explicit Plugin(const Attrs& attrs) : attrs_(attrs) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<BuildInterface<Op>*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3* clone() noexcept override { return new (std::nothrow) Plugin(attrs_); }

  const char* getPluginName() const noexcept override { return Op::kName.data(); }
  const char* getPluginVersion() const noexcept override { return kOpsVersion.data(); }
  // Empty, since TensorRT's ONNX parser ignores a node's domain and looks there.
  const char* getPluginNamespace() const noexcept override { return ""; }

  std::int32_t getNbOutputs() const noexcept override { return kOutputCount; }

  std::int32_t configurePlugin(const DynamicDesc* inputs, std::int32_t input_count,
                               const DynamicDesc* /*outputs*/,
                               std::int32_t output_count) noexcept override {
    if (!counts_fit(input_count, output_count)) {
      return -1;
    }
    for (std::int32_t i = 0; i < kInputCount; ++i) {
      if (inputs[i].desc.dims.nbDims != Op::kInputs[i].rank) {
        return refuse(rank_error(i, inputs[i].desc.dims.nbDims));
      }
    }
    return 0;
  }

  bool supportsFormatCombination(std::int32_t position, const DynamicDesc* io,
                                 std::int32_t input_count,
                                 std::int32_t output_count) noexcept override {
    if (input_count != kInputCount || output_count != kOutputCount ||
        io[position].desc.format != nvinfer1::TensorFormat::kLINEAR) {
      return false;
    }
    const nvinfer1::DataType type = io[position].desc.type;
    switch (tensor<Op>(position).dtype) {
      case DType::kFloat32:
        return type == nvinfer1::DataType::kFLOAT;
      case DType::kInt32:
        return type == nvinfer1::DataType::kINT32;
      case DType::kT:
        return position == kFloatInput ? is_model_float(type) : type == io[kFloatInput].desc.type;
    }
    return false;
  }

  std::int32_t getOutputDataTypes(nvinfer1::DataType* types, std::int32_t output_count,
                                  const nvinfer1::DataType* input_types,
                                  std::int32_t input_count) const noexcept override {
    if (!counts_fit(input_count, output_count)) {
      return -1;
    }
    for (std::int32_t i = 0; i < kOutputCount; ++i) {
      switch (Op::kOutputs[i].dtype) {
        case DType::kFloat32:
          types[i] = nvinfer1::DataType::kFLOAT;
          break;
        case DType::kInt32:
          types[i] = nvinfer1::DataType::kINT32;
          break;
        case DType::kT:
          types[i] = input_types[kFloatInput];
          break;
      }
    }
    return 0;
  }

  // Every output dimension is a symbol; the generated table says which dimension of which input,
  // or which attribute, it is.
  std::int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, std::int32_t input_count,
                               const nvinfer1::DimsExprs* /*shape_inputs*/,
                               std::int32_t /*shape_input_count*/, nvinfer1::DimsExprs* outputs,
                               std::int32_t output_count,
                               nvinfer1::IExprBuilder& builder) noexcept override {
    if (!counts_fit(input_count, output_count)) {
      return -1;
    }
    for (std::int32_t i = 0; i < kInputCount; ++i) {
      if (inputs[i].nbDims != Op::kInputs[i].rank) {
        return refuse(rank_error(i, inputs[i].nbDims));
      }
    }
    for (std::int32_t i = 0; i < kOutputCount; ++i) {
      if (Op::kAliases[i] >= 0) {  // the very expressions: TensorRT need not prove them equal
        outputs[i] = inputs[Op::kAliases[i]];
        continue;
      }
      outputs[i].nbDims = Op::kOutputs[i].rank;
      for (std::int32_t axis = 0; axis < outputs[i].nbDims; ++axis) {
        const std::string_view symbol = dimension(Op::kOutputs[i].shape, axis);
        const Size& size = Op::kSizes[size_index<Op>(symbol)];
        outputs[i].d[axis] = size.input < 0
                                 ? builder.constant(attribute_value<Op>(attrs_, size.attribute))
                                 : inputs[size.input].d[size.axis];
      }
    }
    return 0;
  }

  std::size_t getWorkspaceSize(const DynamicDesc* inputs, std::int32_t input_count,
                               const DynamicDesc* /*outputs*/,
                               std::int32_t output_count) const noexcept override {
    if (!counts_fit(input_count, output_count)) {
      return 0;
    }
    // The largest shapes of the profile: no workspace shrinks when a size grows.
    const auto dims = [inputs](std::int32_t i) -> const Dims& { return inputs[i].max; };
    const auto type = [inputs](std::int32_t i) { return inputs[i].desc.type; };
    return Kernel<Op>::workspace(arguments(dims, type, kNoTensors, kNoOutputs));
  }

  // Overrides only where the interface has it.
  std::int32_t getAliasedInput(std::int32_t output) noexcept {
    return output >= 0 && output < kOutputCount ? Op::kAliases[output] : -1;
  }

  std::int32_t onShapeChange(const Desc* inputs, std::int32_t input_count, const Desc* /*outputs*/,
                             std::int32_t output_count) noexcept override {
    if (!counts_fit(input_count, output_count)) {
      return -1;
    }
    const std::string why =
        check_sizes<Op>(attrs_, [inputs](std::int32_t i) -> const Dims& { return inputs[i].dims; });
    return why.empty() ? 0 : refuse(why);
  }

  std::int32_t enqueue(const Desc* input_desc, const Desc* /*output_desc*/,
                       const void* const* inputs, void* const* outputs, void* workspace,
                       cudaStream_t stream) noexcept override try {
    const auto dims = [input_desc](std::int32_t i) -> const Dims& { return input_desc[i].dims; };
    const auto type = [input_desc](std::int32_t i) { return input_desc[i].type; };
    const auto args = arguments(dims, type, inputs, outputs);
    const cudaError_t status = Kernel<Op>::run(args, workspace, stream);
    return status == cudaSuccess ? 0 : refuse(launch_error(status, inputs, outputs));
  } catch (const std::exception& error) {
    return refuse(error.what());
  }

  nvinfer1::IPluginV3* attachToContext(
      nvinfer1::IPluginResourceContext* /*context*/) noexcept override {
    return clone();
  }

  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override {
    fields_ = fields<Op>(&attrs_);
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  }

 private:
  static constexpr auto kInputCount = static_cast<std::int32_t>(Op::kInputs.size());
  static constexpr auto kOutputCount = static_cast<std::int32_t>(Op::kOutputs.size());
  static constexpr std::int32_t kFloatInput = float_input<Op>();
  static constexpr const void* kNoTensors[kInputCount] = {};
  static constexpr void* kNoOutputs[kOutputCount] = {};

  static std::int32_t refuse(const std::string& why) {
    log_error(Op::kName, why);
    return -1;
  }

  static bool counts_fit(std::int32_t input_count, std::int32_t output_count) {
    if (input_count == kInputCount && output_count == kOutputCount) {
      return true;
    }
    refuse("got " + std::to_string(input_count) + " inputs and " + std::to_string(output_count) +
           " outputs, takes " + std::to_string(kInputCount) + " and " +
           std::to_string(kOutputCount));
    return false;
  }

  static std::string rank_error(std::int32_t input, std::int32_t rank) {
    const Tensor& wanted = Op::kInputs[input];
    return "input '" + std::string(wanted.name) + "' has " + std::to_string(rank) +
           " dimensions, must be [" + std::string(wanted.shape) + "]";
  }

  static std::string launch_error(cudaError_t status, const void* const* inputs,
                                  void* const* outputs) {
    std::string text = std::string("kernel failed: ") + cudaGetErrorString(status);
    for (std::int32_t i = 0; i < kOutputCount; ++i) {
      if (Op::kAliases[i] >= 0 && outputs[i] != inputs[Op::kAliases[i]]) {
        text += "; output '" + std::string(Op::kOutputs[i].name) + "' is not the memory of '" +
                std::string(Op::kInputs[Op::kAliases[i]].name) +
                "': build with PreviewFeature kALIASED_PLUGIN_IO_10_03";
      }
    }
    return text;
  }

  template <typename D, typename T>
  typename Kernel<Op>::Args arguments(D&& dims, T&& type, const void* const* inputs,
                                      void* const* outputs) const {
    typename Kernel<Op>::Args args{};
    const Sizes<Op> sizes = read_sizes<Op>(attrs_, dims);
    Op::bind(args, sizes.data(), inputs, outputs, attrs_);
    if constexpr (kFloatInput >= 0) {
      kernels::set_dtype(args, float_type(type(kFloatInput)));
    }
    return args;
  }

  Attrs attrs_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace kvsift::trt
