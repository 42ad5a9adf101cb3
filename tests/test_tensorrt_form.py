"""TensorRT's form of the graph: what it holds, and the numbers that it gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from engines import LIMITS, Engines, request
from plugin_bodies import runnable, with_bodies

from kvsift.builder import schema
from kvsift.builder.ops import DOMAIN, OPS_VERSION
from kvsift.builder.package import GRAPH, WEIGHTS, Limits, load_manifest
from kvsift.builder.policies import resolve
from kvsift.builder.policies.nodes import ROWS
from kvsift.builder.targets import tensorrt
from kvsift.builder.targets.common import BuildOptions
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions.ort import OrtSession

#: Policies by name: scores of windows, of keys, of heads that compete, states, nothing at all.
POLICIES: dict[str, dict[str, Any]] = {
    "nexus": {"options": {"block_size": 8}},
    "snapkv": {"options": {"window": 16}, "scope": "both"},
    "nestedkv": {},
    "nexus-mean_qk": {"options": {"block_size": 8, "head_reduce": "mean_qk"}},
    "pyramidkv": {"options": {"window": 4}, "scope": "both"},
    "adakv": {"options": {"window": 16}, "scope": "both"},
    "h2o": {},
    "expected_attention": {},
    "random": {"options": {"block_size": 8}, "scope": "both"},
    "full": {},
}
FULL = {"density": 1.0, "max_density": 1.0}


def build(
    engines: Engines,
    target: Path,
    policy: str,
    model: str = "tiny",
    limits: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    name = policy.partition("-")[0]
    tensorrt.build(
        open_model(engines.model(model)),
        resolve(name, **POLICIES[policy]),
        Limits(**(LIMITS | (FULL if name == "full" else {}) | (limits or {}))),
        target,
        BuildOptions(**options),
        slot_tokens=640,
        onnx_only=True,
    )
    return target


def open_plugins(directory: Path) -> Engine:
    """An engine of TensorRT's form whose plugins are bodies; these need one unit at least."""
    engine = Engine(directory, threads=1)
    session = engine.session
    assert isinstance(session, OrtSession)
    empty = session._empty
    ids = np.zeros((*empty.unit_ids.shape[:3], 1), np.int32)
    session._empty = dataclasses.replace(empty, unit_ids=ids)
    return engine


def answers(engine: Engine) -> list[tuple[int, ...]]:
    """Tokens of requests that run side by side, evict at different times and end apart."""
    asked = [request(330, 90), request(150, 120, seed=2), request(47, 40), request(397, 30)]
    found: dict[int, tuple[int, ...]] = {}
    for update in engine.run(asked):
        if update.result is not None:
            found[update.index] = update.result.token_ids
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize("policy", POLICIES)
def test_same_tokens_as_the_other_form(engines: Engines, tmp_path: Path, policy: str) -> None:
    directory = build(engines, tmp_path / "trt", policy)
    name = policy.partition("-")[0]
    limits = FULL if name == "full" else None
    other = engines(name, limits=limits, **POLICIES[policy])
    expected = answers(other)
    assert len(set(expected)) == len(expected)
    assert answers(open_plugins(runnable(directory, tmp_path / "ort"))) == expected


