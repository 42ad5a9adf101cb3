"""The model's configuration file, and the settings of the runtime inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvsift.builder.errors import UsageError
from kvsift.runtime.triton.fields import INPUTS, OUTPUTS, Field

#: Name of the engine's folder inside the model's version folder.
ENGINE_FOLDER = "engine"


@dataclass(frozen=True)
class Settings:
    """What the model reads from `parameters`; None is the engine's or the runtime's default.

    `engine_dir` is relative to the version folder. `max_batch` sequences run at a time, or as many
    as fit in `kv_memory` bytes; `max_queue` requests may wait. Sessions between turns take up to
    `session_memory` bytes, each for `session_ttl` seconds.
    """

    engine_dir: str = ENGINE_FOLDER
    max_batch: int | None = None
    kv_memory: int | None = None
    threads: int | None = None
    max_queue: int = 256
    session_memory: int | None = None
    session_ttl: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Return the settings of a parsed configuration; UsageError if one is no integer."""
        given = {
            name: entry["string_value"]
            for name, entry in config.get("parameters", {}).items()
            if name in {field.name for field in fields(cls)} and entry["string_value"]
        }
        values: dict[str, Any] = {}
        for name, text in given.items():
            try:
                values[name] = text if name == "engine_dir" else int(text)
            except ValueError:
                raise UsageError(
                    f"parameter {name} in config.pbtxt must be an integer, got {text!r}"
                ) from None
        return cls(**values)


def config_text(name: str, settings: Settings, batched: bool) -> str:
    """Return config.pbtxt; with `batched` shapes are [1, n], else [n]."""
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        "# One prompt a request: the runtime batches across requests.",
        f"max_batch_size: {int(batched)}",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
        "input [",
        *_tensors(INPUTS, " optional: true"),
        "]",
        "output [",
        *_tensors(OUTPUTS, ""),
        "]",
    ]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            lines.append(
                f'parameters {{ key: "{field.name}" value: {{ string_value: "{value}" }} }}'
            )
    return "\n".join(lines) + "\n"


def _tensors(table: tuple[Field, ...], more: str) -> list[str]:
    rows = [
        f'  {{ name: "{f.name}" data_type: TYPE_{f.dtype} dims: [ {f.dims} ]{more} }}'
        for f in table
    ]
    return [f"{row}," for row in rows[:-1]] + rows[-1:]
