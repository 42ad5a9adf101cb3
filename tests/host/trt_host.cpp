// Plays TensorRT towards a plugin library, on a machine without a GPU: the plugin registry is the
// real one of TensorRT's lean runtime, which this program links; what the builder and an engine
// would call on a plugin is called here, on host memory.
//
// Reads requests from stdin, a line of words each (tensors follow as raw bytes), and answers with
// one line: `ok ...` or `fail ...`, after a line `log ...` for everything that was logged.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "expressions.h"
#include "fields.h"
#include "tensors.h"

namespace {

using host::as_dynamic;
using host::Buffer;
using host::bytes_of;
using host::read_descs;
using host::read_fields;
using host::text_of;
using nvinfer1::DataType;
using nvinfer1::IPluginCreatorInterface;
using nvinfer1::IPluginCreatorV3One;
using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginTensorDesc;

struct Logger : nvinfer1::ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kWARNING) {
      std::string line(text);
      for (char& c : line) {
        c = c == '\n' ? ' ' : c;
      }
      lines.push_back(line);
    }
  }
  std::vector<std::string> lines;
} logger;

struct Finder : nvinfer1::ILoggerFinder {
  nvinfer1::ILogger* findLogger() override { return &logger; }
} finder;

void require(bool condition, const char* what) {
  if (!condition) {
    throw std::runtime_error(what);
  }
}

class Host {
 public:
  std::string answer(const std::string& verb, std::istream& words) {
    const auto action = actions_.find(verb);
    require(action != actions_.end(), "unknown request");
    return action->second(words);
  }

 private:
  using Action = std::function<std::string(std::istream&)>;

  nvinfer1::IPluginV3OneCore& core() {
    return *static_cast<nvinfer1::IPluginV3OneCore*>(capability(PluginCapabilityType::kCORE));
  }
  nvinfer1::IPluginV3OneBuild& build() {
    return *static_cast<nvinfer1::IPluginV3OneBuild*>(capability(PluginCapabilityType::kBUILD));
  }
  nvinfer1::IPluginV3OneRuntime& runtime() {
    return *static_cast<nvinfer1::IPluginV3OneRuntime*>(capability(PluginCapabilityType::kRUNTIME));
  }
  nvinfer1::IPluginCapability* capability(PluginCapabilityType type) {
    require(plugin_ != nullptr, "no plugin");
    auto* found = plugin_->getCapabilityInterface(type);
    require(found != nullptr, "no such capability");
    return found;
  }

  std::int32_t aliased_input(std::int32_t output) {
    const nvinfer1::InterfaceInfo info = build().getInterfaceInfo();
    return info.major < 2
               ? -1
               : static_cast<nvinfer1::IPluginV3OneBuildV2&>(build()).getAliasedInput(output);
  }

  void replace(IPluginV3* plugin) {
    require(plugin != nullptr, "no plugin was made");
    plugin_.reset(plugin);
  }

  // static: what Triton does; registry: what trtexec and Python's load_library do.
  std::string load(std::istream& words) {
    std::string way;
    std::string path;
    words >> way >> path;
    if (way == "registry") {
      library_ = getPluginRegistry()->loadLibrary(path.c_str());
      require(library_ != nullptr, "loadLibrary");
    } else {
      void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      require(handle != nullptr, "dlopen");
      if (way == "logged") {
        reinterpret_cast<void (*)(nvinfer1::ILoggerFinder*)>(dlsym(handle, "setLoggerFinder"))(
            &finder);
      }
    }
    return {};
  }

  std::string unload(std::istream&) {
    getPluginRegistry()->deregisterLibrary(library_);
    return {};
  }

  std::string creators(std::istream&) {
    std::int32_t count = 0;
    IPluginCreatorInterface* const* all = getPluginRegistry()->getAllCreators(&count);
    std::ostringstream out;
    for (std::int32_t i = 0; i < count; ++i) {
      if (auto* creator = dynamic_cast<IPluginCreatorV3One*>(all[i]); creator != nullptr) {
        out << creator->getPluginName() << ' ';
      }
    }
    return out.str();
  }

