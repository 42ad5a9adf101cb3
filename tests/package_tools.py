"""Builds a package from a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import LIMITS
from tiny import write_hf

from kvsift.builder.package import (
    Limits,
    Manifest,
)
from kvsift.builder.policies import resolve
from kvsift.builder.targets.ort import BuildOptions, build
from kvsift.builder.weights import open_model


def make(tmp_path: Path, eviction: str = "nexus", **options: Any) -> Manifest:
    """Build `tmp_path/engine` from a tiny model."""
    model = tmp_path / "model"
    if not model.exists():
        write_hf(model)
    policy, limits = resolve(eviction), Limits(**LIMITS)
    source = open_model(model)
    return build(source, policy, limits, tmp_path / "engine", BuildOptions(**options))
