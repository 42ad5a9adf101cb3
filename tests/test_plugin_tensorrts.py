"""The same library under other TensorRTs: 11.4 from Python, and the ONNX parser of RTX."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from plugin_host import ALL_OPS, library, tensorrt

from kvsift.builder import ops

TESTS = Path(__file__).parent
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "T": TensorProto.FLOAT16}


def run(script: str, part: str, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / script), str(tensorrt(part)), str(library()), *words]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=120
    )


def test_tensorrt_11_creates_every_plugin() -> None:
    asked = [(op.name, op.defaults()) for op in ALL_OPS]
    asked += [(op.name, {}) for op in ALL_OPS if op.attrs]  # refused
    done = run("lean11_check.py", "lean11", text=json.dumps(asked))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"].startswith("11.")
    for (name, attrs), plugin in zip(asked, answer["plugins"], strict=True):
        op = next(op for op in ALL_OPS if op.name == name)
        if op.attrs and not attrs:
            assert plugin is None
            continue
        assert plugin == {
            "name": name,
            "version": ops.OPS_VERSION,
            "namespace": "",
            "outputs": len(op.outputs),
            "fields": list(attrs),
        }
    assert len(refusals(done)) == sum(len(op.attrs) for op in ALL_OPS)


def refusals(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The library's own lines: through the logger where TensorRT has one, else on stderr."""
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if line.startswith("kvsift: ")]


def single_node(op: ops.Op, attrs: dict[str, ops.Value], path: Path) -> str:
    """Write a graph of one node of the op, as the builder writes nodes."""
    values = [
        [
            helper.make_tensor_value_info(
                t.name, TYPES[t.dtype], [int(d) if d.isdigit() else d for d in t.shape]
            )
            for t in tensors
        ]
        for tensors in (op.inputs, op.outputs)
    ]
    names = [[t.name for t in tensors] for tensors in (op.inputs, op.outputs)]
    node = helper.make_node(op.name, *names, domain=ops.DOMAIN, **attrs)
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(ops.DOMAIN, ops.OPSET)]
    model = helper.make_model(helper.make_graph([node], "one", *values), opset_imports=imports)
    onnx.save(model, path)
    return str(path)


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_onnx_parser_creates_the_plugin(op: ops.Op, tmp_path: Path) -> None:
    done = run("rtx_parse.py", "rtx", single_node(op, op.defaults(), tmp_path / "one.onnx"))
    assert f"Successfully created plugin: {op.name}\n" in done.stdout, done.stdout[-2000:]
    assert not refusals(done)


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.attrs], ids=lambda op: op.name)
def test_onnx_parser_passes_every_attribute(op: ops.Op, tmp_path: Path) -> None:
    """Each attribute with a value of its own, beyond its range: the refusals name the values."""
    given = {a.name: -i if a.is_int else -i / 4 for i, a in enumerate(op.attrs, start=1)}
    done = run("rtx_parse.py", "rtx", single_node(op, given, tmp_path / "one.onnx"))
    assert "parsed False" in done.stdout
    lines = refusals(done)
    assert len(lines) == len(given)
    for line, (name, value) in zip(lines, given.items(), strict=True):
        assert re.match(rf"kvsift: {op.name}: attribute '{name}' .*, got {value:g}$", line), line
