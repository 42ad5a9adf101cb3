"""The evaluation engines and one eviction model per variant: all that evaluation builds.

Every engine's own policy never evicts here: it only says what the graph remembers, which is what
any policy may read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

import kvsift
from kvsift.builder.errors import CapacityError, PackageError, UsageError
from kvsift.builder.eviction_model import eviction_model
from kvsift.builder.families import tensor_shapes
from kvsift.builder.package import Limits, ModelConfig, Policy, file_spec, load_manifest
from kvsift.builder.policies import resolve
from kvsift.builder.states import STATES
from kvsift.builder.targets.ort import BuildOptions, build
from kvsift.builder.weights import WeightSource, default_model, open_model
from kvsift.runtime import result_files
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.variants import Spec, Variant

#: Newest queries that the evaluation engines hold: no preset reads more.
WINDOW = 64
#: First tokens that the query statistics leave out: those of expected_attention.
SINKS = 4


def reader(selector: str = "topk") -> Policy:
    """Return the policy of an evaluation engine: a window of all heads, and every state."""
    options = {"window": WINDOW, "head_reduce": "per_head"}
    policy = resolve("nexus", selector=selector, options=options)
    return policy.model_copy(update={"states": tuple(STATES), "sink_units": SINKS})


def prepare(
    out: Path,
    model: Path | None,
    capacity: int,
    specs: Sequence[Spec],
    threads: int = 0,
    slots: int = 1,
) -> tuple[Lab, list[Variant]]:
    """Return the lab over the engines in `out`, built if they are not there, and the variants.

    `capacity`: tokens of the longest sequence; `slots`: sequences that decode together. The
    second engine, whose heads differ in length, is made only if a variant needs it.
    """
    path = default_model() if model is None else model
    source = open_model(path)
    if capacity > source.config.max_positions:
        raise CapacityError(
            f"a sample may have {capacity} tokens and the model has {source.config.max_positions} "
            "positions; ask for shorter or fewer parts"
        )
    variants = [make_variant(source.config, spec) for spec in specs]
    uneven = any(v.policy.evicts and not v.policy.shared_lens for v in variants)
    note, found = out / "model.sha256", fingerprint(path)
    if note.is_file() and note.read_text(encoding="utf-8").split() != [found]:
        raise UsageError(f"{out} holds engines of another model than {path}; choose another --out")
    engine = _obtain(source, out / "engine", reader())
    heads = _obtain(source, out / "engine-heads", reader("head_topk")) if uneven else None
    if not note.is_file():
        result_files.write(note, found + "\n")
    return Lab(engine, capacity, threads or None, heads=heads, slots=slots), variants


def make_variant(config: ModelConfig, spec: Spec) -> Variant:
    """Return a spec's resolved policy with its eviction model."""
    policy = resolve(
        spec.eviction,
        selector=spec.selector,
        scope=spec.scope,
        options=dict(spec.options) or None,
    )
    if not policy.evicts:
        return Variant(spec, policy, None)
    made = ir.to_proto(eviction_model(config, policy))
    return Variant(spec, policy, made.SerializeToString())


def tensors(model: Path | None) -> dict[str, NDArray[np.float32]]:
    """Return every weight of a model under its Hugging Face name."""
    source = open_model(default_model() if model is None else model)
    return {name: source.tensor(name) for name in tensor_shapes(source.config)}


def recorded(lab: Lab, variants: Sequence[Variant]) -> dict[str, Any]:
    """Return what else must be equal for results to belong together."""
    return {
        "kvsift": kvsift.__version__,
        "onnxruntime": ort.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "weights": lab.manifest.files["model.data"].sha256[:16],
        "variants": {v.name: v.policy.model_dump() for v in variants},
    }


def fingerprint(model: Path) -> str:
    """Return a sha256 in hex over the files of a model that engines are made of."""
    files = [model] if model.is_file() else sorted(p for p in model.iterdir() if p.is_file())
    used = [p for p in files if p == model or p.suffix in (".json", ".safetensors", ".jinja")]
    digest = hashlib.sha256()
    for file in used:
        digest.update(f"{file.name if file != model else ''} {file_spec(file).sha256}\n".encode())
    return digest.hexdigest()


def _obtain(source: WeightSource, directory: Path, policy: Policy) -> Path:
    try:
        found = load_manifest(directory)
    except PackageError:
        found = None
    if found is not None and found.model != source.config:
        raise UsageError(f"{directory} is of another model; choose another --out")
    if found is None or found.policy != policy or not found.all_logits:
        print(f"building the evaluation engine in {directory}", file=sys.stderr)
        positions = source.config.max_positions
        limits = Limits(
            max_input=positions - 1, max_output=1, max_batch=1, density=0.2, max_density=1.0
        )
        build(source, policy, limits, directory, BuildOptions(all_logits=True, force=True))
    return directory
