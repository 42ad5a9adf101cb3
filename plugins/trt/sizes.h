// The numbers behind the symbols of an op's shapes (E, N, Hkv ...), read from its inputs.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "../ops.gen.h"

namespace kvsift::trt {

template <typename Op>
using Sizes = std::array<std::int32_t, Op::kSizes.size()>;

// The text of one dimension of a symbolic shape such as "E,W,Hq*D".
constexpr std::string_view dimension(std::string_view shape, std::int32_t axis) {
  for (; axis > 0; --axis) {
    shape.remove_prefix(shape.find(',') + 1);
  }
  return shape.substr(0, shape.find(','));
}

template <typename Op>
constexpr std::size_t size_index(std::string_view symbol) {
  for (std::size_t i = 0; i < Op::kSizes.size(); ++i) {
    if (Op::kSizes[i].symbol == symbol) {
      return i;
    }
  }
  return Op::kSizes.size();
}

template <typename Op>
std::int64_t attribute_value(const typename Op::Attrs& attrs, std::string_view name) {
  std::int64_t value = 0;
  Op::visit(attrs, [&](std::string_view attribute, const auto& member) {
    if (attribute == name) {
      value = static_cast<std::int64_t>(member);
    }
  });
  return value;
}

// The value of a dimension's text: a digit, a symbol or a product of symbols.
template <typename Op>
std::int64_t evaluate(std::string_view text, const Sizes<Op>& sizes) {
  std::int64_t product = 1;
  while (!text.empty()) {
    const std::string_view factor = text.substr(0, text.find('*'));
    text.remove_prefix(factor.size() < text.size() ? factor.size() + 1 : factor.size());
    const std::size_t i = size_index<Op>(factor);
    product *= i < sizes.size() ? sizes[i] : factor.front() - '0';
  }
  return product;
}

inline std::string text_of(const nvinfer1::Dims& dims) {
  std::string text = "[";
  for (std::int32_t i = 0; i < dims.nbDims; ++i) {
    text += (i > 0 ? "," : "") + std::to_string(dims.d[i]);
  }
  return text + "]";
}

// Reads every size without checking whether the inputs agree; `dims(i)` is the shape of input i.
template <typename Op, typename F>
Sizes<Op> read_sizes(const typename Op::Attrs& attrs, F&& dims) {
  Sizes<Op> sizes{};
  for (std::size_t i = 0; i < Op::kSizes.size(); ++i) {
    const Size& size = Op::kSizes[i];
    std::int64_t value = size.input < 0 ? attribute_value<Op>(attrs, size.attribute)
                                        : std::int64_t{dims(size.input).d[size.axis]};
    if (!size.divisor.empty()) {  // the divisor comes first in the list
      const std::int32_t divisor = sizes[size_index<Op>(size.divisor)];
      value = divisor > 0 ? value / divisor : 0;
    }
    sizes[i] = static_cast<std::int32_t>(value);
  }
  return sizes;
}

// What is wrong with the shapes of the inputs, empty if nothing.
template <typename Op, typename F>
std::string check_sizes(const typename Op::Attrs& attrs, F&& dims) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const auto describe = [](const Tensor& tensor, const nvinfer1::Dims& given) {
    return "input '" + std::string(tensor.name) + "' is " + text_of(given) + ", must be [" +
           std::string(tensor.shape) + "]";
  };
  for (std::size_t i = 0; i < Op::kInputs.size(); ++i) {
    const nvinfer1::Dims& given = dims(static_cast<std::int32_t>(i));
    if (given.nbDims != Op::kInputs[i].rank) {
      return describe(Op::kInputs[i], given);
    }
    for (std::int32_t axis = 0; axis < given.nbDims; ++axis) {
      if (given.d[axis] < 0 || given.d[axis] > kMost) {
        return describe(Op::kInputs[i], given) + " with sizes from 0 to 2147483647";
      }
    }
  }
  const Sizes<Op> sizes = read_sizes<Op>(attrs, dims);
  for (std::size_t i = 0; i < Op::kInputs.size(); ++i) {
    const Tensor& tensor = Op::kInputs[i];
    const nvinfer1::Dims& given = dims(static_cast<std::int32_t>(i));
    for (std::int32_t axis = 0; axis < tensor.rank; ++axis) {
      const std::string_view text = dimension(tensor.shape, axis);
      const std::int64_t expected = evaluate<Op>(text, sizes);
      if (given.d[axis] != expected) {
        return describe(tensor, given) + " with " + std::string(text) + " = " +
               std::to_string(expected) + " as in the other inputs";
      }
    }
  }
  return {};
}

}  // namespace kvsift::trt
