"""The table at the end of a build: what was written and what it takes to run it."""

from __future__ import annotations

from pathlib import Path

from kvsift.builder.package import Manifest
from kvsift.runtime import console
from kvsift.runtime.sizes import sizes


def print_report(
    directory: Path, manifest: Manifest, target: str, memory: int | None, seconds: float
) -> None:
    """Print parameters, files and memory of a new engine, which was built in `seconds`.

    `memory` bytes for KV caches decide what fits. Without it, all that is free on this machine
    counts, if the engine runs in its memory.
    """
    size, limits = sizes(manifest), manifest.limits
    free = memory
    if free is None and manifest.target == "ort" and (found := console.available_memory()):
        free = max(0, found - size.weights)
    where = (
        "in the memory given" if memory is not None else "in the memory that the weights leave here"
    )
    text = console.size_text
    rows = [
        ["target", _made_with(manifest, target)],
        ["built in", f"{seconds:.1f} s"],
        ["policy", f"{manifest.policy.name}, density {limits.density:g}"],
        ["parameters", f"{manifest.parameters:,}"],
        *([name, text(file.bytes)] for name, file in manifest.files.items()),
        ["prompt, answer, batch", f"{limits.max_input}, {limits.max_output} tokens, "
         f"{limits.max_batch} sequences"],
        ["KV per sequence, dense", text(size.dense)],
        ["KV per sequence, evicted", text(size.slot)],
        ["scratch, once per engine", text(size.scratch)],
    ]  # fmt: skip
    if free is not None:
        fit = f"{size.sequences(free)} (dense: {size.sequences(free, dense=True)})"
        rows.append(["sequences that fit", f"{fit} {where}, {text(free)}"])
    console.print_table(str(directory), ["", ""], rows)


def _made_with(manifest: Manifest, target: str) -> str:
    """Return the target with TensorRT's version and GPU, where an engine was built."""
    built = manifest.tensorrt
    parts = [part for part in (built.version, built.gpu) if part] if built else []
    return f"{target}, {', '.join(parts)}" if parts else f"{target}, {manifest.dtype}"
