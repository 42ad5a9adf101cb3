"""A request and its news: what callers hand to an engine, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsift.builder.errors import UsageError
from kvsift.runtime.params import EvictionParams, SamplingParams, check_integer
from kvsift.runtime.results import GenerationResult


@dataclass(frozen=True)
class Request:
    """A prompt (text, or token ids) with its parameters; UsageError if they are none.

    With a `session_id` the prompt is what is new: it goes on from what that session has said, and
    the first request of an id begins it.
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eviction: EvictionParams = field(default_factory=EvictionParams)
    #: Whether the tokenizer adds its special tokens (False for text from a chat template).
    add_special_tokens: bool = True
    session_id: str | None = None
    #: The turn of the session that the prompt was made for; None: whichever comes next.
    session_turn: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("sampling", SamplingParams), ("eviction", EvictionParams)):
            if not isinstance(given := getattr(self, name), kind):
                raise UsageError(
                    f"{name} must be {kind.__name__}, got {given!r:.60}; write {kind.__name__}(...)"
                )
        if self.session_turn is not None:
            fix = "the first turn is 1; leave it out for whichever is next"
            check_integer("session_turn", self.session_turn, 1, fix)


@dataclass(frozen=True)
class Update:
    """News of request number `index`: new text, and the result when it has finished.

    `token_ids` are the tokens chosen since the last update, in most cases one.
    """

    index: int
    text: str
    result: GenerationResult | None = None
    token_ids: tuple[int, ...] = ()
