"""Names exist: what the code calls in TensorRT's and CUDA's modules is there in real ones.

It says nothing of what the calls do. The types of TensorRT 10.13 tell the class of each object;
the modules are the lean runtime 11.4, TensorRT for RTX 1.7 and cuda-bindings 13.0.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_host import tensorrt

ROOT = Path(__file__).parents[1]
FILES = sorted((*ROOT.glob("builder/**/*.py"), *ROOT.glob("runtime/**/*.py")))
TENSORRT = [p for p in FILES if "import tensorrt as trt" in p.read_text()]
CUDA = [p for p in FILES if "from cuda.bindings import runtime" in p.read_text()]
MODULES = {"rtx": "tensorrt_rtx_bindings", "lean11": "tensorrt_lean_bindings"}


def names_used(file: Path, module: str) -> list[str]:
    from names_used import names_used  # needs mypy, which the environment of parity has not

    return names_used(file, tensorrt("stubs"), module)


def missing(part: str, module: str, names: list[str]) -> list[str]:
    script = str(ROOT / "tests/tensorrt_names.py")
    done = subprocess.run(
        [sys.executable, script, str(tensorrt(part)), module],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("file", TENSORRT, ids=lambda p: str(p.relative_to(ROOT)))
def test_tensorrt_names_exist(file: Path) -> None:
    names = names_used(file, "used")
    assert "Runtime.deserialize_cuda_engine" in names  # both parts of the product load engines
    kinds = sorted({name.partition(".")[0] for name in names})
    known = 0
    for part, module in MODULES.items():
        absent = set(missing(part, module, kinds))
        here = [name for name in names if name.partition(".")[0] not in absent]
        known = max(known, len(here))
        assert not missing(part, module, here)
    assert known == len(names), "a class is in none of the modules"


def cuda_names(file: Path) -> list[str]:
    """Dotted names that follow the name under which CUDA's runtime is imported."""
    tree = ast.parse(file.read_text())
    bound = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "cuda.bindings"
        for alias in node.names
        if alias.name == "runtime"
    }
    found = set()
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.expr | ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            found.add(".".join(parts))
    return sorted(found)


@pytest.mark.parametrize("file", CUDA, ids=lambda p: str(p.relative_to(ROOT)))
def test_cuda_names_exist(file: Path) -> None:
    names = cuda_names(file)
    assert "cudaError_t.cudaSuccess" in names
    assert not missing("cuda", "cuda.bindings.runtime", names)


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "import tensorrt as trt\n\n\ndef f(config: trt.IBuilderConfig) -> None:\n"
        "    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)\n"
        "    config.set_preview_feather(trt.PreviewFeature.ALIASED, True)\n"
    )
    names = names_used(file, "wrong")
    wrong = ["IBuilderConfig.set_preview_feather", "PreviewFeature.ALIASED"]
    assert set(wrong) < set(names)
    assert missing("rtx", MODULES["rtx"], names) == wrong
