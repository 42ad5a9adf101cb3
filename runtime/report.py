"""The table at the end of a build: what was written and what it takes to run it."""

from __future__ import annotations

from pathlib import Path

from kvsift.builder.package import Manifest
from kvsift.runtime import console
from kvsift.runtime.sizes import sizes


def print_report(directory: Path, manifest: Manifest, target: str, memory: int | None) -> None:
    """Print parameters, files and memory of a new engine; `memory` bytes for KV caches: what fits.

    Without it, all that is free on this machine counts.
    """
    size, limits = sizes(manifest), manifest.limits
    free = memory
    if free is None and (found := console.available_memory()) is not None:
        free = max(0, found - size.weights)
    where = (
        "in the memory given" if memory is not None else "in the memory that the weights leave here"
    )
    text = console.size_text
    rows = [
        ["target", target],
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
