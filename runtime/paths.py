"""Paths as users give them, and files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsift.builder.errors import UsageError


def user_path(name: str, given: object) -> Path:
    """Return a path with ~ expanded; UsageError if `given`, called `name`, is none."""
    fix = "give the path of a file or directory"
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str):
        raise UsageError(
            f"{name} must be a path, got {given!r:.60} ({type(given).__name__}); {fix}"
        )
    text = os.fspath(given)
    if not text or "\0" in text:
        raise UsageError(f"{name} must be a path, got {text!r:.60}; {fix}")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        raise UsageError(f"{name} {text!r:.60} names no home directory; write it out") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give an empty file beside `path` that takes its place at the end, and is gone on any error.

    OSError where that fails; only its owner may read it, unless `path`'s writer changes that.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
