// Attributes of an op as TensorRT's plugin fields: declared, read and serialised from the generated
// header, so that no op writes any of it.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../ops.gen.h"
#include "tensorrt.h"

namespace kvsift::trt {

template <typename T>
constexpr nvinfer1::PluginFieldType field_type() {
  static_assert(std::is_same_v<T, std::int32_t> || std::is_same_v<T, float>);
  return std::is_same_v<T, float> ? nvinfer1::PluginFieldType::kFLOAT32
                                  : nvinfer1::PluginFieldType::kINT32;
}

// The fields of an op: with the values of `attrs`, which they point into, or without any.
template <typename Op>
std::vector<nvinfer1::PluginField> fields(const typename Op::Attrs* attrs) {
  std::vector<nvinfer1::PluginField> out;
  const typename Op::Attrs defaults{};
  Op::visit(attrs != nullptr ? *attrs : defaults, [&](const char* name, const auto& member) {
    const void* data = attrs != nullptr ? &member : nullptr;
    out.emplace_back(name, data, field_type<std::decay_t<decltype(member)>>(), 1);
  });
  return out;
}

// The single number in a field: 32 or 64 bits wide (ONNX INT arrives with 32, numpy with 64), and
// of the attribute's kind, since a cut-off fraction would hide a mistake.
inline std::optional<double> number(const nvinfer1::PluginField& field, bool is_int) {
  if (field.data == nullptr || field.length != 1) {
    return std::nullopt;
  }
  auto as = [&field](auto value) {
    std::memcpy(&value, field.data, sizeof value);
    return static_cast<double>(value);
  };
  switch (field.type) {
    case nvinfer1::PluginFieldType::kINT32:
      return is_int ? std::optional(as(std::int32_t{})) : std::nullopt;
    case nvinfer1::PluginFieldType::kINT64:
      return is_int ? std::optional(as(std::int64_t{})) : std::nullopt;
    case nvinfer1::PluginFieldType::kFLOAT32:
      return is_int ? std::nullopt : std::optional(as(float{}));
    case nvinfer1::PluginFieldType::kFLOAT64:
      return is_int ? std::nullopt : std::optional(as(double{}));
    default:
      return std::nullopt;
  }
}

inline std::string text_of(double value) {
  std::ostringstream text;
  text.precision(10);  // every 32-bit integer in full
  text << value;
  return text.str();
}

// "attribute 'block_size' must be one integer from 1 to 4096"
inline std::string requirement(const Attribute& attribute) {
  return "attribute '" + std::string(attribute.name) + "' must be one " +
         (attribute.is_int ? "integer" : "float") + " from " + text_of(attribute.low) + " to " +
         text_of(attribute.high);
}

inline const nvinfer1::PluginField* find(const nvinfer1::PluginFieldCollection& collection,
                                         std::string_view name) {
  for (std::int32_t i = 0; i < collection.nbFields; ++i) {
    if (collection.fields[i].name != nullptr && collection.fields[i].name == name) {
      return &collection.fields[i];
    }
  }
  return nullptr;
}

// What is wrong with the field of one attribute (empty if nothing); else sets `value`.
inline std::string check(const Attribute& attribute, const nvinfer1::PluginField* field,
                         double& value) {
  if (field == nullptr) {
    return requirement(attribute) + " and is missing; write every attribute of the node";
  }
  const std::optional<double> given = number(*field, attribute.is_int);
  if (!given) {
    return requirement(attribute) + ", got field type " +
           std::to_string(static_cast<std::int32_t>(field->type)) + " of length " +
           std::to_string(field->length);
  }
  value = *given;
  if (!(value >= attribute.low && value <= attribute.high)) {  // NaN fails as well
    return requirement(attribute) + ", got " + text_of(value);
  }
  return {};
}

// Reads all attributes of an op. Missing, unknown, wrongly typed and out-of-range ones are logged,
// each in a line of its own; then nothing is returned.
template <typename Op>
std::optional<typename Op::Attrs> read(const nvinfer1::PluginFieldCollection* given) {
  const nvinfer1::PluginFieldCollection none{};
  const auto& collection = given != nullptr ? *given : none;
  typename Op::Attrs attrs{};
  bool ok = true;
  auto refuse = [&ok](const std::string& why) {
    log_error(Op::kName, why);
    ok = false;
  };
  std::size_t index = 0;
  Op::visit(attrs, [&](const char* name, auto& member) {
    double value = 0;
    const std::string why = check(Op::kAttributes[index++], find(collection, name), value);
    if (why.empty()) {
      member = static_cast<std::decay_t<decltype(member)>>(value);
    } else {
      refuse(why);
    }
  });
  for (std::int32_t i = 0; i < collection.nbFields; ++i) {
    const std::string_view name = collection.fields[i].name;
    bool known = false;
    for (const Attribute& attribute : Op::kAttributes) {
      known = known || attribute.name == name;
    }
    if (!known) {
      refuse("unknown attribute '" + std::string(name) + "'");
    }
  }
  return ok ? std::optional(attrs) : std::nullopt;
}

}  // namespace kvsift::trt
