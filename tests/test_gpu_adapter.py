"""The layer over cuda-python, on a machine without a GPU: CUDA takes every call and says no.

`test_tensorrt_names.py` looks up the names of what is not called here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from plugin_host import ROOT, tensorrt

ADAPTERS = [ROOT / "runtime/devices" / name for name in ("cuda.py", "tensorrt.py")]
#: Runs every method that begins with a call of CUDA; the lean runtime stands for TensorRT.
PROGRAM = """
import sys
import numpy as np
sys.path[:0] = PLACES
import tensorrt_lean_bindings
sys.modules["tensorrt"] = tensorrt_lean_bindings
from kvsift.builder.errors import EngineError
from kvsift.runtime.devices.cuda import CudaDevice, cuda, driver
device = CudaDevice.__new__(CudaDevice)
device._stream = 0
device._pool = cuda.cudaMemPool_t(0)
driver.cuuint64_t(2**64 - 1)
calls = {
    "__init__": ("library",), "allocate": (64,), "free": (256,), "host_block": (64,),
    "free_host": (np.zeros(4, np.uint8),), "copy": (256, 512, 4), "zero": (256, 4),
    "copy_rows": (256, 8, 512, 8, 4, 1), "record": (lambda: None,), "synchronize": (),
    "replay": (cuda.cudaGraphExec_t(0),), "drop": (cuda.cudaGraphExec_t(0),), "release": (),
}
for name, arguments in calls.items():
    try:
        getattr(CudaDevice, name)(device, *arguments)
    except EngineError as error:
        print(name, error)
"""
CALLED = set(re.findall(r'"(\w+)": \(', PROGRAM))


def test_every_cuda_call_is_taken_and_answered(tmp_path: Path) -> None:
    places = [str(tensorrt(part)) for part in ("lean11", "cuda")]
    hidden = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("PLACES", repr(places))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=hidden | {"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.partition(" ")[0] for line in lines} == CALLED
    reason = re.compile(r"\w+ CUDA: .* \(cudaError\w+\); see kvsift doctor")
    assert [line for line in lines if not reason.fullmatch(line)] == []


def test_the_docs_name_what_was_never_executed() -> None:
    classes = [
        node
        for path in ADAPTERS
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    methods = {
        f"{c.name}.{m.name}" for c in classes for m in c.body if isinstance(m, ast.FunctionDef)
    }
    never = methods - {f"CudaDevice.{name}" for name in CALLED}
    page = (ROOT / "docs/tensorrt.md").read_text()
    (told,) = re.findall(r"Never executed: (.*?)\.\n", page, re.DOTALL)
    assert set(re.findall(r"`((?:Cuda|TensorRT)\w+\.\w+)`", told)) == never
