// A dimension-expression builder of constants: enough to ask a plugin for its output shapes.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <deque>

namespace host {

struct Constant : nvinfer1::apiv::VDimensionExpr {
  explicit Constant(std::int64_t number) : value(number) {}
  bool isConstant() const override { return true; }
  std::int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
  std::int64_t value;
};

struct Expression : nvinfer1::IDimensionExpr {
  explicit Expression(std::int64_t number) : constant(number) { mImpl = &constant; }
  Constant constant;
};

struct Builder : nvinfer1::apiv::VExprBuilder {
  using Operation = nvinfer1::DimensionOperation;

  const nvinfer1::IDimensionExpr* constant(std::int64_t value) override {
    return &pool.emplace_back(value);
  }
  const nvinfer1::IDimensionExpr* operation(Operation op, const nvinfer1::IDimensionExpr& first,
                                            const nvinfer1::IDimensionExpr& second) override {
    const std::int64_t a = first.getConstantValue();
    const std::int64_t b = second.getConstantValue();
    switch (op) {
      case Operation::kSUM:
        return constant(a + b);
      case Operation::kPROD:
        return constant(a * b);
      case Operation::kMAX:
        return constant(std::max(a, b));
      case Operation::kMIN:
        return constant(std::min(a, b));
      case Operation::kSUB:
        return constant(a - b);
      case Operation::kEQUAL:
        return constant(a == b);
      case Operation::kLESS:
        return constant(a < b);
      case Operation::kFLOOR_DIV:
        return constant(a / b);
      case Operation::kCEIL_DIV:
        return constant((a + b - 1) / b);
    }
    return nullptr;
  }
  const nvinfer1::IDimensionExpr* declareSizeTensor(
      std::int32_t /*output*/, const nvinfer1::IDimensionExpr& opt,
      const nvinfer1::IDimensionExpr& /*upper*/) override {
    return &opt;
  }

  std::deque<Expression> pool;
};

struct ExpressionBuilder : nvinfer1::IExprBuilder {
  ExpressionBuilder() { mImpl = &impl; }
  Builder impl;
};

}  // namespace host
