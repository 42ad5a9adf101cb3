"""Builds the kernels for the CPU, once per kind of build, into build/kernels/<kind>/."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "plugins"
SOURCES = [
    *sorted((PLUGINS / "kernels").glob("*.cu")),
    PLUGINS / "cpu/runtime.cpp",
    PLUGINS / "capi.cpp",
]
FLAGS = ["-std=c++17", "-fPIC", "-g1", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas"]
#: What each kind of build is compiled and linked with.
KINDS: dict[str, list[str]] = {
    "plain": ["-O2"],
    "asan": ["-O1", "-fsanitize=address", "-fsanitize-sections=cudacpu_shared"],
    "tsan": ["-O1", "-fsanitize=thread"],
}


def cuda_include() -> Path:
    """Return the folder of cuda_runtime_api.h and cuda_fp16.h: PyPI wheels, else a toolkit."""
    places: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        places += sorted(Path(place).glob("cu*/include"))
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    places += [Path(home) / "include" for home in homes if home]
    places += sorted(Path("/usr/local").glob("cuda-*/include"))
    needed = ("cuda_runtime_api.h", "cuda_fp16.h", "crt/host_defines.h", "cccl/nv/target")
    for place in places:
        if all((place / name).exists() for name in needed):
            return place
    raise FileNotFoundError(
        "the kernel tests need CUDA's headers (no GPU): pip install '.[cuda-cpu-test]'"
    )


def compiler() -> str:
    """Return g++, which the sanitizers' runtimes are asked of as well."""
    return os.environ.get("CXX", "g++")


def compile_flags() -> list[str]:
    include = cuda_include()
    return [*FLAGS, "-isystem", str(include), "-isystem", str(include / "cccl")]


@functools.cache
def headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(PLUGINS.rglob("*.h")) + sorted(PLUGINS.rglob("*.cuh")):
        if "trt" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_object(source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Compile a source unless the same text was compiled with the same flags before."""
    text = headers_digest() + source.read_text() + " ".join(flags)
    target = folder / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.o"
    if not target.exists():
        for old in folder.glob(f"{source.stem}-*.o"):
            old.unlink()
        part = target.with_suffix(".part")
        command = [compiler(), *flags, "-c", "-x", "c++", str(source), "-o", str(part)]
        run(command)
        part.rename(target)
    return target


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


@functools.cache
def library(kind: str, sources: tuple[Path, ...] = tuple(SOURCES), name: str = "kernels") -> Path:
    """Build a library of one kind from the sources, if it is not there yet, and return its path."""
    folder = ROOT / "build" / name / kind
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*compile_flags(), *KINDS[kind]]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = [compile_object(source, flags, folder) for source in sources]
        digest = hashlib.sha256(" ".join(map(str, objects)).encode()).hexdigest()[:16]
        target = folder / f"lib{name}-{digest}.so"
        if not target.exists():
            for old in folder.glob(f"lib{name}-*.so"):
                old.unlink()
            link = [compiler(), *KINDS[kind], "-shared", *map(str, objects), "-o", str(target)]
            run(link)
    return target


def run_sanitized(kind: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a Python command with the runtime of a kind's sanitizer loaded first."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = list(command)
    if kind in ("asan", "tsan"):
        runtime = subprocess.run(
            [compiler(), f"-print-file-name=lib{kind}.so"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        # pymalloc would hide overruns of small arrays; leaks are the interpreter's own.
        env |= {"LD_PRELOAD": runtime, "PYTHONMALLOC": "malloc"}
        env |= {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 history_size=7"}
    if kind == "tsan" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # its shadow memory wants addresses that stay put
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)
