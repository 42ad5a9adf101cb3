"""Results on disk: one JSON line per finished sample, so that a stopped run goes on."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import IO, Any

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime import result_files

if sys.platform != "win32":
    import fcntl

Record = dict[str, Any]


class Store:
    """A JSONL file whose first line holds the settings, each other one finished sample.

    A line cut short by a kill is left out. Nothing is written before the first sample is finished.
    UsageError when the file has other settings, is of another kind or another run writes to it.
    """

    def __init__(self, path: Path, settings: Record) -> None:
        self.path = path
        self.samples: list[Record] = []
        self._settings: Record = json.loads(json.dumps(settings))
        self._file: IO[str] | None = None
        text = _read(path)
        #: Characters that the file had; more later means that somebody else has written to it.
        self._size = len(text)
        self._whole = True
        if not text:
            return
        head, self.samples, self._whole = _parse(path, text)
        head = self._settings if head is None else head
        for key in sorted(self._settings.keys() | head.keys()):
            if self._settings.get(key) != head.get(key):
                raise UsageError(
                    f"{path} was made with {key} = {_short(head.get(key))}, now it is "
                    f"{_short(self._settings.get(key))}; choose another --out"
                )
        with path.open(encoding="utf-8") as file:
            _lock(path, file, alone=False)

    def has(self, kind: str, index: int) -> bool:
        """Whether the sample is finished."""
        return any(s["kind"] == kind and s["index"] == index for s in self.samples)

    def check(self, kind: str, index: int, digest: str) -> None:
        """Raise UsageError if the sample was measured on another text."""
        for sample in self.samples:
            if (sample["kind"], sample["index"]) == (kind, index) and sample.get(
                "digest"
            ) != digest:
                raise UsageError(
                    f"{self.path} was made with another text for {kind} sample {index} "
                    f"({sample.get('source')}); choose another --out"
                )

    def sorted(self) -> list[Record]:
        """Return the finished samples by kind and index."""
        return sorted(self.samples, key=lambda s: (s["kind"], s["index"]))

    def add(self, sample: Record) -> None:
        """Append a finished sample to the file."""
        try:
            if self._file is None:
                self._file = self._begin()
            self._file.write(json.dumps(sample) + "\n")
            self._file.flush()
        except OSError as error:
            raise EngineError(
                f"cannot write {self.path}: {error.strerror}; the same command goes on after the "
                "samples that are finished"
            ) from None
        self.samples.append(sample)

    def close(self) -> None:
        """Let others write to the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take has been told
                file.close()

    def _begin(self) -> IO[str]:
        """Return the file, locked, whose lines are whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._whole:
            lines = [{"settings": self._settings}, *self.samples]
            made = "".join(json.dumps(line) + "\n" for line in lines)
            result_files.write(self.path, made)
            self._size = len(made)
        file = self.path.open("a", encoding="utf-8")
        _lock(self.path, file, alone=True)
        if len(_read(self.path)) != self._size:
            raise _busy(self.path)
        if not self._size:
            file.write(json.dumps({"settings": self._settings}) + "\n")
        return file


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError:
        raise _foreign(path) from None


def _parse(path: Path, text: str) -> tuple[Record | None, list[Record], bool]:
    """Return the settings (None if they were cut), the samples, and whether all lines are whole."""
    lines, bad = [], 0
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            bad += 1
    if not lines and text.startswith('{"settings"'[: len(text)]):
        return None, [], False
    head, samples = lines[0] if lines else None, lines[1:]
    if not isinstance(head, dict) or not isinstance(head.get("settings"), dict):
        raise _foreign(path)
    if not all(isinstance(s, dict) and s.keys() >= {"kind", "index", "runs"} for s in samples):
        raise _foreign(path)
    if bad:
        print(f"{path}: {bad} damaged line left out, measured again", file=sys.stderr)
    return head["settings"], samples, not bad and text.endswith("\n")


def _lock(path: Path, file: IO[str], *, alone: bool) -> None:
    """Let nobody else write to the file as long as it is open; UsageError if somebody does."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(path) from None


def _busy(path: Path) -> UsageError:
    return UsageError(f"another run writes to {path}; wait for it, or choose another --out")


def _foreign(path: Path) -> UsageError:
    return UsageError(f"{path} is no file of results; move it away, or choose another --out")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
