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


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def sources_of(dependencies: Path) -> list[Path]:
    """The project's own files that a compiler's dependency file names; none if it is not there."""
    if not dependencies.exists():
        return []
    words = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return [Path(w) for w in words if ROOT in Path(os.path.abspath(w)).parents]


def compile_object(source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Compile a source unless it and all that it includes were compiled so before."""
    target, listed = folder / f"{source.stem}.o", folder / f"{source.stem}.d"
    stamp = folder / f"{source.stem}.stamp"

    def state() -> str:
        files = [p for p in sources_of(listed) if p.exists()]
        return digest(*flags, *(f"{p}\0{p.read_text()}" for p in files))

    if not (target.exists() and stamp.exists() and stamp.read_text() == state()):
        stamp.unlink(missing_ok=True)
        command = [compiler(), *flags, "-MMD", "-MF", str(listed), "-c", "-x", "c++"]
        run([*command, str(source), "-o", str(target)])
        stamp.write_text(state())
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
        stamps = [(folder / f"{source.stem}.stamp").read_text() for source in sources]
        # Another name for another content: a process may have loaded the one before.
        target = folder / f"lib{name}-{digest(*stamps)}.so"
        if not target.exists():
            for old in folder.glob(f"lib{name}-*.so"):
                old.unlink()
            part = target.with_suffix(".part")
            run([compiler(), *KINDS[kind], "-shared", *map(str, objects), "-o", str(part)])
            part.rename(target)
    return target


def run_sanitized(kind: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a Python command with the runtime of a kind's sanitizer loaded first."""
    # numpy's own threads would be reported: nothing tells a sanitizer how they wait for each other.
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
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
        env |= {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 history_size=4"}
    if kind == "tsan" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # its shadow memory wants addresses that stay put
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)
