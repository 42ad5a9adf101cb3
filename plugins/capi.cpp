#include "capi.h"

#include <string>
#include <string_view>

#include "kernels/all.h"

namespace kvsift {
namespace {

using kernels::FloatType;
using kernels::Kernel;

template <class Op>
typename Op::Attrs attributes_of(const double* values, bool& in_range) {
  typename Op::Attrs attrs;
  std::size_t i = 0;
  Op::visit(attrs, [&](const char*, auto& member) {
    in_range &= values[i] >= Op::kAttributes[i].low && values[i] <= Op::kAttributes[i].high;
    member = static_cast<std::decay_t<decltype(member)>>(values[i]);
    ++i;
  });
  return attrs;
}

template <class Op>
typename Kernel<Op>::Args arguments(int dtype, const std::int32_t* sizes,
                                    const typename Op::Attrs& attrs, const void* const* inputs,
                                    void* const* outputs) {
  typename Kernel<Op>::Args args{};
  Op::bind(args, sizes, inputs, outputs, attrs);
  kernels::set_dtype(args, static_cast<FloatType>(dtype));
  return args;
}

template <class Op>
std::size_t workspace(int dtype, const std::int32_t* sizes, const double* attributes) {
  const void* no_inputs[Op::kInputs.size()] = {};
  void* no_outputs[Op::kOutputs.size()] = {};
  bool in_range = true;
  const auto attrs = attributes_of<Op>(attributes, in_range);
  return in_range ? Kernel<Op>::workspace(arguments<Op>(dtype, sizes, attrs, no_inputs, no_outputs))
                  : 0;
}

template <class Op>
int run(int dtype, const std::int32_t* sizes, const double* attributes, const void* const* inputs,
        void* const* outputs, void* space, void* stream) {
  bool in_range = dtype >= 0 && dtype <= 2;
  const auto attrs = attributes_of<Op>(attributes, in_range);
  if (!in_range) return cudaErrorInvalidValue;
  return Kernel<Op>::run(arguments<Op>(dtype, sizes, attrs, inputs, outputs), space,
                         static_cast<cudaStream_t>(stream));
}

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

// Appends "name": [item, ..] with a comma between items.
template <class List, class F>
void add_list(std::string& json, const char* name, const List& list, F&& item) {
  json += quoted(name) + ": [";
  const char* comma = "";
  for (const auto& x : list) {
    json += comma + item(x);
    comma = ", ";
  }
  json += "]";
}

std::string tensor_json(const Tensor& t) {
  static constexpr const char* kNames[] = {"float32", "int32", "T"};
  return "[" + quoted(t.name) + ", " + quoted(kNames[static_cast<int>(t.dtype)]) + ", " +
         quoted(t.shape) + "]";
}

template <class Op>
std::string op_json() {
  std::string json = quoted(Op::kName) + ": {";
  add_list(json, "inputs", Op::kInputs, tensor_json);
  json += ", ";
  add_list(json, "outputs", Op::kOutputs, tensor_json);
  json += ", ";
  add_list(json, "attributes", Op::kAttributes, [](const Attribute& a) {
    return "[" + quoted(a.name) + (a.is_int ? ", true]" : ", false]");
  });
  json += ", ";
  add_list(json, "sizes", Op::kSizes, [](const Size& s) {
    return "[" + quoted(s.symbol) + ", " + std::to_string(s.input) + ", " + std::to_string(s.axis) +
           ", " + quoted(s.divisor) + ", " + quoted(s.attribute) + "]";
  });
  return json + "}";
}

std::string describe() {
  std::string json = "{\"version\": " + quoted(kOpsVersion) + ", \"ops\": {";
  const char* comma = "";
#define KVSIFT_DESCRIBE(Op, function) \
  json += comma + op_json<Op>();      \
  comma = ", ";
  KVSIFT_EACH_KERNEL(KVSIFT_DESCRIBE)
  return json + "}}";
}

}  // namespace
}  // namespace kvsift

const char* kvsift_describe() {
  static const std::string json = kvsift::describe();
  return json.c_str();
}

std::size_t kvsift_workspace(const char* op, int dtype, const std::int32_t* sizes,
                             const double* attributes) {
#define KVSIFT_WORKSPACE(Op, function) \
  if (kvsift::Op::kName == op) return kvsift::workspace<kvsift::Op>(dtype, sizes, attributes);
  KVSIFT_EACH_KERNEL(KVSIFT_WORKSPACE)
  return 0;
}

int kvsift_run(const char* op, int dtype, const std::int32_t* sizes, const double* attributes,
               const void* const* inputs, void* const* outputs, void* workspace, void* stream) {
#define KVSIFT_RUN(Op, function)                                                                  \
  if (kvsift::Op::kName == op) {                                                                  \
    return kvsift::run<kvsift::Op>(dtype, sizes, attributes, inputs, outputs, workspace, stream); \
  }
  KVSIFT_EACH_KERNEL(KVSIFT_RUN)
  return cudaErrorInvalidValue;
}

int kvsift_kv_gather(const kvsift::kernels::KvGatherArgs* args, void* stream) {
  return kvsift::kernels::kv_gather(*args, nullptr, static_cast<cudaStream_t>(stream));
}

int kvsift_kv_fill_holes(const kvsift::kernels::KvFillHolesArgs* args, void* stream) {
  return kvsift::kernels::kv_fill_holes(*args, nullptr, static_cast<cudaStream_t>(stream));
}

const char* kvsift_error(int result) {
  return cudaGetErrorString(static_cast<cudaError_t>(result));
}