@pytest.mark.parametrize("policy", ["nexus", "snapkv", "nestedkv"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_same_tokens_in_every_family(
    engines: Engines, tmp_path: Path, family: str, policy: str
) -> None:
    limits = {"max_input": 400, "max_output": 120}
    directory = build(engines, tmp_path / "trt", policy, family, limits)
    other = engines(policy, model=family, limits=limits, **POLICIES[policy])
    assert answers(open_plugins(runnable(directory, tmp_path / "ort"))) == answers(other)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("policy", ["nexus", "snapkv", "nestedkv"])
def test_same_tokens_of_smollm2(
    engines: Engines, tmp_path: Path, smollm2_gguf: Path, policy: str
) -> None:
    limits = {
        "max_input": 600,
        "max_output": 100,
        "max_batch": 1,
        "chunk": 256,
        "density": 0.3,
    }
    directory = build(engines, tmp_path / "trt", policy, "smollm2", limits)
    text = "The keeper of the lighthouse counted the ships that passed in the night. " * 25
    asked = request(text, 40)
    found = []
    for engine in (
        engines(policy, model="smollm2", limits=limits, **POLICIES[policy]),
        open_plugins(runnable(directory, tmp_path / "ort")),
    ):
        (result,) = [u.result for u in engine.run([asked]) if u.result is not None]
        assert result.evictions
        found.append(result.token_ids)
    assert found[0] == found[1]


def test_a_slot_without_new_tokens_keeps_its_memory(engines: Engines, tmp_path: Path) -> None:
    """KvAppend writes nothing there, unlike the padding token of the other form."""
    session = ort.InferenceSession(
        with_bodies(build(engines, tmp_path / "trt", "nexus")).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    rng = np.random.default_rng(0)
    sizes = {"B": 2, "S": 1, "C": 40, "E": 0, "N": 1, "P": 1}
    feed = {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else sizes[d] for d in value.shape]
        feed[value.name] = (
            rng.standard_normal(shape, dtype=np.float32)
            if value.type == "tensor(float)"
            else np.zeros(shape, np.int64 if value.type == "tensor(int64)" else np.int32)
        )
    feed["n_new"], feed["past_lens"] = np.array([1, 0], np.int32), np.array([[7, 9]], np.int32)
    feed["position_ids"] = np.array([[20], [9]])
    outputs = [value.name for value in session.get_outputs()]
    got = dict(zip(outputs, session.run(None, feed), strict=True))
    for before, after in tensorrt.aliased_pairs(ir.load(tmp_path / "trt" / GRAPH)):
        assert np.array_equal(got[after][1], feed[before][1]), after
        changed = np.argwhere((got[after][0] != feed[before][0]).any(-1))
        row = 20 % 17 if "ring" in after else 7
        assert {row for *_, row in changed.tolist()} == {row}, after


def test_the_package_says_what_a_session_needs(engines: Engines, tmp_path: Path) -> None:
    directory = build(engines, tmp_path / "trt", "h2o", dtype="bfloat16")
    manifest = load_manifest(directory)
    built = manifest.tensorrt
    assert (manifest.target, manifest.attention, manifest.dtype) == (
        "tensorrt",
        "tensorrt",
        "bfloat16",
    )
    assert built is not None
    assert (built.version, built.gpu, built.plugin_version) == (None, None, OPS_VERSION)
    inputs = {spec.name: spec for spec in manifest.inputs}
    assert inputs["past_key.0"].dtype == "bfloat16"
    assert inputs["accum_in.0"].dtype == "float"
    states = ("past_key.{}", "present_key.{}"), ("past_value.{}", "present_value.{}")
    states = (*states, ("accum_in.{}", "accum_out.{}"))
    expected = {(a.format(i), b.format(i)) for a, b in states for i in range(2)}
    assert set(built.aliased) == expected
    context, generation = built.profiles
    assert context.sizes["B"] == (1, 1, 1)
    assert context.sizes["S"] == (1, 128, 128)
    assert context.sizes["C"][2] >= LIMITS["max_input"]
    assert generation.sizes["B"][2] == generation.sizes["E"][2] == LIMITS["max_batch"]
    assert generation.sizes["S"] == (1, 1, 1)
    assert generation.sizes["C"][1] == 640
    assert context.sizes["E"][0] == generation.sizes["E"][0] == 0
    # The half of float32, up to alignment.
    assert manifest.files[WEIGHTS].bytes < 2.6 * manifest.parameters


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_checker_and_schema_accept_the_graph(
    engines: Engines, tmp_path: Path, policy: str, dtype: str
) -> None:
    directory = build(engines, tmp_path / "trt", policy, dtype=dtype)
    schema.register()
    onnx.checker.check_model(directory / GRAPH, full_check=True)
    model = onnx.load(directory / GRAPH)
    assert not model.functions  # a body could be taken for the plugin
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    for node in nodes:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert given.pop("plugin_version") == OPS_VERSION.encode()
        assert given.pop("plugin_namespace") == b""
        row = ROWS[node.op_type]
        assert list(given) == [attr.name for attr in row.attrs]
        assert all(isinstance(given[a.name], int if a.is_int else float) for a in row.attrs)
    appends = sum(node.op_type == "KvAppend" for node in nodes)
    window = load_manifest(directory).policy.window
    assert appends == 2 * 2 + bool(window)
    for node in model.graph.node:
        assert node.op_type not in ("TensorScatter", "If", "Loop")
        if node.op_type == "Attention":  # causal by its mask, which has the lengths in it
            assert not [a for a in node.attribute if a.name == "is_causal"]
            assert len(node.input) == 4


def test_the_checker_refuses_a_graph_with_a_wrong_attribute(
    engines: Engines, tmp_path: Path
) -> None:
    directory = build(engines, tmp_path / "trt", "nexus")
    schema.register()
    model = onnx.load(directory / GRAPH)
    node = next(node for node in model.graph.node if node.op_type == "ReservoirSelect")
    node.attribute.append(onnx.helper.make_attribute("bugdet", 3))
    with pytest.raises(onnx.checker.ValidationError, match="bugdet"):
        onnx.checker.check_model(model, full_check=True)
