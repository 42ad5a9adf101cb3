"""Engines of the TensorRT target on the CPU's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kernel_builds
import pytest
from cpu_device import CpuDevice
from engines import LIMITS, Engines
from plugin_bodies import with_bodies

from kvsift.builder.package import Limits, load_manifest
from kvsift.builder.policies import resolve
from kvsift.builder.targets import tensorrt
from kvsift.builder.targets.common import BuildOptions
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions import tensorrt as sessions
from kvsift.runtime.sizes import slot_tokens


def package(
    engines: Engines,
    directory: Path,
    eviction: str,
    *,
    model: str = "tiny",
    limits: dict[str, Any] | None = None,
    build_options: dict[str, Any] | None = None,
    **policy: Any,
) -> Path:
    """Build what `engines.package` builds, in the TensorRT form and without an engine."""
    dense = load_manifest(engines.package(eviction, model=model, limits=limits, **policy))
    tensorrt.build(
        open_model(engines.model(model)),
        resolve(eviction, **policy),
        Limits(**(LIMITS | (limits or {}))),
        directory,
        BuildOptions(**(build_options or {})),
        slot_tokens(dense),
        onnx_only=True,
    )
    return directory


def cpu_device() -> CpuDevice:
    return CpuDevice(kernel_builds.library("plain"), with_bodies)


@contextmanager
def on_cpu(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[tuple[Engine, CpuDevice]]:
    """Load an engine of the TensorRT target as a user does, the CPU in the place of the GPU."""
    device = cpu_device()
    monkeypatch.setattr(sessions, "open_device", lambda directory: device)
    engine = Engine(directory, **options)
    try:
        yield engine, device
    finally:
        engine.close()
        assert device.released
