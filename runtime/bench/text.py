"""The prompt of the benchmarks: prose that comes with Python itself."""

from __future__ import annotations

import itertools
import pydoc_data.topics
from pathlib import Path

from tokenizers import Tokenizer

from kvsift.builder.errors import PackageError

#: Characters that are enough for a token in every known tokenizer.
CHARACTERS_PER_TOKEN = 8


def prompt(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Return the first `tokens` token ids of Python's language reference, repeated if too short."""
    pieces: list[str] = []
    size = 0
    for topic in itertools.cycle(pydoc_data.topics.topics.values()):
        pieces.append(topic)
        size += len(topic)
        if size >= CHARACTERS_PER_TOKEN * tokens:
            break
    ids: list[int] = tokenizer.encode("\n".join(pieces), add_special_tokens=False).ids
    return ids[:tokens]


def prompt_of(directory: Path, tokens: int) -> list[int]:
    """Return the same for the tokenizer of a package."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise PackageError(f"{directory} is no engine: it has no tokenizer.json")
    return prompt(Tokenizer.from_file(str(path)), tokens)
