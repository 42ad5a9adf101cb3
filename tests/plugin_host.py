"""The plugin library, compiled for the CPU, inside a real TensorRT plugin registry.

`Host` is a process of tests/host/trt_host.cpp, which does with a plugin what TensorRT's builder and
engines do, on host memory. Everything is built once into build/plugins.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernel_builds
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvsift.builder import ops
from kvsift.builder.native_ops import NATIVE_OPS

ROOT = Path(__file__).parents[1]
TRT = ROOT / "plugins/trt"
BUILD = ROOT / "build/plugins"
ALL_OPS = (*ops.OPS, *NATIVE_OPS)

Array = NDArray[Any]
#: nvinfer1::DataType of the types that ops have, and of some that they do not.
FLOAT, HALF, INT8, INT32, BOOL, BF16, INT64 = 0, 1, 2, 3, 4, 7, 8
TYPE_OF = {np.dtype(np.float32): FLOAT, np.dtype(np.float16): HALF, np.dtype(np.int32): INT32}
TYPE_OF |= {np.dtype(ml_dtypes.bfloat16): BF16}
DTYPE_OF = {number: dtype for dtype, number in TYPE_OF.items()}
#: nvinfer1::PluginFieldType of attributes, and a field type that no attribute takes.
FIELD_FLOAT32, FIELD_FLOAT64, FIELD_INT32, FIELD_CHAR, FIELD_INT64 = 1, 2, 5, 6, 10
LINEAR, CHW2 = 0, 1

FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]


@functools.cache
def tensorrt(part: str) -> Path:
    """Fetch a part of TensorRT from PyPI (scripts/fetch_tensorrt.py); return its directory."""
    command = [sys.executable, str(ROOT / "scripts/fetch_tensorrt.py"), part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return Path(done.stdout.splitlines()[-1])


def _includes() -> list[str]:
    cuda = kernel_builds.cuda_include()
    folders = (tensorrt("headers"), cuda, cuda / "cccl")
    return [word for folder in folders for word in ("-isystem", str(folder))]


def _digest(paths: Iterable[Path], words: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(words).encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep other workers out while something is built, so that each thing is built once."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
@_one_at_a_time()
def library() -> Path:
    """Compile the plugin library for the CPU: plugins/trt with the kernels of the plain build."""
    plugin_files = [p for p in TRT.iterdir() if p.suffix in (".h", ".cpp")]
    inputs = [*plugin_files, *(ROOT / "plugins").rglob("*.cu"), ROOT / "plugins/ops.gen.h"]
    inputs += [*(ROOT / "plugins/kernels").glob("*.h*"), *(ROOT / "plugins/cpu").iterdir()]
    kernels = kernel_builds.library("plain")
    target = BUILD / f"libkvsift_trt-{_digest(inputs, FLAGS)}.so"
    if not target.exists():
        _clean("libkvsift_trt-*")
        flags = [*FLAGS, "-fPIC", "-fvisibility=hidden", *_includes()]
        # Compiled by now; this only names them.
        kernel_flags = [*kernel_builds.compile_flags(), *kernel_builds.KINDS["plain"]]
        objects = [
            str(kernel_builds.compile_object(source, kernel_flags, kernels.parent))
            for source in kernel_builds.SOURCES
        ]
        sources = sorted(str(path) for path in TRT.glob("*.cpp"))
        link = [
            "-shared",
            "-Wl,-z,nodelete",
            "-Wl,-z,defs",
            f"-Wl,--version-script={TRT}/exports.map",
        ]
        part = target.with_suffix(".part")
        kernel_builds.run(["g++", *flags, *link, *sources, *objects, "-ldl", "-o", str(part)])
        part.rename(target)
    return target


@functools.cache
@_one_at_a_time()
def host_program() -> Path:
    """Compile the program that plays TensorRT, linked with the lean runtime's registry."""
    lean = tensorrt("lean")
    target = BUILD / f"trt_host-{_digest((ROOT / 'tests/host').iterdir(), FLAGS)}"
    if not target.exists():
        _clean("trt_host-*")
        source = str(ROOT / "tests/host/trt_host.cpp")
        link = [str(lean / "libnvinfer_lean.so.10"), f"-Wl,-rpath,{lean}", "-ldl"]
        part = target.with_suffix(".part")
        kernel_builds.run(["g++", *FLAGS, *_includes(), source, *link, "-o", str(part)])
        part.rename(target)
    return target


