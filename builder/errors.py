"""Errors that a user can act on: what happened, the value, what is allowed, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvsiftError(Exception):
    """Base of every error that kvsift raises on purpose; the message is one line."""


class UsageError(KvsiftError, ValueError):
    """A value or option given by the user is outside what is allowed (exit code 2)."""


class ModelError(KvsiftError):
    """The model directory or GGUF file is missing a part, damaged or unsupported."""


class PackageError(KvsiftError):
    """The engine package is missing, damaged, or was made by an incompatible version."""


class EngineError(KvsiftError, RuntimeError):
    """The engine cannot run here or failed while running."""


class CapacityError(UsageError):
    """A request needs more cache, positions or slots than the engine was built with."""


class QueueFullError(KvsiftError):
    """A scheduler has as many waiting requests as it may hold; try again later."""


class SessionError(UsageError):
    """A session is busy, was dropped, or belongs to another engine."""


def unknown_name(kind: str, value: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the known ones and the nearest of them."""
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {value!r}; known: {', '.join(names)}{hint}")
