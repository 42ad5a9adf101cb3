// Tensors as TensorRT describes them to a plugin, and their memory.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <istream>
#include <vector>

namespace host {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

// `count` descriptions: type, format, number of dimensions, dimensions.
inline std::vector<PluginTensorDesc> read_descs(std::istream& words) {
  std::size_t count = 0;
  words >> count;
  std::vector<PluginTensorDesc> descs(count);
  for (PluginTensorDesc& desc : descs) {
    std::int32_t type = 0;
    std::int32_t format = 0;
    words >> type >> format >> desc.dims.nbDims;
    desc.type = static_cast<DataType>(type);
    desc.format = static_cast<nvinfer1::TensorFormat>(format);
    for (std::int32_t i = 0; i < desc.dims.nbDims; ++i) {
      words >> desc.dims.d[i];
    }
  }
  return descs;
}

// As in a profile whose largest shapes these are; the shape of the network is dynamic.
inline std::vector<DynamicPluginTensorDesc> as_dynamic(const std::vector<PluginTensorDesc>& descs) {
  std::vector<DynamicPluginTensorDesc> out(descs.size());
  for (std::size_t i = 0; i < descs.size(); ++i) {
    out[i].desc = descs[i];
    out[i].min = out[i].opt = out[i].max = descs[i].dims;
    for (std::int32_t axis = 0; axis < descs[i].dims.nbDims; ++axis) {
      out[i].desc.dims.d[axis] = -1;
    }
  }
  return out;
}

inline std::size_t bytes_of(const PluginTensorDesc& desc) {
  const bool half = desc.type == DataType::kHALF || desc.type == DataType::kBF16;
  std::size_t bytes = half ? 2 : 4;
  for (std::int32_t i = 0; i < desc.dims.nbDims; ++i) {
    bytes *= static_cast<std::size_t>(desc.dims.d[i]);
  }
  return bytes;
}

// Memory aligned as a GPU's, followed by bytes that a kernel must not touch.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes), memory_(bytes + 2 * kGuard, kMark) {
    offset_ = (kGuard - reinterpret_cast<std::uintptr_t>(memory_.data()) % kGuard) % kGuard;
  }
  char* data() { return reinterpret_cast<char*>(memory_.data()) + offset_; }
  std::size_t size() const { return bytes_; }
  bool intact() const {
    const auto end = memory_.begin() + static_cast<std::ptrdiff_t>(offset_ + bytes_);
    return std::all_of(end, memory_.end(), [](unsigned char c) { return c == kMark; });
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr unsigned char kMark = 0xFF;  // NaN or -1 wherever nothing was written
  std::size_t bytes_;
  std::size_t offset_ = 0;
  std::vector<unsigned char> memory_;
};

}  // namespace host
