"""A real TensorRT builder, that of TensorRT for RTX, takes the graphs; it needs no GPU.

Its engines hold no plugins: `tensorrt-rtx` packages have op bodies in their place, and of
TensorRT's own form all but the plugin nodes is built.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from commands import build
from engines import Engines
from plugin_host import tensorrt as fetched

from kvsift.builder.eviction import score_rows
from kvsift.builder.ops import DOMAIN
from kvsift.builder.package import GRAPH, PLAN, Manifest, load_manifest
from kvsift.builder.policies.nodes import ROWS
from kvsift.builder.targets import rtx
from kvsift.builder.targets.common import FLOATS, specs
from kvsift.builder.targets.job import Job

LIMITS = ("--max-input", 400, "--max-output", 64, "--max-batch", 2)
POLICIES = ("nexus", "snapkv", "nestedkv")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module importable, here and in the process that builds."""
    path = str(fetched("rtx"))
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", path, prepend=":")


def builds(engines: Engines, target: Path, model: str, policy: str, *options: object) -> None:
    """Build an engine and check what is told of it; prints its size and time."""
    args = ("--eviction", policy, "--target", "tensorrt-rtx", "-o", target, *options)
    done = build(engines.model(model), *args)
    assert done.exit_code == 0, done.stderr
    manifest = load_manifest(target)
    assert manifest.target == "tensorrt-rtx"
    assert manifest.tensorrt is not None
    assert manifest.tensorrt.version == "1.7.1.116"
    assert [p.name for p in manifest.tensorrt.profiles] == ["context", "generation"]
    # The engine holds the weights, two bytes each.
    assert manifest.files[PLAN].bytes > 2 * manifest.parameters
    told = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    assert {"built in", PLAN} <= told.keys()
    print(f"\n{model} {policy}: {told[PLAN]} {told['built in']}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tiny_models_build(engines: Engines, tmp_path: Path, family: str, policy: str) -> None:
    builds(engines, tmp_path / "engine", family, policy, *LIMITS)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("policy", POLICIES)
def test_smollm2_builds(engines: Engines, tmp_path: Path, smollm2_gguf: Path, policy: str) -> None:
    builds(engines, tmp_path / "engine", "smollm2", policy, "--max-input", 1024)


def without_plugins(directory: Path, manifest: Manifest) -> ir.Model:
    """The graph with every plugin node cut out: what it reads is an output, what it gives an input.

    What a node only hands on from the graph's own inputs needs no mention.
    """
    model = ir.load(directory / GRAPH)
    graph = model.graph
    fixed = {
        "L": manifest.model.num_layers,
        "R": score_rows(manifest.model, manifest.policy),
        "Hkv": manifest.model.num_kv_heads,
        "Hq": manifest.model.num_heads,
        "D": manifest.model.head_dim,
        "W": manifest.policy.window,
    }
    kinds = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "T": FLOATS[manifest.dtype]}
    given, read = [], list(graph.outputs)
    graph.outputs.clear()
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        for output, told in zip(node.outputs, ROWS[node.op_type].outputs, strict=True):
            if output.shape is None:
                draws = node.attributes["draws"].as_int() if "draws" in node.attributes else 0
                dims = [(fixed | {"n": draws}).get(d, d) for d in told.shape]
                output.shape, output.dtype = ir.Shape(dims), kinds[told.dtype]
            made = ir.Value(name=f"{output.name}_given", type=output.type, shape=output.shape)
            ir.convenience.replace_all_uses_with(output, made)
            given.append(made)
        for value, told in zip(node.inputs, ROWS[node.op_type].inputs, strict=True):
            assert value is not None
            if value.producer() is not None:
                value.dtype = kinds[told.dtype]
                read.append(value)
        graph.remove(node, safe=False)
    graph.inputs.extend(given)
    alive = {v for node in graph for v in node.outputs}
    graph.outputs.extend(dict.fromkeys(v for v in read if v in alive))
    return model


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        *((policy, "bfloat16") for policy in (*POLICIES, "h2o", "expected_attention", "adakv")),
        ("nexus", "float16"),
        ("nexus", "float32"),
    ],
)
def test_all_but_plugins_builds(engines: Engines, tmp_path: Path, policy: str, dtype: str) -> None:
    target = tmp_path / "trt"
    args = ("--eviction", policy, "--onnx-only", "--dtype", dtype, "-o", target, *LIMITS)
    assert build(engines.model("qwen3"), *args).exit_code == 0
    manifest = load_manifest(target)
    assert manifest.tensorrt is not None
    model = without_plugins(target, manifest)
    onnx, plan = target / "cut.onnx", tmp_path / PLAN
    ir.save(model, onnx)
    job = Job(
        onnx=onnx,
        plan=plan,
        inputs=specs(model.graph.inputs),
        profiles=manifest.tensorrt.profiles,
    )
    phases: dict[str, int] = {}
    rtx._run(job, lambda phase, done, steps: phases.update({phase: steps - done}))
    assert plan.stat().st_size > 2 * manifest.parameters
    assert phases
    assert set(phases.values()) == {0}  # each phase was seen to its end
