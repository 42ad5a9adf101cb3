"""Names exist: every TensorRT and CUDA call in the code that needs a GPU, in the real bindings.

What can be imported without a GPU is the lean runtime (runtime and contexts), TensorRT for RTX
(builder and parser), and cuda-python. mypy checks the calls of TensorRT by type; those of CUDA are
made, and CUDA answers that there is no driver once it has taken the arguments.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_host import ROOT, tensorrt

TESTS = Path(__file__).parent
ADAPTER = "runtime/devices/tensorrt.py"
PLAN = "builder/targets/plan.py"
#: Classes of the objects that a file calls methods of, by how the file writes them.
CLASSES: dict[str, dict[str, str]] = {
    ADAPTER: {
        "self._context": "IExecutionContext",
        "context": "IExecutionContext",
        "engine": "ICudaEngine",
        "self._engine": "ICudaEngine",
        "registry": "IPluginRegistry",
        "runtime": "Runtime",
    },
    PLAN: {
        "builder": "Builder",
        "config": "IBuilderConfig",
        "parser": "OnnxParser",
        "cache": "ITimingCache",
        "engine": "ICudaEngine",
        "inspector": "EngineInspector",
        "made": "IOptimizationProfile",
        "registry": "IPluginRegistry",
    },
}
#: What each file imports as what, where it is fetched and the module that stands for it.
IMPORTS = [
    (ADAPTER, "trt", ("lean11",), "tensorrt_lean_bindings"),
    (ADAPTER, "cuda", ("cuda",), "cuda.bindings.runtime"),
    (ADAPTER, "driver", ("cuda",), "cuda.bindings.driver"),
    (PLAN, "trt", ("rtx",), "tensorrt_rtx_bindings"),
    ("builder/gpu.py", "runtime", ("cuda",), "cuda.bindings.runtime"),
]


def chains(path: str) -> dict[str, list[int | None]]:
    """Dotted names of a file, the longest of each, with the arguments of the calls of it."""
    found: dict[str, list[int | None]] = {}
    inner: set[ast.AST] = set()
    tree = ast.parse((ROOT / path).read_text())
    calls = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):  # from the outside in
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            root = root.value
            inner.add(root)
        if isinstance(root, ast.Name):
            call = calls.get(id(node))
            count = len(call.args) + len(call.keywords) if call else None
            found.setdefault(ast.unparse(node), []).append(count)
    return found


def ask(parts: tuple[str, ...], module: str, names: list[str]) -> dict[str, Any]:
    command = [sys.executable, str(TESTS / "names_check.py"), *(str(tensorrt(p)) for p in parts)]
    done = subprocess.run(
        command,
        input=json.dumps({"module": module, "names": names}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def used(path: str, root: str) -> dict[str, list[int | None]]:
    """The names below a module, and the members of the classes whose objects the file calls."""
    found = {}
    classes = CLASSES.get(path, {}) if root == "trt" else {}
    for chain, counts in chains(path).items():
        owner, _, name = chain.rpartition(".")
        if chain.startswith(f"{root}."):
            found[chain.removeprefix(f"{root}.")] = counts
        elif owner in classes:
            found[f"{classes[owner]}.{name}"] = counts
    return found


@pytest.mark.parametrize(("path", "root", "parts", "module"), IMPORTS)
def test_names_exist(path: str, root: str, parts: tuple[str, ...], module: str) -> None:
    calls = used(path, root)
    answer = ask(parts, module, sorted(calls))
    assert answer["missing"] == []
    assert calls
    if root == "trt":
        return  # its functions are overloaded: mypy counts their arguments
    functions = {name for name in calls if "." not in name and name.startswith("cuda")}
    for name in functions - {"cudaMemPoolProps"}:
        assert {c for c in calls[name] if c is not None} == {answer["parameters"][name]}, name


@pytest.mark.parametrize("path", CLASSES)
def test_every_object_of_the_table_is_one_of_the_file(path: str) -> None:
    owners = {chain.rpartition(".")[0] for chain in chains(path)}
    assert set(CLASSES[path]) <= owners


def test_the_check_sees_what_is_missing() -> None:
    answer = ask(("cuda",), "cuda.bindings.runtime", ["cudaMemcpyAsync", "cudaMemcpySoon"])
    assert answer == {"missing": ["cudaMemcpySoon"], "parameters": {"cudaMemcpyAsync": 5}}


#: What runs every method of the adapter that calls CUDA; its library answers "no driver".
PROGRAM = """
import sys
import numpy as np
sys.path[:0] = PLACES
import tensorrt_lean_bindings
sys.modules["tensorrt"] = tensorrt_lean_bindings
from kvsift.builder.errors import EngineError
from kvsift.runtime.devices.tensorrt import GpuDevice, cuda
device = GpuDevice.__new__(GpuDevice)
device._stream, device._activations = 0, 256
device._pool = cuda.cudaMemPool_t(0)
calls = {
    "__init__": (), "allocate": (64,), "free": (256,), "host_block": (64,),
    "free_host": (np.zeros(4, np.uint8),), "copy": (256, 512, 4), "zero": (256, 4),
    "copy_rows": (256, 8, 512, 8, 4, 1), "record": (lambda: None,), "synchronize": (),
    "replay": (cuda.cudaGraphExec_t(0),), "drop": (cuda.cudaGraphExec_t(0),), "release": (),
}
for name, arguments in calls.items():
    try:
        getattr(device, name)(*arguments)
    except EngineError as error:
        print(name, error)
"""


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
    assert len(lines) == 13
    reason = re.compile(r"\w+ CUDA: .* \(cudaError\w+\); see kvsift doctor")
    assert [line for line in lines if not reason.fullmatch(line)] == []
