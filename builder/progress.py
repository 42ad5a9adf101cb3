"""How a build shows its progress, and how it ends when it is told to."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes written of `total`, an estimate, with rate and ETA on stderr if a terminal.

    Yields the function to call with each count of bytes written.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("writing weights", total=total)
        yield lambda count: bar.advance(task, count)
        bar.update(task, completed=total)


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the temporary directory goes away with the build."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
