"""What a request may ask for, checked where it enters: sampling and eviction parameters."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from kvsift.builder.errors import UsageError
from kvsift.runtime.seeds import check_seed

INT32_MAX = 2**31 - 1
Span = tuple[int, int]


def _show(value: object) -> str:
    """Return a short one-line form of a refused value."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _set(instance: object, name: str, value: object) -> None:
    """Store a normalised value in a frozen dataclass."""
    object.__setattr__(instance, name, value)


def check_integer(name: str, value: object, low: int, fix: str, high: int | None = None) -> int:
    """Return `value` as an int in [low, high]; UsageError for bool and all that is not integral."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(
            f"{name} must be an integer, got {_show(value)} ({type(value).__name__}); {fix}"
        )
    number = int(value)
    if number < low or (high is not None and number > high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise UsageError(f"{name} must be {allowed}, got {number}; {fix}")
    return number


def _number(name: str, value: object, allowed: str, fix: str) -> float:
    """Return `value` as a float (it may be NaN or infinite); bool and text are refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(
            f"{name} must be a number {allowed}, got {_show(value)} ({type(value).__name__}); {fix}"
        )
    try:
        return float(value)
    except OverflowError:  # an int beyond the largest double; every range ends below it
        return math.inf


def check_in_range(name: str, value: object, inside: str, fix: str) -> float:
    """Return `value` if it lies in the interval written as in "(0, 1]" or "[0, inf)"."""
    number = _number(name, value, f"in {inside}", fix)
    low, high = (float(end) for end in inside[1:-1].split(","))
    above = number > low or (inside[0] == "[" and number == low)
    below = number < high or (inside[-1] == "]" and number == high)
    if not (above and below):  # NaN compares false with everything, so it ends here too
        raise UsageError(f"{name} must be in {inside}, got {number:g}; {fix}")
    return number


def _items(name: str, value: object, kind: str) -> list[object]:
    """Return the elements of a list-like value; None stands for the empty list."""
    if value is None:
        return []
    if (items := listed(value)) is None:
        raise UsageError(
            f"{name} must be a list of {kind}, got {_show(value)} ({type(value).__name__}); "
            "put it in brackets"
        )
    return items


def listed(value: Any) -> list[object] | None:
    """Return the elements of what has an order, None for a text, a mapping, a set, a scalar."""
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        return None
    try:
        return list(value)
    except TypeError:  # no iterable, or an array without dimensions
        return None


