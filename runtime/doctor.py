"""What this machine can build and run, and the fix for what it cannot."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib import metadata

from kvsift.builder import plugin_library
from kvsift.builder.errors import EngineError
from kvsift.builder.gpu import gpu_name
from kvsift.runtime import console
from kvsift.runtime.sessions.ort import MIN_ORT

#: Largest difference of the attention self-test from numpy; right versions stay below 1e-6.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Check:
    """One finding; `needed`: engines cannot run on the CPU without it."""

    name: str
    good: bool
    found: str
    fix: str = ""
    needed: bool = True

    @property
    def mark(self) -> str:
        """A word for the finding."""
        return "ok" if self.good else "FAILS" if self.needed else "absent"


def examine() -> list[Check]:
    """Return the findings about this machine, those needed for the CPU first."""
    return [
        _python(),
        Check("numpy", True, metadata.version("numpy")),
        _onnxruntime(),
        *_attention(),
        _threads(),
        _memory(),
        *_tensorrt(),
    ]


def _python() -> Check:
    return Check("python", True, f"{platform.python_version()} on {platform.platform()}")


def _onnxruntime() -> Check:
    need = f"onnxruntime>={MIN_ORT[0]}.{MIN_ORT[1]}"
    try:
        found = metadata.version("onnxruntime")
    except metadata.PackageNotFoundError:
        return Check(
            "onnxruntime", False, "not installed", f"Python 3.11 or later; pip install '{need}'"
        )
    good = tuple(int(part) for part in found.split(".")[:2]) >= MIN_ORT
    return Check("onnxruntime", good, found, "" if good else f"pip install '{need}'")


def _attention() -> list[Check]:
    """Run the numeric self-test of both attention forms."""
    from kvsift.runtime.selftest import FORMS, attention_error

    checks = []
    for form in FORMS:
        name = f"attention, {form}"
        try:
            error = attention_error(form)
        except Exception as failure:
            what = " ".join(str(failure).split())[:120]
            checks.append(Check(name, False, f"fails: {what}", "see onnxruntime above"))
            continue
        good = error < TOLERANCE
        fix = "" if good else "wrong results: pip install --upgrade onnxruntime"
        checks.append(Check(name, good, f"differs from numpy by {error:.1e}", fix))
    return checks


def _threads() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("CPU threads", True, f"{usable} usable of {os.cpu_count()}")


def _memory() -> Check:
    free = console.available_memory()
    found = "unknown" if free is None else f"{console.size_text(free)} available"
    return Check("memory", True, found)


def _tensorrt() -> list[Check]:
    """Return whether engines of the target tensorrt can be built and run."""
    fix = ""
    try:
        library = str(plugin_library.find())
    except EngineError as error:
        library, fix = "no library", str(error)
    package = importlib.util.find_spec("tensorrt") is not None
    driver = _library("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
    gpu = gpu_name() if driver else None
    missing = "no driver" if not driver else "a driver, and no GPU that cuda-python sees"
    extra = "pip install 'kvsift[tensorrt]'"
    hardware = "a machine with an NVIDIA GPU and its driver"
    found = _version("tensorrt") if package else "not installed"
    return [
        Check("tensorrt package", package, found, "" if package else extra, needed=False),
        Check("tensorrt plugins", not fix, library, fix, needed=False),
        Check(
            "NVIDIA GPU",
            gpu is not None,
            gpu or missing,
            "" if gpu else extra if driver else hardware,
            needed=False,
        ),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "found"


def _library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
