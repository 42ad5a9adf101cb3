"""The GPU check on a device that is host memory: all of it but the calls of CUDA's runtime."""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_host import host_device, scale
from kernel_builds import library
from nvcc import nvcc

from kvsift.builder.ops import TABLE
from kvsift.runtime.kernels import KernelError, Kernels

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def device() -> Iterator[Any]:
    made = host_device()
    yield made
    assert not made.blocks  # everything was given back


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--json", str(out)]
    # No driver is visible to CUDA here, also where a machine has one.
    env = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpu-check: no GPU here, nothing was checked: ")
    assert done.stdout.count("\n") == 1
    assert not out.exists()


def test_the_whole_check_on_host_memory_with_numpy_alone(tmp_path: Path) -> None:
    """kvsift is not installed there either, where it is here as links to the sources."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-S", str(ROOT / "tests/gpu_host.py"), str(library("plain")), out]
    env = {"PYTHONPATH": str(Path(np.__file__).parents[1]), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == {}
    assert found["passed"] > 150
    names = [figure["name"] for figure in found["figures"]]
    assert {name.split()[0] for name in names} >= {*TABLE, "KvAppend", "kv_gather", "kv_fill_holes"}
    assert all(name in done.stdout for name in names)
    assert all(figure["microseconds"] > 0 for figure in found["figures"])
    targets = {f["name"]: f["target"] for f in found["figures"] if f["target"]}
    bound = ("WindowMass mean_qk", "KNormScore", "kv_gather")
    long = tuple(f"{name}, 512 tokens" for name in bound)
    bandwidth = dict.fromkeys((*bound, *long), ">= 80% of copy")
    assert targets == bandwidth | {"nexus step, one layer, 64 tokens": "<= 20 us"}


def test_a_wrong_kernel_is_named(device: Any) -> None:
    cases = module("gpu_cases")

    class Wrong(cases.CopyingKernels):  # type: ignore[misc]
        def run(self, op: str, attrs: Any, dtype: str, reads: Any, writes: Any, *more: Any) -> None:
            super().run(op, attrs, dtype, reads, writes, *more)
            writes[0][...] += 1

    passed, failed = cases.run_checks(
        Wrong(str(library("plain")), device), small=True, stop_after=5
    )
    assert len(failed) == 5
    assert "row moves" in failed
    assert "WindowMass-attrs0 float32" in failed
    assert passed < 5  # rows without any slot are right


def test_writes_to_the_wrong_place_are_seen(device: Any) -> None:
    cases = module("gpu_cases")
    array = np.zeros(8, np.float32)
    here = array.ctypes.data
    with device.scope():
        copies = cases.Copies(device)
        there = copies.of(here, array.nbytes, array.shape)
        copies.back(set())
        ctypes.memset(there.address, 1, array.nbytes)
        with pytest.raises(KernelError, match="wrote into an input of 32 bytes"):
            copies.back(set())
        copies.back({here})
        assert array.tobytes() == b"\1" * 32
        ctypes.memset(there.address + array.nbytes, 1, 1)
        with pytest.raises(KernelError, match="wrote behind an array of 32 bytes"):
            copies.back({here})


def test_a_step_is_the_oracles(device: Any) -> None:
    """The chain of five kernels gives what the oracles give one after another."""
    step, reference, small = module("gpu_step"), module("reference").REFERENCE, scale()
    kernels = Kernels(library("plain"))

    def read(array: Any, dtype: Any) -> Any:
        out = np.empty(array.shape, dtype)
        device.copy_out(out.ctypes.data, array.address, out.nbytes)
        return out

    with device.scope():
        calls, held = step.step_calls(kernels, device, small)
        keys = read(held["keys"], np.float16)
        for call in calls:
            call(0)
        score, u, keep, kept_keys = (
            read(held[n], t)
            for n, t in (("score", "f4"), ("u", "f4"), ("keep", "i4"), ("keys", "f2"))
        )
        ids, seen, pins = (read(held[n], "i4") for n in ("unit_ids", "tokens_seen", "pin_spans"))
        budget = read(held["budget"], "i4")
    attrs = TABLE["ReservoirSelect"].defaults() | {"block_size": small.block}
    want = reference["ReservoirSelect"](
        attrs,
        {"score": score, "u": u, "budget": budget, "unit_ids": ids.reshape(score.shape),
         "tokens_seen": seen, "pin_spans": pins},
    )  # fmt: skip
    assert np.array_equal(keep, want[0])
    rows = [int(j) * small.block + t for j in keep.ravel() if j >= 0 for t in range(small.block)]
    assert 0 < len(rows) < small.step_tokens
    assert np.array_equal(kept_keys[0, :, : len(rows)], keys[0][:, rows])


def test_every_function_of_cudart_exists() -> None:
    """In the runtime library of the wheel that the kernel tests take their headers from."""
    gpu_device = module("gpu_device")
    lib = gpu_device.load_cudart(None)
    assert [name for name in gpu_device.CUDART if not hasattr(lib, name)] == []


def test_the_runtime_library_is_called_rightly() -> None:
    """With a GPU, memory and time; without one the runtime's own error, from every method."""
    gpu_device = module("gpu_device")
    lib = gpu_device.load_cudart(None)
    if not gpu_device.driver_trouble():
        cuda, data = gpu_device.Cuda(lib), np.arange(64, dtype=np.float32)
        back = np.zeros_like(data)
        with cuda.scope():
            first, second = cuda.upload(data), cuda.empty(data.shape, 4)
            copy = functools.partial(cuda.copy, second.address, first.address, data.nbytes)
            assert cuda.seconds([copy]) > 0
            cuda.copy_out(back.ctypes.data, second.address, data.nbytes)
        assert np.array_equal(back, data)
        return
    with pytest.raises(gpu_device.DeviceError, match=r"cudaDeviceGetAttribute failed: .*driver"):
        gpu_device.Cuda(lib)
    cuda = object.__new__(gpu_device.Cuda)
    cuda._lib, cuda._stream = lib, 0
    data = np.zeros(4)
    calls = {
        "cudaMalloc": lambda: cuda.allocate(16),
        "cudaMemcpy": lambda: cuda.copy_in(16, data.ctypes.data, 4),
        "cudaMemcpyAsync": lambda: cuda.copy(16, 32, 4, 0),
        "cudaDeviceSynchronize": lambda: cuda.seconds([]),
        "cudaStreamEndCapture": lambda: cuda._new_graph(0),
        "cudaEventCreate": lambda: cuda._passes(0, 1),
    }
    for name, call in calls.items():
        with pytest.raises(gpu_device.DeviceError, match=f"{name} failed: "):
            call()


