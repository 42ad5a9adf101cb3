"""Files of results: checked before a long run, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvsift.builder.errors import UsageError
from kvsift.runtime.paths import replacing


def file_option(path: Path | None) -> Path | None:
    """Return the path of a file for later; UsageError if it could not be written."""
    if path is not None:
        if path.is_dir():
            raise UsageError(f"{path} is a directory; give the path of a file")
        if not path.parent.is_dir():
            raise UsageError(f"the directory {path.parent} does not exist; make it first")
        _check_writable(path.parent)
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="File for the results, as JSON.", callback=file_option),
]


def folder_option(path: Path) -> Path:
    """Return the path of a directory, there or not; UsageError if nothing could be put there."""
    found = path.absolute()
    while not found.exists():
        found = found.parent
    if not found.is_dir():
        raise UsageError(f"{found} is a file; give a directory as --out")
    _check_writable(found)
    return path


def write(path: Path, text: str) -> None:
    """Write a text file; on any failure what was there stays."""
    with replacing(path) as made:
        made.write_text(text, encoding="utf-8")
        made.chmod(0o644)


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} cannot be written to; choose another directory")
