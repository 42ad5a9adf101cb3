"""The TensorRT target: the graph with plugin nodes, and the engine that TensorRT makes of it.

The engine is built where TensorRT, a GPU and the plugin library are. Elsewhere `onnx_only` stops
before, with the command that makes the engine from what was written.
"""

from __future__ import annotations

import importlib
import os
import shlex
from pathlib import Path

import onnx_ir as ir

from kvsift.builder import plugin_library
from kvsift.builder.errors import EngineError, KvsiftError, UsageError
from kvsift.builder.gpu import gpu_name
from kvsift.builder.native_ops import alias
from kvsift.builder.ops import DOMAIN, OPS_VERSION
from kvsift.builder.package import GRAPH, PLAN, WEIGHTS, Limits, Manifest, TensorRTBuild
from kvsift.builder.policies.base import Policy
from kvsift.builder.policies.nodes import ROWS
from kvsift.builder.schema import PLUGIN
from kvsift.builder.targets.common import (
    RUN,
    BuildOptions,
    Graph,
    Progress,
    package,
    specs,
    write_graph,
    write_rest,
)
from kvsift.builder.targets.job import Job, Watch
from kvsift.builder.targets.profiles import profiles, trtexec_words
from kvsift.builder.weights import WeightSource

#: The script of an `onnx_only` package that makes its engine.
SCRIPT = "trtexec.sh"
CONTAINER = "nvcr.io/nvidia/tensorrt (TensorRT 10.15 or later)"


def build(
    source: WeightSource,
    policy: Policy,
    limits: Limits,
    directory: Path,
    options: BuildOptions,
    slot_tokens: int,
    *,
    onnx_only: bool = False,
    progress: Progress | None = None,
    watch: Watch = lambda phase, done, steps: None,
) -> Manifest:
    """Write the engine package and return its manifest.

    `slot_tokens` is the capacity of a slot. `progress` is called with the bytes of each tensor
    written, `watch` with what TensorRT does. Raises UsageError for options that TensorRT's form
    does not have, EngineError when something needed is missing here or TensorRT fails; nothing
    half-made stays behind.
    """
    check_options(options, "tensorrt")
    gpu = None if onnx_only else check_machine()
    graph = Graph("tensorrt", "tensorrt")
    with package(source, policy, directory, options, copies=1 if onnx_only else 2) as building:
        model = write_graph(source, policy, building, options, graph, progress, name_plugins)
        inputs = specs(model.graph.inputs)
        found = profiles(source.config, policy, limits, slot_tokens)
        aliased = aliased_pairs(model)
        version = None
        if onnx_only:
            text = script(trtexec_words(found, inputs))
            (building / SCRIPT).write_text(text, encoding="utf-8")
        else:
            from kvsift.builder.targets.plan import build_plan

            job = Job(
                onnx=building / GRAPH,
                plan=building / PLAN,
                inputs=inputs,
                profiles=found,
                aliased=aliased,
                library=plugin_library.find(),
                timing_cache=timing_cache(),
            )
            version = build_plan(job, watch)
            for name in (GRAPH, WEIGHTS):  # the engine holds both
                (building / name).unlink()
        told = TensorRTBuild(
            version=version,
            gpu=gpu,
            plugin_version=OPS_VERSION,
            profiles=found,
            aliased=aliased,
        )
        use = RUN if version else f"`sh {SCRIPT}` here makes {PLAN} first. {RUN}"
        return write_rest(source, policy, limits, building, options, graph, model, told, use)


def check_options(options: BuildOptions, target: str) -> None:
    """Raise UsageError for options of ONNX Runtime's graph."""
    if options.quantize != "none":
        raise UsageError(
            f"--quantize {options.quantize} writes MatMulNBits nodes, an ONNX Runtime format that "
            f"TensorRT does not read; leave it out, or build with --target ort (not {target})"
        )
    if options.attention is not None:
        raise UsageError(
            f"--attention {options.attention} is a form of ONNX Runtime's graph; --target {target} "
            "has one of its own: leave out --attention"
        )


def check_machine() -> str:
    """Return the GPU's name; EngineError says what is missing to build an engine here."""
    try:
        usable = hasattr(importlib.import_module("tensorrt"), "Builder")
    except ImportError:
        usable = False
    elsewhere = f"build in NVIDIA's container {CONTAINER}, or with --onnx-only (docs/tensorrt.md)"
    if not usable:  # type stubs alone import as an empty package
        raise EngineError(f"TensorRT's Python module is not installed here; {elsewhere}")
    name = gpu_name()
    if name is None:
        raise EngineError(
            "TensorRT builds an engine on the GPU that runs it, and none is found here "
            f"(cuda-python must be installed and a driver running); {elsewhere}"
        )
    plugin_library.find()
    return name


def can_build(options: BuildOptions) -> bool:
    """Return whether this machine builds TensorRT engines, and these options are for one."""
    try:
        check_options(options, "tensorrt")
        check_machine()
    except KvsiftError:
        return False
    return True


def name_plugins(model: ir.Model) -> None:
    """Write into every plugin node by which version and namespace TensorRT's importer finds it."""
    for node in model.graph:
        if node.domain == DOMAIN:
            for name, value in PLUGIN.items():
                node.attributes[name] = ir.AttrString(name, value)


def aliased_pairs(model: ir.Model) -> tuple[tuple[str, str], ...]:
    """Return the (input, output) of the graph that a plugin node writes in place."""
    inputs, outputs = set(model.graph.inputs), set(model.graph.outputs)
    pairs = []
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        op = ROWS[node.op_type]
        for output, told in zip(node.outputs, op.outputs, strict=True):
            if (index := alias(op, told)) < 0:
                continue
            before = node.inputs[index]
            assert before in inputs, f"{node.op_type} writes in place over an inner tensor"
            assert output in outputs, f"{node.op_type} updates a state in place, not the engine's"
            pairs.append((str(before.name), str(output.name)))
    return tuple(pairs)


def timing_cache() -> Path:
    """Return the file that keeps what TensorRT has measured, for later builds of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvsift" / "tensorrt-timing.cache"


def script(words: list[str]) -> str:
    """Return the shell script that makes the engine with TensorRT's own tool."""
    fixed = [
        f"--onnx={GRAPH}",
        f"--saveEngine={PLAN}",
        "--stronglyTyped",
        "--preview=+aliasedPluginIO1003",
        "--profilingVerbosity=detailed",
        "--skipInference",
    ]
    given = " \\\n  ".join(shlex.quote(word) for word in [*fixed, *words])
    return (
        "#!/bin/sh\n"
        f"# Makes {PLAN} from {GRAPH} here; run it where TensorRT and the GPU are, and name the\n"
        f"# plugin library: {plugin_library.VARIABLE}=/path/{plugin_library.NAME} sh {SCRIPT}\n"
        'set -e\ncd "$(dirname "$0")"\n'
        f'trtexec "--dynamicPlugins=${{{plugin_library.VARIABLE}:?}}" \\\n  {given} "$@"\n'
    )