  IPluginCreatorV3One& creator(const std::string& name) {
    auto* found = getPluginRegistry()->getCreator(name.c_str(), "1", "");
    require(found != nullptr, "no such creator");
    return *static_cast<IPluginCreatorV3One*>(found);
  }

  std::string declared(std::istream& words) {
    std::string name;
    words >> name;
    return text_of(*creator(name).getFieldNames());
  }

  std::string create(std::istream& words) {
    words >> name_;
    const auto values = read_fields(words);
    const nvinfer1::PluginFieldCollection collection{
        static_cast<std::int32_t>(values->fields.size()), values->fields.data()};
    replace(creator(name_).createPlugin("layer", &collection, nvinfer1::TensorRTPhase::kBUILD));
    std::ostringstream out;
    out << core().getPluginName() << ' ' << core().getPluginVersion() << ' ' << '"'
        << core().getPluginNamespace() << '"' << ' ' << build().getNbOutputs();
    return out.str();
  }

  std::string serialised(std::istream&) { return text_of(*runtime().getFieldsToSerialize()); }

  // What deserialising an engine does.
  std::string recreate(std::istream&) {
    const nvinfer1::PluginFieldCollection fields = *runtime().getFieldsToSerialize();
    replace(creator(name_).createPlugin("layer", &fields, nvinfer1::TensorRTPhase::kRUNTIME));
    return {};
  }

  std::string clone(std::istream&) {
    replace(plugin_->clone());
    return {};
  }

  std::string attach(std::istream&) {
    replace(runtime().attachToContext(nullptr));
    return {};
  }

  std::string aliases(std::istream&) {
    std::ostringstream out;
    for (std::int32_t i = 0; i < build().getNbOutputs(); ++i) {
      out << aliased_input(i) << ' ';
    }
    return out.str();
  }

  // Types and shapes of the outputs, from the inputs' descriptions.
  std::string outputs(std::istream& words) {
    const auto inputs = read_descs(words);
    const auto count = static_cast<std::int32_t>(inputs.size());
    host::ExpressionBuilder builder;
    std::vector<DataType> types;
    std::vector<nvinfer1::DimsExprs> shapes(inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      types.push_back(inputs[i].type);
      shapes[i].nbDims = inputs[i].dims.nbDims;
      for (std::int32_t axis = 0; axis < shapes[i].nbDims; ++axis) {
        shapes[i].d[axis] = builder.constant(inputs[i].dims.d[axis]);
      }
    }
    const std::int32_t n = build().getNbOutputs();
    std::vector<DataType> out_types(static_cast<std::size_t>(n));
    std::vector<nvinfer1::DimsExprs> out_shapes(static_cast<std::size_t>(n));
    require(build().getOutputDataTypes(out_types.data(), n, types.data(), count) == 0, "types");
    require(build().getOutputShapes(shapes.data(), count, nullptr, 0, out_shapes.data(), n,
                                    builder) == 0,
            "shapes");
    std::ostringstream out;
    for (std::size_t i = 0; i < out_types.size(); ++i) {
      out << static_cast<std::int32_t>(out_types[i]) << ' ' << out_shapes[i].nbDims << ' ';
      for (std::int32_t axis = 0; axis < out_shapes[i].nbDims; ++axis) {
        out << out_shapes[i].d[axis]->getConstantValue() << ' ';
      }
    }
    return out.str();
  }

