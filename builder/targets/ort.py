"""The ONNX Runtime target: one model.onnx whose kvsift nodes carry their bodies."""

from __future__ import annotations

from pathlib import Path

from kvsift.builder.errors import UsageError
from kvsift.builder.package import AttentionForm, Limits, Manifest
from kvsift.builder.policies.base import Policy
from kvsift.builder.targets.common import (
    BuildOptions,
    Graph,
    Progress,
    estimate_bytes,
    package,
    write_graph,
    write_rest,
)
from kvsift.builder.weights import WeightSource

__all__ = ["BuildOptions", "build", "estimate_bytes"]


def build(
    source: WeightSource,
    policy: Policy,
    limits: Limits,
    directory: Path,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the engine package and return its manifest.

    `progress` is called with the bytes of each tensor written. Raises UsageError when the disk is
    too small, EngineError when writing fails; nothing half-made stays behind.
    """
    options = options or BuildOptions()
    if options.dtype != "float32":
        raise UsageError(
            f"--dtype {options.dtype} needs --target tensorrt: on the CPU ONNX Runtime computes in "
            "float32; leave out --dtype"
        )
    form: AttentionForm = options.attention or ("portable" if policy.layout == "head" else "gqa")
    graph = Graph("ort", form)
    with package(source, policy, directory, options) as building:
        model = write_graph(source, policy, building, options, graph, progress)
        return write_rest(source, policy, limits, building, options, graph, model)