class Runtime:
    """A stand-in for CUDA's runtime: writes down what is called and checks the arguments."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        arguments = module("gpu_device").CUDART[name]

        def call(*given: Any) -> int:
            assert len(given) == len(arguments), name
            self.called.append(name)
            for kind, value in zip(arguments, given, strict=True):
                made = getattr(value, "_obj", None)
                if made is None:
                    kind.from_param(value)
                else:  # an event takes 4 ms, an attribute is 9, a handle 9
                    made.value = 4.0 if isinstance(made, ctypes.c_float) else 9
            return 0

        return call


def test_a_graph_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enqueued twice, once to be captured; launched between two events; everything given back."""
    gpu_device, runtime = module("gpu_device"), Runtime()
    monkeypatch.setattr(gpu_device, "driver_name", lambda: "stand-in")
    cuda = gpu_device.Cuda(runtime)
    assert cuda.name == "stand-in, 9 multiprocessors, sm_99"
    runtime.called.clear()
    with cuda.scope():
        first, second = cuda.empty((4,), 4), cuda.empty((4,), 4)
        copy = functools.partial(cuda.copy, second.address, first.address, 16)
        assert cuda.seconds([copy, copy]) == pytest.approx(4e-3 / 2)  # two passes fill the time
    called = runtime.called
    assert called.count("cudaMemcpyAsync") == 4
    start, end = called.index("cudaStreamBeginCapture"), called.index("cudaStreamEndCapture")
    assert called[start + 1 : end] == ["cudaMemcpyAsync"] * 2
    assert called.count("cudaEventCreate") == called.count("cudaEventDestroy") == 14
    assert called.count("cudaGraphLaunch") == 1 + 1 + 5 * 2
    assert called[-4:] == ["cudaGraphExecDestroy", "cudaGraphDestroy", "cudaFree", "cudaFree"]


def test_the_build_is_for_one_architecture(tmp_path: Path) -> None:
    check = module("gpu_check")
    compiles, link = check.build_commands(str(nvcc()), "90", tmp_path)
    assert len(compiles) == len(list((ROOT / "plugins/kernels").glob("*.cu"))) + 1
    assert all("-gencode=arch=compute_90,code=sm_90" in c for c in [*compiles, link])
    one = next(c for c in compiles if c[-1].endswith("knorm_score.o"))
    check.run(one)
    assert (tmp_path / "knorm_score.o").stat().st_size > 0
    with pytest.raises(SystemExit, match=r"absent\.cu"):
        check.run([*one[:-3], "absent.cu", *one[-2:]])