  // The answer to supportsFormatCombination for each position.
  std::string formats(std::istream& words) {
    const auto io = as_dynamic(read_descs(words));
    const std::int32_t n = build().getNbOutputs();
    const std::int32_t inputs = static_cast<std::int32_t>(io.size()) - n;
    std::string out;
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(io.size()); ++i) {
      out += build().supportsFormatCombination(i, io.data(), inputs, n) ? "1 " : "0 ";
    }
    return out;
  }

  std::string workspace(std::istream& words) {
    const auto inputs = read_descs(words);
    const auto outputs = read_descs(words);
    return std::to_string(workspace_bytes(inputs, outputs));
  }

  std::size_t workspace_bytes(const std::vector<PluginTensorDesc>& inputs,
                              const std::vector<PluginTensorDesc>& outputs) {
    const auto in = as_dynamic(inputs);
    const auto out = as_dynamic(outputs);
    const auto in_count = static_cast<std::int32_t>(in.size());
    const auto out_count = static_cast<std::int32_t>(out.size());
    require(build().configurePlugin(in.data(), in_count, out.data(), out_count) == 0, "configure");
    return build().getWorkspaceSize(in.data(), in_count, out.data(), out_count);
  }

  // Runs the plugin: reads the inputs' bytes, writes the outputs' bytes after the answer. The word
  // `apart` keeps aliased outputs in memory of their own, as without the preview feature.
  std::string run(std::istream& words) {
    std::string mode;
    words >> mode;
    const auto inputs = read_descs(words);
    const auto outputs = read_descs(words);
    std::vector<Buffer> in;
    std::vector<const void*> in_data;
    for (const PluginTensorDesc& desc : inputs) {
      in.emplace_back(bytes_of(desc));
      std::cin.read(in.back().data(), static_cast<std::streamsize>(in.back().size()));
    }
    for (Buffer& buffer : in) {
      in_data.push_back(buffer.data());
    }
    std::vector<Buffer> own;
    std::vector<Buffer*> out;
    own.reserve(outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const std::int32_t alias = mode == "apart" ? -1 : aliased_input(static_cast<int>(i));
      own.emplace_back(alias < 0 ? bytes_of(outputs[i]) : 0);
      out.push_back(alias < 0 ? &own.back() : &in[static_cast<std::size_t>(alias)]);
    }
    std::vector<void*> out_data;
    for (Buffer* buffer : out) {
      out_data.push_back(buffer->data());
    }
    Buffer scratch(workspace_bytes(inputs, outputs));
    const auto in_count = static_cast<std::int32_t>(inputs.size());
    const auto out_count = static_cast<std::int32_t>(outputs.size());
    require(runtime().onShapeChange(inputs.data(), in_count, outputs.data(), out_count) == 0,
            "onShapeChange");
    require(runtime().enqueue(inputs.data(), outputs.data(), in_data.data(), out_data.data(),
                              scratch.data(), nullptr) == 0,
            "enqueue");
    require(scratch.intact(), "wrote behind the workspace");
    for (Buffer* buffer : out) {
      require(buffer->intact(), "wrote behind an output");
      payload.append(buffer->data(), buffer->size());
    }
    return {};
  }

  Action bind(std::string (Host::*method)(std::istream&)) {
    return [this, method](std::istream& words) { return (this->*method)(words); };
  }

  std::map<std::string, Action> actions_ = {
      {"load", bind(&Host::load)},           {"unload", bind(&Host::unload)},
      {"creators", bind(&Host::creators)},   {"declared", bind(&Host::declared)},
      {"create", bind(&Host::create)},       {"serialised", bind(&Host::serialised)},
      {"recreate", bind(&Host::recreate)},   {"clone", bind(&Host::clone)},
      {"attach", bind(&Host::attach)},       {"aliases", bind(&Host::aliases)},
      {"outputs", bind(&Host::outputs)},     {"formats", bind(&Host::formats)},
      {"workspace", bind(&Host::workspace)}, {"run", bind(&Host::run)},
  };
  std::unique_ptr<IPluginV3> plugin_;
  std::string name_;
  nvinfer1::IPluginRegistry::PluginLibraryHandle library_ = nullptr;

 public:
  std::string payload;
};

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  Host host;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    std::string answer;
    logger.lines.clear();
    host.payload.clear();
    try {
      answer = "ok " + host.answer(verb, words);
    } catch (const std::exception& error) {
      answer = std::string("fail ") + error.what();
      host.payload.clear();
    }
    for (const std::string& text : logger.lines) {
      std::cout << "log " << text << '\n';
    }
    std::cout << answer << '\n' << host.payload << std::flush;
  }
  return 0;
}
