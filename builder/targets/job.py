"""What is given to the module that builds a TensorRT engine, also when it is another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvsift.builder.package import Profile, TensorSpec

#: Called with the phase of the build that runs, its steps done and their number.
Watch = Callable[[str, int, int], None]


class Job(BaseModel):
    """Files, inputs and profiles; with plugins also their library and what they write in place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    onnx: Path
    plan: Path
    inputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    aliased: tuple[tuple[str, str], ...] = ()
    library: Path | None = None
    timing_cache: Path | None = None
