"""The session that an engine package needs."""

from __future__ import annotations

from pathlib import Path

from kvsift.builder.errors import EngineError
from kvsift.builder.package import Manifest
from kvsift.runtime.sessions import Session


def open_session(directory: Path, manifest: Manifest, threads: int | None = None) -> Session:
    """Load a package's graph or engine; `threads` are those of ONNX Runtime.

    Raises EngineError when this machine cannot run it.
    """
    if manifest.target == "ort":
        from kvsift.runtime.sessions.ort import OrtSession

        return OrtSession(directory, manifest, threads)
    if manifest.target == "tensorrt":
        from kvsift.runtime.sessions.tensorrt import TensorRTSession

        return TensorRTSession(directory, manifest)
    raise EngineError(
        f"{directory} is an engine of the target {manifest.target}, which is there to be built and "
        "inspected, not to be run; rebuild it with --target ort or --target tensorrt"
    )
