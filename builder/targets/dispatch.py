"""Which target a build is for, and the call of it."""

from __future__ import annotations

import shlex
from pathlib import Path

from kvsift.builder import plugin_library
from kvsift.builder.errors import UsageError, unknown_name
from kvsift.builder.package import DType, Limits, Manifest, Target
from kvsift.builder.policies.base import Policy
from kvsift.builder.targets import ort, rtx, tensorrt
from kvsift.builder.targets.common import BuildOptions, Progress
from kvsift.builder.targets.job import Watch
from kvsift.builder.weights import WeightSource

#: The type of weights, activations and caches that a target takes if none is given.
DTYPES: dict[Target, DType] = {
    "ort": "float32",
    # The models' own; matrix products in it always add in float32.
    "tensorrt": "bfloat16",
    "tensorrt-rtx": "bfloat16",
}


def choose(name: str, options: BuildOptions, onnx_only: bool = False) -> Target:
    """Return the target called `name`; for auto TensorRT where it can be built, else ort.

    Raises UsageError for an unknown name, or `onnx_only` with another target than TensorRT.
    """
    targets = {target: target for target in DTYPES}
    if name == "auto":
        usable = onnx_only or tensorrt.can_build(options)
        return "tensorrt" if usable else "ort"
    if name not in targets:
        raise unknown_name("target", name, ("auto", *targets))
    if onnx_only and name != "tensorrt":
        raise UsageError(f"--onnx-only is for --target tensorrt, got {name}; leave out one of them")
    return targets[name]


def build(
    target: Target,
    source: WeightSource,
    policy: Policy,
    limits: Limits,
    directory: Path,
    options: BuildOptions,
    slot_tokens: int,
    *,
    onnx_only: bool,
    progress: Progress,
    watch: Watch,
) -> Manifest:
    """Write the engine package and return its manifest; parameters as `tensorrt.build`."""
    if target == "ort":
        return ort.build(source, policy, limits, directory, options, progress)
    common = (source, policy, limits, directory, options, slot_tokens)
    if target == "tensorrt-rtx":
        return rtx.build(*common, progress=progress, watch=watch)
    return tensorrt.build(*common, onnx_only=onnx_only, progress=progress, watch=watch)


def next_command(directory: Path) -> str:
    """Return the command that makes the engine of an `onnx_only` package."""
    library = f"{plugin_library.VARIABLE}=/path/to/{plugin_library.NAME}"
    return f"{library} sh {shlex.quote(str(directory / tensorrt.SCRIPT))}"
