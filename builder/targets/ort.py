"""The ONNX Runtime target: one model.onnx whose kvsift nodes carry their bodies."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx_ir as ir

from kvsift.builder.decoder import Decoder
from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.families import tensor_shapes
from kvsift.builder.linear import Quantize, WeightFile, make_linear
from kvsift.builder.package import (
    GRAPH,
    README,
    WEIGHTS,
    AttentionForm,
    Limits,
    Manifest,
    TensorSpec,
    file_spec,
    new_package,
    write_manifest,
)
from kvsift.builder.policies.base import Policy
from kvsift.builder.weights import WeightSource

#: Bytes kept free on the disk beside the package.
DISK_MARGIN = 64 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    `attention` is the form of the graph, see `attention.py`; None is the fastest that the policy's
    layout allows. `trace_scores` adds the scores of every eviction to the graph's outputs.
    """

    quantize: Quantize = "none"
    attention: AttentionForm | None = None
    all_logits: bool = False
    trace_scores: bool = False
    seed: int = 0
    force: bool = False


def estimate_bytes(source: WeightSource, quantize: Quantize) -> int:
    """Return the bytes of the weight file, to a few per cent: for progress and disk space."""
    per = {"none": 4.0, "int8": 1.125, "int4": 0.625}[quantize]
    total = 0.0
    for name, shape in tensor_shapes(source.config).items():
        size = float(np.prod(shape))
        total += size * (per if len(shape) == 2 and "embed_tokens" not in name else 4.0)
        if "embed_tokens" in name and source.config.tied_embeddings and quantize != "none":
            total += size * per
    return int(total)


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
    _check_layers(policy, source.config.num_layers)
    _check_disk(directory, estimate_bytes(source, options.quantize))
    try:
        with new_package(directory, options.force) as building:
            return _write(source, policy, limits, building, options, progress)
    except OSError as error:
        raise EngineError(f"cannot write {directory}: {error.strerror or error}") from error


def _write(
    source: WeightSource,
    policy: Policy,
    limits: Limits,
    building: Path,
    options: BuildOptions,
    progress: Progress | None,
) -> Manifest:
    form: AttentionForm = options.attention or ("portable" if policy.layout == "head" else "gqa")
    weights = WeightFile(building / WEIGHTS, progress)
    try:
        decoder = Decoder(
            source,
            policy,
            weights,
            make_linear(options.quantize, weights),
            form=form,
            all_logits=options.all_logits,
            trace_scores=options.trace_scores,
        )
        model = decoder.build()
    finally:
        weights.close()
    ir.save(model, building / GRAPH)
    source.save_tokenizer(building)
    (building / README).write_text(_readme(policy, limits), encoding="utf-8")
    files = {p.name: file_spec(p) for p in sorted(building.iterdir())}
    manifest = Manifest(
        kvsift_version=metadata.version("kvsift"),
        target="ort",
        attention=form,
        quantize=options.quantize,
        all_logits=options.all_logits,
        trace_scores=options.trace_scores,
        seed=options.seed,
        model=source.config,
        policy=policy,
        limits=limits,
        parameters=sum(int(np.prod(s)) for s in tensor_shapes(source.config).values()),
        inputs=_specs(model.graph.inputs),
        outputs=_specs(model.graph.outputs),
        files=files,
        built_with={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("numpy", "onnx", "onnx-ir")},
        },
    )
    write_manifest(building, manifest)
    return manifest


def _specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    specs = []
    for v in values:
        assert v.name is not None
        assert v.dtype is not None
        assert v.shape is not None
        shape = tuple(d if isinstance(d, int) else str(d) for d in v.shape)
        specs.append(TensorSpec(name=v.name, dtype=v.dtype.name.lower(), shape=shape))
    return tuple(specs)


def _check_layers(policy: Policy, num_layers: int) -> None:
    weights = policy.layer_budgets
    if isinstance(weights, tuple) and len(weights) != num_layers:
        raise UsageError(
            f"layer_budgets has {len(weights)} weights and the model {num_layers} layers; give "
            "one weight per layer, or pyramid"
        )


def _check_disk(directory: Path, needed: int) -> None:
    parent = directory.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed + DISK_MARGIN:
        raise UsageError(
            f"{directory} needs about {needed >> 20} MiB and the disk has {free >> 20} MiB free; "
            f"free some space or choose another -o"
        )


def _readme(policy: Policy, limits: Limits) -> str:
    return (
        f"# kvsift engine\n\nPolicy `{policy.name}`, scorer `{policy.scorer}`, selector "
        f"`{policy.selector}`, density {limits.density:g}, up to {limits.max_input} prompt tokens "
        f"and {limits.max_batch} sequences.\n\nRun it: `kvsift generate DIR --prompt TEXT`.\n"
    )
