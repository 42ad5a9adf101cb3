// Plugin fields as words: what a network's attributes become.
#pragma once

#include <NvInferRuntime.h>

#include <istream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace host {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

struct Values {  // the memory behind plugin fields
  std::vector<std::vector<char>> bytes;
  std::vector<std::string> names;
  std::vector<PluginField> fields;
};

// `count` fields: name, type (as TensorRT numbers them), length, numbers.
inline std::unique_ptr<Values> read_fields(std::istream& words) {
  std::size_t count = 0;
  words >> count;
  auto values = std::make_unique<Values>();
  values->bytes.reserve(count);
  values->names.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::string name;
    std::int32_t type = 0;
    std::int32_t length = 0;
    words >> name >> type >> length;
    std::vector<char> data;
    auto append = [&data](auto value) {
      const char* bytes = reinterpret_cast<const char*>(&value);
      data.insert(data.end(), bytes, bytes + sizeof value);
    };
    for (std::int32_t k = 0; k < length; ++k) {
      std::string number;
      words >> number;
      switch (static_cast<PluginFieldType>(type)) {
        case PluginFieldType::kFLOAT32:
          append(std::stof(number));
          break;
        case PluginFieldType::kFLOAT64:
          append(std::stod(number));
          break;
        case PluginFieldType::kINT64:
          append(static_cast<std::int64_t>(std::stoll(number)));
          break;
        case PluginFieldType::kINT32:
          append(static_cast<std::int32_t>(std::stol(number)));
          break;
        default:
          append(number.front());
      }
    }
    values->bytes.push_back(data);
    values->names.push_back(name);
    values->fields.emplace_back(values->names.back().c_str(), values->bytes.back().data(),
                                static_cast<PluginFieldType>(type), length);
  }
  return values;
}

inline std::string text_of(const nvinfer1::PluginFieldCollection& collection) {
  std::ostringstream out;
  out.precision(9);
  for (std::int32_t i = 0; i < collection.nbFields; ++i) {
    const PluginField& field = collection.fields[i];
    out << field.name << ' ' << static_cast<std::int32_t>(field.type) << ' ' << field.length << ' ';
    if (field.data == nullptr) {
      out << "none ";
    } else if (field.type == PluginFieldType::kFLOAT32) {
      out << *static_cast<const float*>(field.data) << ' ';
    } else {
      out << *static_cast<const std::int32_t*>(field.data) << ' ';
    }
  }
  return out.str();
}

}  // namespace host
