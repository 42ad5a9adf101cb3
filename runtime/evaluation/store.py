"""Results on disk: one JSON line per finished sample, so that a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsift.builder.errors import UsageError

Record = dict[str, Any]


class Store:
    """A JSONL file whose first line holds the settings, each other one finished sample.

    A line cut short by a kill is dropped. UsageError when the file has other settings.
    """

    def __init__(self, path: Path, settings: Record) -> None:
        self.path = path
        self.samples: list[Record] = []
        settings = json.loads(json.dumps(settings))
        lines = list(_lines(path)) if path.exists() else []
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
            return
        found = lines[0].get("settings", {})
        for key in sorted(settings.keys() | found.keys()):
            if settings.get(key) != found.get(key):
                raise UsageError(
                    f"{path} was made with {key} = {_short(found.get(key))}, now it is "
                    f"{_short(settings.get(key))}; choose another --out"
                )
        self.samples = lines[1:]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")

    def has(self, kind: str, index: int) -> bool:
        """Whether the sample is finished."""
        return any(s["kind"] == kind and s["index"] == index for s in self.samples)

    def sorted(self) -> list[Record]:
        """Return the finished samples by kind and index."""
        return sorted(self.samples, key=lambda s: (s["kind"], s["index"]))

    def add(self, sample: Record) -> None:
        """Append a finished sample to the file."""
        self.samples.append(sample)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample) + "\n")


def _lines(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
