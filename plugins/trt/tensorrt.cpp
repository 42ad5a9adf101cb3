#include "tensorrt.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

namespace kvsift::trt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

int collect_tensorrt(dl_phdr_info* info, std::size_t /*size*/, void* data) {
  for (const char* stem : {"libnvinfer", "libtensorrt_rtx"}) {
    if (info->dlpi_name != nullptr && std::strstr(info->dlpi_name, stem) != nullptr) {
      static_cast<std::vector<std::string>*>(data)->emplace_back(info->dlpi_name);
      break;
    }
  }
  return 0;
}

template <typename R>
R call(void* handle, const char* symbol) {
  auto* function = reinterpret_cast<R (*)()>(dlsym(handle, symbol));
  return function != nullptr ? function() : R{};
}

// Calls f with a handle of every TensorRT whose major version is that of the headers used here: in
// another the virtual functions of registries and loggers have other places. Python loads TensorRT
// where the global scope does not see it.
template <typename F>
void for_each_tensorrt(F&& f) {
  const auto visit = [&f](void* handle) {
    if (call<std::int32_t>(handle, "getInferLibMajorVersion") == NV_TENSORRT_MAJOR) {
      f(handle);
    }
  };
  visit(RTLD_DEFAULT);
  std::vector<std::string> names;
  dl_iterate_phdr(collect_tensorrt, &names);
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD); handle != nullptr) {
      visit(handle);
      dlclose(handle);
    }
  }
}

nvinfer1::ILogger* find_logger() {
  nvinfer1::ILogger* logger = nullptr;
  for_each_tensorrt([&logger](void* handle) {
    if (nvinfer1::ILoggerFinder* finder = logger_finder.load(); finder && logger == nullptr) {
      logger = finder->findLogger();
    }
    if (logger == nullptr) {
      logger = call<nvinfer1::ILogger*>(handle, "getLogger");
    }
  });
  return logger;
}

}  // namespace

std::vector<nvinfer1::IPluginRegistry*> loaded_registries() {
  std::vector<nvinfer1::IPluginRegistry*> registries;
  for_each_tensorrt([&registries](void* handle) {
    auto* registry = call<nvinfer1::IPluginRegistry*>(handle, "getPluginRegistry");
    if (registry != nullptr &&
        std::find(registries.begin(), registries.end(), registry) == registries.end()) {
      registries.push_back(registry);
    }
  });
  return registries;
}

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder = finder; }

void log_error(std::string_view op, const std::string& text) noexcept try {
  const std::string line = "kvsift: " + std::string(op) + ": " + text;
  if (nvinfer1::ILogger* logger = find_logger(); logger != nullptr) {
    logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
} catch (...) {
  // Out of memory while reporting: the caller still returns its failure.
}

}  // namespace kvsift::trt