def exported_symbols(path: Path) -> set[str]:
    """The names that a shared library gives away."""
    command = ["nm", "-D", "--defined-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def _clean(pattern: str) -> None:
    for old in BUILD.glob(pattern):
        old.unlink()


@dataclass(frozen=True)
class Answer:
    """What the host said: the words after ok, or None and the reason; what was logged; bytes."""

    words: list[str] | None
    reason: str
    logs: list[str]
    payload: bytes = b""


class Host:
    """A running host program; `way` is how the library is loaded: static, logged or registry.

    `logged` is static with the host's logger handed over, so that errors come back.
    """

    def __init__(self, way: str = "logged", path: Path | None = None) -> None:
        environment = os.environ | {"CUDACPU_SEED": "0"}
        self.process = subprocess.Popen(
            [host_program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.ok(f"load {way} {path or library()}")

    def close(self) -> str:
        """End the process; return what it wrote to stderr. A crash raises."""
        _, errors = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, errors.decode()
        return errors.decode()

    def ask(self, request: str, payload: bytes = b"", expect: int = 0) -> Answer:
        """Send a request with raw bytes behind it; `expect` bytes follow the answer."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(request.encode() + b"\n" + payload)
        self.process.stdin.flush()
        logs = []
        while True:
            line = self.process.stdout.readline().decode()
            if not line:
                code = self.process.wait()
                raise AssertionError(f"the host died ({code}) at: {request[:200]}")
            kind, _, rest = line.rstrip("\n").partition(" ")
            if kind == "ok":
                return Answer(rest.split(), "", logs, self.process.stdout.read(expect))
            if kind == "fail":
                return Answer(None, rest, logs)
            logs.append(rest)

    def ok(self, request: str, payload: bytes = b"", expect: int = 0) -> Answer:
        """`ask`, where the answer must be ok."""
        answer = self.ask(request, payload, expect)
        assert answer.words is not None, f"{request[:200]}: {answer.reason}; {answer.logs}"
        return answer

    def create(self, op: ops.Op, attrs: Mapping[str, ops.Value]) -> Answer:
        """Make the plugin of an op current."""
        return self.ask(f"create {op.name} {fields(op, attrs)}")

    def run(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[tuple[DTypeLike, tuple[int, ...]]],
        mode: str = "aliased",
    ) -> list[Array]:
        """Run the current plugin; an answer that is not ok raises with what was logged."""
        given = descs([(a.dtype, a.shape) for a in inputs])
        payload = b"".join(np.ascontiguousarray(a).tobytes() for a in inputs)
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in outputs]
        answer = self.ok(f"run {mode} {given} {descs(outputs)}", payload, sum(sizes))
        assert not answer.logs
        found, start = [], 0
        for (dtype, shape), size in zip(outputs, sizes, strict=True):
            part = answer.payload[start : start + size]
            found.append(np.frombuffer(part, dtype).reshape(shape))
            start += size
        return found

    def output_descs(self, inputs: Sequence[Array]) -> list[tuple[DTypeLike, tuple[int, ...]]]:
        """The outputs' types and shapes by the plugin's own account."""
        words = iter(self.ok(f"outputs {descs([(a.dtype, a.shape) for a in inputs])}").words or [])
        found = []
        for number in words:
            rank = int(next(words))
            found.append((DTYPE_OF[int(number)], tuple(int(next(words)) for _ in range(rank))))
        return found


def fields(op: ops.Op, attrs: Mapping[str, ops.Value]) -> str:
    """Attributes as the host reads fields."""
    words = [str(len(attrs))]
    for name, value in attrs.items():
        kind = FIELD_INT32 if op.attr(name).is_int else FIELD_FLOAT32
        words += [name, str(kind), "1", str(value)]
    return " ".join(words)


def descs(tensors: Iterable[tuple[DTypeLike, tuple[int, ...]]]) -> str:
    """Tensors as the host reads descriptions."""
    listed = list(tensors)
    words = [str(len(listed))]
    for dtype, shape in listed:
        words += [str(TYPE_OF[np.dtype(dtype)]), str(LINEAR), str(len(shape)), *map(str, shape)]
    return " ".join(words)
