"""The CUDA compiler for tests: the system's, else PyPI's, installed into build/nvcc once."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
WHEEL = ROOT / "build/nvcc"


@functools.cache
def nvcc() -> Path:
    """Return a working nvcc; without the system's the wheels of the extra `nvcc` are installed."""
    found = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if Path(found).exists():
        return Path(found)
    WHEEL.mkdir(parents=True, exist_ok=True)
    with (WHEEL / "lock").open("w") as lock:  # another worker may be at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed = next(WHEEL.glob("nvidia/cu*/bin/nvcc"), None)
        if installed is None:
            pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
            wheels = pyproject["project"]["optional-dependencies"]["nvcc"]
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(WHEEL)]
            subprocess.run([*command, *(w.partition(";")[0] for w in wheels)], check=True)
            installed = next(WHEEL.glob("nvidia/cu*/bin/nvcc"))
    return installed


@functools.cache
def nvcc_version() -> str:
    """Return the compiler's version, such as 13.0.88."""
    found = re.search(r"V(\d+\.\d+\.\d+)", run([str(nvcc()), "--version"]))
    assert found
    return found[1]


def cmake() -> str:
    """Return the cmake program: on the path, else beside this Python."""
    return shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")


@functools.cache
def cuda_library() -> tuple[Path, Path]:
    """Build the plugin library with nvcc for every architecture, as a user does.

    Returns the library and the log of what ptxas said of every kernel. Both stay in build/cuda, so
    that a later call compiles only what has changed.
    """
    from plugin_host import tensorrt

    build = ROOT / "build/cuda"
    configure = [cmake(), "-S", str(ROOT), "-B", str(build), "-DKVSIFT_CUDA=ON"]
    configure += [f"-DTENSORRT_ROOT={tensorrt('headers')}", "-DCMAKE_CUDA_FLAGS=-Xptxas -v"]
    configure += [f"-DCMAKE_CUDA_COMPILER={nvcc()}"]
    run([*configure, "-DCMAKE_BUILD_TYPE=Release"])
    log = build / "ptxas.log"
    command = [cmake(), "--build", str(build), "--parallel", "2"]
    # Appended, also of a build that was stopped: what is compiled already says nothing again. Two
    # compilers at once must not take turns line by line.
    whole = os.environ | {"MAKEFLAGS": "--output-sync=target"}
    with log.open("a") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, env=whole)
    run(command)
    version = re.search(r'kOpsVersion = "(\w+)"', (ROOT / "plugins/ops.gen.h").read_text())
    assert version
    return build / f"plugins/libkvsift_trt.so.{version[1]}", log


def run(command: list[str], **environment: str) -> str:
    """Run a command; return all it said, which is also the message where it fails."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
    return done.stdout
