"""TensorRT's form of a graph with op bodies attached, so that ONNX Runtime can run it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from kvsift.builder import eviction, names
from kvsift.builder.bodies.tools import Body, index
from kvsift.builder.native_ops import NATIVE_OPS
from kvsift.builder.ops import DOMAIN, TABLE
from kvsift.builder.package import GRAPH, MANIFEST, file_spec, load_manifest, write_manifest
from kvsift.builder.schema import PLUGIN

(KV_APPEND,) = NATIVE_OPS


def kv_append() -> ir.Function:
    """The plugin's equation in standard nodes, which make the whole cache anew."""
    b = Body(KV_APPEND)
    cache, rows = b.input("cache"), b.input("rows")
    token = b.op("Sub", index(b, cache, 2), b.unsqueeze(b.input("past_lens"), 2))  # [B, Rl, C]
    real = b.op("Less", token, b.reshape(b.input("n_new"), -1, 1, 1))
    fresh = b.op("And", real, b.op("GreaterOrEqual", token, b.i32(0)))
    last = b.op("Sub", b.size(rows, 2), b.i64(1))
    token = b.op("Max", b.op("Min", b.cast(token, ir.DataType.INT64), last), b.i64(0))
    token = b.op("Expand", b.unsqueeze(token, 3), b.op("Shape", cache))
    new = b.op("GatherElements", rows, token, axis=2)
    return b.finish([b.op("Where", b.unsqueeze(fresh, 3), new, cache)])


def calls(model: ir.Model) -> dict[str, dict[str, Any]]:
    """Attributes of every plugin node by op; a node without the importer's own is a fault."""
    found: dict[str, dict[str, Any]] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        given = {name: attr.value for name, attr in node.attributes.items()}
        assert {name: given.pop(name) for name in PLUGIN} == PLUGIN
        assert found.setdefault(node.op_type, given) == given
    return found


def with_bodies(directory: Path) -> onnx.ModelProto:
    """The package's graph, weights inside, its plugin nodes with bodies."""
    manifest = load_manifest(directory)
    model = ir.load(directory / GRAPH)
    assert not model.functions
    known = calls(model)
    bodies = eviction.functions(
        manifest.model, manifest.policy, {op: known[op] for op in known if op in TABLE}
    )
    for function in (*bodies, kv_append()):
        model.functions[function.identifier()] = function
    return ir.to_proto(ir.external_data.load_to_model(model))


def runnable(directory: Path, target: Path) -> Path:
    """Write the package with bodies to `target`, as one that ONNX Runtime's session loads.

    The ring's axis of 1 is the only difference between the forms' inputs and outputs.
    """
    model = ir.from_proto(with_bodies(directory))
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.name in (names.Q_RING_IN, names.Q_RING_OUT):
            _without_axis(graph, value)
    target.mkdir()
    ir.save(model, target / GRAPH)
    for path in directory.iterdir():
        if path.name not in (GRAPH, MANIFEST):
            shutil.copy(path, target)
    manifest = load_manifest(directory)
    files = manifest.files | {GRAPH: file_spec(target / GRAPH)}
    changed = {"target": "ort", "attention": "portable", "files": files}
    write_manifest(target, manifest.model_copy(update=changed))
    return target


def _without_axis(graph: ir.Graph, ring: ir.Value) -> None:
    """Put a Reshape between the graph and its ring [B, 1, W + 1, F], which loses its axis 1."""
    assert ring.shape is not None
    shape = ir.Value(name=f"{ring.name}_shape")
    inner = ir.Value(name=f"{ring.name}_4d", type=ring.type, shape=ring.shape)
    flat = ir.Shape([ring.shape[0], *ring.shape[2:]])
    is_input = ring in graph.inputs
    sizes = [0, 1, *ring.shape[2:]] if is_input else [0, *ring.shape[2:]]
    constant = ir.node("Constant", [], {"value": ir.tensor(np.array(sizes, np.int64))})
    constant.outputs[0].name = shape.name
    if is_input:
        ir.convenience.replace_all_uses_with(ring, inner)
        ring.shape = flat
        reshape = ir.Node("", "Reshape", [ring, constant.outputs[0]], outputs=[inner])
        graph.insert_before(graph[0], [constant, reshape])
        return
    name, ring.name = ring.name, inner.name
    outer = ir.Value(name=name, type=ring.type, shape=flat)
    reshape = ir.Node("", "Reshape", [ring, constant.outputs[0]], outputs=[outer])
    graph.extend([constant, reshape])
    graph.outputs[graph.outputs.index(ring)] = outer
