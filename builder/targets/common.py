"""What every target does: checks, the graph and its weights, the package around them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    DType,
    Limits,
    Manifest,
    Target,
    TensorRTBuild,
    TensorSpec,
    file_spec,
    new_package,
    write_manifest,
)
from kvsift.builder.policies.base import Policy
from kvsift.builder.weights import WeightSource

FLOATS: dict[DType, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
#: Bytes kept free on the disk beside the package.
DISK_MARGIN = 64 << 20
Progress = Callable[[int], None]
RUN = "Run it: `kvsift generate DIR --prompt TEXT`."


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    `attention` is the form of ONNX Runtime's graph, see `attention.py`; None is the fastest that
    the policy's layout allows. `dtype` is the type of weights, activations and caches.
    `trace_scores` adds the scores of every eviction to the graph's outputs.
    """

    quantize: Quantize = "none"
    attention: AttentionForm | None = None
    dtype: DType = "float32"
    all_logits: bool = False
    trace_scores: bool = False
    seed: int = 0
    force: bool = False


@dataclass(frozen=True)
class Graph:
    """What a target asks of the graph: its form, and the tokens of a static cache."""

    target: Target
    form: AttentionForm
    capacity: int | None = None


def estimate_bytes(
    source: WeightSource, quantize: Quantize = "none", dtype: DType = "float32"
) -> int:
    """Return the bytes of the weight file, to a few per cent: for progress and disk space."""
    item = float(FLOATS[dtype].itemsize)
    per = {"none": item, "int8": 1.125, "int4": 0.625}[quantize]
    total = 0.0
    for name, shape in tensor_shapes(source.config).items():
        size = float(np.prod(shape))
        total += size * (per if len(shape) == 2 and "embed_tokens" not in name else item)
        if "embed_tokens" in name and source.config.tied_embeddings and quantize != "none":
            total += size * per
    return int(total)


@contextmanager
def package(
    source: WeightSource, policy: Policy, directory: Path, options: BuildOptions, copies: int = 1
) -> Iterator[Path]:
    """Yield the directory to write a package into, which appears when the block succeeds.

    `copies` is how many times the weights lie on the disk meanwhile. Raises UsageError when the
    disk is too small or a layer budget is missing, EngineError when writing fails; nothing
    half-made stays behind.
    """
    _check_layers(policy, source.config.num_layers)
    needed = copies * estimate_bytes(source, options.quantize, options.dtype)
    _check_disk(directory, needed)
    try:
        with new_package(directory, options.force) as building:
            yield building
    except OSError as error:
        raise EngineError(f"cannot write {directory}: {error.strerror or error}") from error


def write_graph(
    source: WeightSource,
    policy: Policy,
    building: Path,
    options: BuildOptions,
    graph: Graph,
    progress: Progress | None,
    finish: Callable[[ir.Model], None] | None = None,
) -> ir.Model:
    """Write model.onnx and its weights and return the model; `finish` may change it before.

    `progress` is called with the bytes of each tensor written.
    """
    weights = WeightFile(building / WEIGHTS, progress, FLOATS[options.dtype])
    try:
        decoder = Decoder(
            source,
            policy,
            weights,
            make_linear(options.quantize, weights),
            form=graph.form,
            capacity=graph.capacity,
            all_logits=options.all_logits,
            trace_scores=options.trace_scores,
        )
        model = decoder.build()
    finally:
        weights.close()
    if finish:
        finish(model)
    ir.save(model, building / GRAPH)
    return model


def write_rest(
    source: WeightSource,
    policy: Policy,
    limits: Limits,
    building: Path,
    options: BuildOptions,
    graph: Graph,
    model: ir.Model,
    tensorrt: TensorRTBuild | None = None,
    use: str = RUN,
) -> Manifest:
    """Write tokenizer, README and manifest beside what lies there; `use` says how to go on."""
    source.save_tokenizer(building)
    (building / README).write_text(_readme(policy, limits, graph.target, use), encoding="utf-8")
    files = {p.name: file_spec(p) for p in sorted(building.iterdir())}
    manifest = Manifest(
        kvsift_version=metadata.version("kvsift"),
        target=graph.target,
        attention=graph.form,
        dtype=options.dtype,
        quantize=options.quantize,
        all_logits=options.all_logits,
        trace_scores=options.trace_scores,
        seed=options.seed,
        model=source.config,
        policy=policy,
        limits=limits,
        parameters=sum(int(np.prod(s)) for s in tensor_shapes(source.config).values()),
        inputs=specs(model.graph.inputs),
        outputs=specs(model.graph.outputs),
        tensorrt=tensorrt,
        files=files,
        built_with={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("numpy", "onnx", "onnx-ir")},
        },
    )
    write_manifest(building, manifest)
    return manifest


def specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """Return name, type and shape of graph inputs or outputs."""
    found = []
    for v in values:
        assert v.name is not None
        assert v.dtype is not None
        assert v.shape is not None
        shape = tuple(d if isinstance(d, int) else str(d) for d in v.shape)
        found.append(TensorSpec(name=v.name, dtype=v.dtype.name.lower(), shape=shape))
    return tuple(found)


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


def _readme(policy: Policy, limits: Limits, target: Target, use: str) -> str:
    return (
        f"# kvsift engine\n\nPolicy `{policy.name}`, scorer `{policy.scorer}`, selector "
        f"`{policy.selector}`, density {limits.density:g}, up to {limits.max_input} prompt tokens "
        f"and {limits.max_batch} sequences. Target: {target}.\n\n{use}\n"
    )
