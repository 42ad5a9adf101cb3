"""The TensorRT for RTX target: proof that a real TensorRT builds the decoder and the op bodies.

It needs no GPU. Its engine holds no plugins: op bodies stand in their place, appends are
TensorScatter into caches of one static capacity, and random numbers are an input. kvsift does not
run it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from kvsift.builder.bodies.tools import MOST_FIXED_UNITS
from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.package import GRAPH, PLAN, WEIGHTS, Limits, Manifest, TensorRTBuild
from kvsift.builder.policies.base import Policy
from kvsift.builder.targets.common import (
    BuildOptions,
    Graph,
    Progress,
    package,
    specs,
    write_graph,
    write_rest,
)
from kvsift.builder.targets.job import Job, Watch
from kvsift.builder.targets.profiles import context_tokens, profiles
from kvsift.builder.targets.tensorrt import check_options
from kvsift.builder.weights import WeightSource

#: Import names of the module: that of the wheel tensorrt-rtx, and that of its bindings alone.
MODULES = ("tensorrt_rtx", "tensorrt_rtx_bindings")


def build(
    source: WeightSource,
    policy: Policy,
    limits: Limits,
    directory: Path,
    options: BuildOptions,
    slot_tokens: int,
    *,
    progress: Progress | None = None,
    watch: Watch = lambda phase, done, steps: None,
) -> Manifest:
    """Write the engine package and return its manifest; parameters as `tensorrt.build`.

    Raises UsageError for options or sizes that this form does not have, EngineError when the
    module is missing or fails; nothing half-made stays behind.
    """
    check_options(options, "tensorrt-rtx")
    if not any(importlib.util.find_spec(name) for name in MODULES):
        raise EngineError("TensorRT for RTX is not installed; pip install tensorrt-rtx")
    capacity = context_tokens(source.config, limits, slot_tokens)
    units = -(-capacity // policy.block_size)
    if policy.evicts and units > MOST_FIXED_UNITS:
        raise UsageError(
            f"caches of {capacity} tokens are {units} units, and TensorRT for RTX sorts at most "
            f"{MOST_FIXED_UNITS}; lower --max-input"
        )
    graph = Graph("tensorrt-rtx", "tensorrt-rtx", capacity)
    with package(source, policy, directory, options, copies=2) as building:
        model = write_graph(source, policy, building, options, graph, progress)
        job = Job(
            onnx=building / GRAPH,
            plan=building / PLAN,
            inputs=specs(model.graph.inputs),
            profiles=profiles(source.config, policy, limits, slot_tokens, least_units=1),
        )
        version = _run(job, watch)
        for name in (GRAPH, WEIGHTS):  # the engine holds both
            (building / name).unlink()
        told = TensorRTBuild(
            version=version, plugin_version=None, profiles=job.profiles, aliased=()
        )
        use = f"{PLAN} shows that TensorRT for RTX takes the graph; nothing runs it."
        return write_rest(source, policy, limits, building, options, graph, model, told, use)


def _run(job: Job, watch: Watch) -> str:
    """Build in a process of its own, since TensorRT for RTX ends it in some errors."""
    command = [sys.executable, "-m", "kvsift.builder.targets.rtx_worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stderr is not None
        try:
            worker.stdin.write(job.model_dump_json() + "\n")
            worker.stdin.close()
            for line in worker.stdout:
                told = json.loads(line)
                if "phase" in told:
                    watch(told["phase"], told["done"], told["steps"])
                elif "error" in told:
                    raise EngineError(told["error"])
                else:
                    return str(told["version"])
            words = worker.stderr.read().strip().splitlines()
        except BaseException:
            worker.kill()
            raise
    last = words[-1] if words else "no reason given"
    raise EngineError(f"TensorRT for RTX ended with code {worker.returncode}: {last}")
