// What the library needs from the TensorRT that is loaded in the process: registries and a logger.
//
// Nothing is linked: the functions are looked up among the loaded libraries, so that one library
// serves Enterprise, lean and RTX builds, is loadable by a plain dlopen whatever the visibility of
// TensorRT's own symbols, and by ctypes where there is no TensorRT at all.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace kvsift::trt {

// The plugin registries of the TensorRT libraries in the process, each once. Only of the major
// version whose headers this was compiled with, since a registry's virtual functions have other
// places in another; there a plugin can be loaded by the registry alone, which calls getCreators.
std::vector<nvinfer1::IPluginRegistry*> loaded_registries();

// Takes the finder that TensorRT hands to a library it loads; null forgets it.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// Logs one line, to the finder's logger, else to TensorRT's (again only of that major version),
// else to stderr.
void log_error(std::string_view op, const std::string& text) noexcept;

}  // namespace kvsift::trt
