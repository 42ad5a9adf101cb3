"""How a build shows its progress, and how it ends when it is told to."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bars:
    """Shows bytes written, with rate and ETA, then the phases of TensorRT; one at a time.

    `total` bytes are an estimate. Nothing is shown unless stderr is a terminal.
    """

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._shown = self._start(
            DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
        )
        self._task = self._shown.add_task("writing weights", total=total)
        self._phases: dict[str, TaskID] | None = None

    def wrote(self, count: int) -> None:
        """Add `count` bytes."""
        self._shown.advance(self._task, count)

    def phase(self, name: str, done: int, steps: int) -> None:
        """Show how far a phase of TensorRT's build is."""
        if self._phases is None:
            self.stop()
            self._phases = {}
            self._shown = self._start(
                MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            )
        if name not in self._phases:
            self._phases[name] = self._shown.add_task(name)
        self._shown.update(self._phases[name], completed=done, total=steps)

    def stop(self) -> None:
        """End what is shown."""
        if self._phases is None:  # the number of bytes was an estimate
            self._shown.update(self._task, total=self._shown.tasks[0].completed)
        self._shown.stop()

    def _start(self, *figures: ProgressColumn) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), *figures)
        bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        bar.start()
        return bar


@contextmanager
def progress_bars(total: int) -> Iterator[Bars]:
    """Show the progress of a build that writes about `total` bytes of weights."""
    bars = Bars(total)
    try:
        yield bars
    finally:
        bars.stop()


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