def check_text(name: str, text: str) -> str:
    """Return `text`, called `name`; UsageError if UTF-8 cannot write it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is not valid text: character {error.start} is the half code "
            f"{text[error.start]!a}, which no UTF-8 text has; mend its encoding"
        ) from None
    return text


def prompt_ids(prompt: object) -> list[int]:
    """Return a prompt's token ids; UsageError if it is no list of integers."""
    if (items := listed(prompt)) is None:
        raise UsageError(
            f"a prompt must be text or a list of token ids, got {_show(prompt)} "
            f"({type(prompt).__name__}); decode bytes, and give several prompts as a list"
        )
    fix = "give a text, or ids of the model's vocabulary"
    return [check_integer("a token id", i, -INT32_MAX, fix) for i in items]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when generation ends; raises UsageError if out of range.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0 and
    frequency_penalty 0 are off. `bad_words` are texts that must not be generated.
    `logprobs` is the number of alternatives reported beside the chosen token (0: the chosen one
    only, None: nothing). A single `stop` string may be given bare. Lists are kept as tuples.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        fix = "use 0 to read the prompt only"
        _set(self, "max_tokens", check_integer("max_tokens", self.max_tokens, 0, fix))
        fix = "0 is greedy, 0.7 is usual"
        _set(self, "temperature", check_in_range("temperature", self.temperature, "[0, inf)", fix))
        _set(self, "top_k", check_integer("top_k", self.top_k, 0, "use 0 to switch it off"))
        _set(self, "top_p", check_in_range("top_p", self.top_p, "(0, 1]", "use 1 to switch it off"))
        _set(self, "min_p", check_in_range("min_p", self.min_p, "[0, 1]", "use 0 to switch it off"))
        penalty = check_in_range(
            "repetition_penalty", self.repetition_penalty, "(0, inf)", "use 1 to switch it off"
        )
        _set(self, "repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            value = check_in_range(name, getattr(self, name), "[-2, 2]", "use 0 to switch it off")
            _set(self, name, value)
        _set(self, "stop", check_texts("stop", self.stop, "stop string"))
        _set(self, "bad_words", check_texts("bad_words", self.bad_words, "bad word"))
        ids = _items("stop_token_ids", self.stop_token_ids, "token ids")
        fix = "give ids of the model's vocabulary"
        _set(self, "stop_token_ids", tuple(check_integer("stop_token_ids", i, 0, fix) for i in ids))
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(
                f"ignore_eos must be true or false, got {_show(self.ignore_eos)}; "
                "use true to go on past the end-of-text token"
            )
        if self.logprobs is not None:
            fix = "leave it out for no log probabilities"
            _set(self, "logprobs", check_integer("logprobs", self.logprobs, 0, fix))
        if self.seed is not None:
            _set(self, "seed", check_seed("seed", self.seed))


def check_texts(name: str, given: object, kind: str) -> tuple[str, ...]:
    """Return a list of strings, one may be given bare; UsageError for what is empty or no text."""
    items = [given] if isinstance(given, str) else _items(name, given, "strings")
    for item in items:
        if not isinstance(item, str):
            hint = "use stop_token_ids for token ids" if name == "stop" else "give texts"
            raise UsageError(
                f"{name} must be a list of strings, got {_show(item)} ({type(item).__name__}); "
                f"{hint}"
            )
        if not item:
            raise UsageError(f"empty {kind} in {name}; leave it out")
        check_text(f"a {kind}", item)
    return tuple(str(item) for item in items)


@dataclass(frozen=True)
class EvictionParams:
    """How much of the KV cache a request keeps; raises UsageError if out of range.

    None means the engine's own value. `density` is the kept share of the prompt in (0, 1], 1.0
    switches eviction off; `budget_tokens` is an absolute budget instead of it, to which
    `min_budget_tokens` does not apply. `pin` lists token spans [start, end) of the prompt that
    are never evicted. `eviction_seed` is a 64-bit seed; it defaults to the sampling seed.
    `min_coverage` in (0, 1] raises the budget, up to what the slot holds, until every eviction
    keeps that share of the score's mass. `layer_budgets` shares the budget out among the layers:
    "uniform", "pyramid", or one positive weight per layer; `head_budgets` shares each layer's
    among its KV heads, one weight per head. Both need an engine whose rows may differ in length.
    """

    density: float | None = None
    budget_tokens: int | None = None
    min_budget_tokens: int | None = None
    eviction_seed: int | None = None
    pin: Sequence[Span] = ()
    min_coverage: float | None = None
    layer_budgets: Literal["uniform", "pyramid"] | Sequence[float] | None = None
    head_budgets: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.density is not None:
            fix = "0.2 keeps a fifth of the prompt, 1 switches eviction off"
            _set(self, "density", check_in_range("density", self.density, "(0, 1]", fix))
        if self.budget_tokens is not None:
            fix = "give the tokens to keep, or density instead"
            tokens = check_integer("budget_tokens", self.budget_tokens, 1, fix)
            _set(self, "budget_tokens", tokens)
        if self.density is not None and self.budget_tokens is not None:
            raise UsageError(
                f"density {self.density:g} and budget_tokens {self.budget_tokens} exclude each "
                "other; give one of them"
            )
        if self.min_budget_tokens is not None:
            fix = "use 0 for no minimum"
            tokens = check_integer("min_budget_tokens", self.min_budget_tokens, 0, fix)
            _set(self, "min_budget_tokens", tokens)
        if self.eviction_seed is not None:
            _set(self, "eviction_seed", check_seed("eviction_seed", self.eviction_seed))
        _set(self, "pin", tuple(_span(item) for item in _items("pin", self.pin, "spans")))
        if self.min_coverage is not None:
            fix = "0.9 keeps nine tenths of the attention mass"
            _set(
                self,
                "min_coverage",
                check_in_range("min_coverage", self.min_coverage, "(0, 1]", fix),
            )
        rule = self.layer_budgets  # an array must not be compared with a text
        if rule is not None and not (isinstance(rule, str) and rule in ("uniform", "pyramid")):
            _set(self, "layer_budgets", _weights("layer_budgets", self.layer_budgets))
        if self.head_budgets is not None:
            _set(self, "head_budgets", _weights("head_budgets", self.head_budgets))


def _weights(name: str, given: object) -> tuple[float, ...]:
    """Return positive weights of layers or heads, as they share out a budget."""
    fix = "give one weight each, such as 3, 2, 1"
    items = _items(name, given, "positive weights")
    if not items:
        raise UsageError(f"{name} is empty; {fix}")
    weights = tuple(check_in_range(name, item, "(0, inf)", fix) for item in items)
    if not math.isfinite(sum(weights)):
        raise UsageError(f"{name} must have a finite sum, got {_show(weights)}; {fix}")
    return weights


def _span(item: object) -> Span:
    """Return one pinned span (start, end); UsageError if it is no pair or empty."""
    fix = "give spans of token positions as (start, end) with start < end"
    pair = _items("pin", item, "(start, end) spans")
    if len(pair) != 2:
        raise UsageError(f"pin must be a list of (start, end), got {_show(item)}; {fix}")
    start, end = (check_integer("pin", value, 0, fix, INT32_MAX) for value in pair)
    if start >= end:
        raise UsageError(f"pin must have start < end, got ({start}, {end}); {fix}")
    return start, end
