"""The GPU that an engine is built on, or runs on."""

from __future__ import annotations


def gpu_name(device: int = 0) -> str | None:
    """Return name and compute capability, such as `NVIDIA H200 (9.0)`.

    None without a device, a driver or the package cuda-python.
    """
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    error, properties = runtime.cudaGetDeviceProperties(device)
    if error != runtime.cudaError_t.cudaSuccess:
        return None
    name = properties.name
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return f"{text.rstrip(chr(0))} ({properties.major}.{properties.minor})"
