# What the plugin library is made from: nvcc, a C++ compiler and TensorRT's headers.
#
# Sets KVSIFT_NVCC and KVSIFT_TENSORRT_INCLUDE where they are found, and KVSIFT_MISSING: a list of
# sentences, each with the way to get what is absent.
set(KVSIFT_MISSING "")

# nvcc: what CMake or the environment names, the system's, or the wheel nvidia-cuda-nvcc of the
# Python that builds (sysconfig knows its site-packages also where pip isolates a build).
find_program(KVSIFT_PYTHON NAMES python3 python HINTS "${Python_ROOT_DIR}/bin")
if(DEFINED PYTHON_EXECUTABLE)  # as scikit-build-core gives it
  set(KVSIFT_PYTHON "${PYTHON_EXECUTABLE}")
endif()
set(_wheel_dirs "")
if(KVSIFT_PYTHON)
  execute_process(
    COMMAND "${KVSIFT_PYTHON}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE _site OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_site)
    file(GLOB _wheel_dirs LIST_DIRECTORIES true "${_site}/nvidia/cu*/bin")
  endif()
endif()
if(CMAKE_CUDA_COMPILER)
  set(KVSIFT_NVCC "${CMAKE_CUDA_COMPILER}" CACHE FILEPATH "CUDA compiler")
elseif(DEFINED ENV{CUDACXX})
  set(KVSIFT_NVCC "$ENV{CUDACXX}" CACHE FILEPATH "CUDA compiler")
else()
  find_program(KVSIFT_NVCC nvcc HINTS ENV CUDA_PATH PATHS /usr/local/cuda/bin ${_wheel_dirs}
    PATH_SUFFIXES bin DOC "CUDA compiler")
endif()
if(NOT KVSIFT_NVCC)
  list(APPEND KVSIFT_MISSING
    "nvcc: install the CUDA toolkit, or pip install 'nvidia-cuda-nvcc==13.0.*' \
'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' \
'nvidia-cuda-runtime==13.0.*' (pip install '.[nvcc]' names the same), or name it with \
-DCMAKE_CUDA_COMPILER=NVCC")
endif()

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  list(APPEND KVSIFT_MISSING "a C++ compiler: install g++ (apt-get install g++)")
endif()

# TensorRT's headers: the SDK that TENSORRT_ROOT (variable or environment) names, the system's, or
# what scripts/fetch_tensorrt.py has put into the build directory of the source tree.
find_path(KVSIFT_TENSORRT_INCLUDE NvInferRuntime.h
  HINTS "${TENSORRT_ROOT}" ENV TENSORRT_ROOT
  PATHS /usr/local/tensorrt
    "${CMAKE_CURRENT_LIST_DIR}/../build/tensorrt/headers/kernel_lens/include/tensorrt"
  PATH_SUFFIXES include include/x86_64-linux-gnu include/aarch64-linux-gnu
  DOC "Directory of NvInferRuntime.h")
if(NOT KVSIFT_TENSORRT_INCLUDE)
  list(APPEND KVSIFT_MISSING
    "TensorRT's headers: name the SDK with -DTENSORRT_ROOT=DIRECTORY, or fetch them from PyPI \
with python scripts/fetch_tensorrt.py headers")
endif()

# The architectures in `wanted` that this nvcc can compile for, as CMake writes them.
function(kvsift_known_architectures wanted out)
  execute_process(COMMAND "${KVSIFT_NVCC}" --list-gpu-arch
    OUTPUT_VARIABLE _known RESULT_VARIABLE _code ERROR_QUIET)
  set(_found "")
  foreach(_arch IN LISTS wanted)
    if(_code OR _known MATCHES "compute_${_arch}(\n|$)")
      list(APPEND _found "${_arch}")
    endif()
  endforeach()
  set(${out} "${_found}" PARENT_SCOPE)
endfunction()
