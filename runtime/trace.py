"""Traces: which units every eviction kept, as JSON lines, and how two of them differ.

The first line describes the engine; each request then has a line when it begins, one per eviction
and one when it ends. `recorder.py` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from kvsift.builder.errors import KvsiftError, UsageError
from kvsift.builder.package import Manifest, package_hash
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.paths import user_path

#: Raised whenever an older reader could misread a file.
TRACE_VERSION = 1
#: prompt: at a prompt's end; chunk: within a prompt longer than the scratch; decode: in a step.
Phase = Literal["prompt", "chunk", "decode"]
#: Unit ids by layer, row and rank, ascending.
Units = list[list[list[int]]]


class ReplayError(KvsiftError):
    """A replayed run differs from its trace; the message names the first difference."""


@dataclass(frozen=True)
class Header:
    """The engine of a trace: what must agree before two traces can be compared.

    `rows` is the number of kept sets per layer: 1, or the KV heads.
    """

    engine: str
    policy: str
    scope: str
    block_size: int
    layers: int
    rows: int
    kvsift_version: str
    trace_version: int = TRACE_VERSION

    @property
    def shape(self) -> tuple[int, int, int]:
        """Block size, layers and rows: what makes kept sets comparable."""
        return self.block_size, self.layers, self.rows


@dataclass(frozen=True)
class TracedRequest:
    """A request as it began: all that is needed to run it again.

    `prompt` holds the token ids, of which the first `past` came from earlier turns. `sampling` and
    `eviction` are the parameters, with the seeds that it ran with; `budget_units` the mean over
    the layers, None where nothing is evicted.
    """

    request: int
    prompt: list[int]
    past: int
    sampling: dict[str, Any]
    eviction: dict[str, Any]
    budget_units: int | None


@dataclass(frozen=True)
class Eviction:
    """One eviction: the unit ids that it kept, by layer and row, ascending.

    `step` counts the request's evictions from 0, `tokens_seen` its true tokens; `budget` units by
    layer; `coverage` by layer and row, None where the score is no mass. With an engine built with
    --trace-scores, `units` are all units that were there and `scores` their scores.
    """

    request: int
    phase: Phase
    step: int
    seed: int
    tokens_seen: int
    budget: list[int]
    kept: Units
    coverage: list[list[float | None]]
    units: Units | None = None
    scores: list[list[list[float | None]]] | None = None


@dataclass(frozen=True)
class Ending:
    """How a request ended."""

    request: int
    finish_reason: str | None
    token_ids: list[int]


@dataclass
class Trace:
    """A trace in memory, in the order of its lines."""

    header: Header
    requests: list[TracedRequest] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)

    def of(self, request: int) -> list[Eviction]:
        """Return the evictions of a request, in their order."""
        return [e for e in self.evictions if e.request == request]


def header_of(manifest: Manifest) -> Header:
    """Return what a trace says of an engine."""
    model, policy = manifest.model, manifest.policy
    return Header(
        engine=package_hash(manifest),
        policy=policy.name,
        scope=policy.scope,
        block_size=policy.block_size,
        layers=model.num_layers,
        rows=model.num_kv_heads if policy.per_head else 1,
        kvsift_version=manifest.kvsift_version,
    )


def read_trace(path: str | Path) -> Trace:
    """Return the trace in a file; UsageError if it cannot be read or is none.

    A last line that was cut off (its run was killed) is left out.
    """
    path = user_path("the trace", path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the trace {path}: {why}") from None
    trace: Trace | None = None
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            record = _read_event(values.pop("event"), values, trace)
        except (ValueError, KeyError, TypeError, AttributeError):
            if trace is not None and number == len(lines):
                break
            raise UsageError(
                f"{path}, line {number} is no event of a trace; write one with "
                "kvsift generate --trace FILE"
            ) from None
        if trace is None:
            if not isinstance(record, Header) or record.trace_version != TRACE_VERSION:
                raise UsageError(
                    f"{path} does not begin with an engine of trace version {TRACE_VERSION}; "
                    "write it anew with kvsift generate --trace FILE"
                )
            trace = Trace(record)
        elif isinstance(record, Eviction):
            trace.evictions.append(record)
        elif isinstance(record, TracedRequest):
            trace.requests.append(record)
        elif isinstance(record, Ending):
            trace.endings.append(record)
    if trace is None:
        raise UsageError(f"{path} is empty; write a trace with kvsift generate --trace FILE")
    return trace


def header_difference(a: Header, b: Header) -> str | None:
    """Return how two engines differ, None if their traces can be compared."""
    for name in ("policy", "scope", "block_size", "layers", "rows", "engine"):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            if name == "engine":
                return "the packages' hashes differ"
            return f"{name} {mine} against {theirs}"
    return None


def place(event: Eviction) -> str:
    """Return which eviction it is, in words."""
    return (
        f"request {event.request}, eviction {event.step} ({event.phase}, {event.tokens_seen} "
        "tokens seen)"
    )


def difference(a: Eviction, b: Eviction, name_a: str, name_b: str) -> str | None:
    """Return the first difference between two evictions in one line, None if they kept the same."""
    for name in ("request", "step", "phase", "tokens_seen", "seed", "budget"):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            return f"{place(b)}: {name} {mine} {name_a}, {theirs} {name_b}"
    for layer, row, mine, theirs in rows_of(a, b):
        if mine != theirs:
            only = [sorted(set(x) - set(y)) for x, y in ((mine, theirs), (theirs, mine))]
            return (
                f"{place(b)}, layer {layer}, row {row}: only {name_a} {_few(only[0])}; "
                f"only {name_b} {_few(only[1])}"
            )
    return None


def rows_of(a: Eviction, b: Eviction) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yield layer, row and the kept units of both, for two evictions of one engine."""
    for layer, (mine, theirs) in enumerate(zip(a.kept, b.kept, strict=True)):
        for row, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            yield layer, row, x, y


def mean_coverage(event: Eviction) -> float | None:
    """Return the coverage over all layers and rows, None where the score is no mass."""
    shares = [share for layer in event.coverage for share in layer if share is not None]
    return sum(shares) / len(shares) if shares else None


def overlap(a: Eviction, b: Eviction) -> float:
    """Return the kept units in common over those kept by either, mean over layers and rows."""
    shares = [len(set(x) & set(y)) / max(1, len(set(x) | set(y))) for _, _, x, y in rows_of(a, b)]
    return sum(shares) / len(shares)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the first place at which two lists differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


def _few(units: Sequence[int]) -> str:
    """Return the first few units in words."""
    shown = ", ".join(map(str, units[:4])) or "none"
    return f"{shown} and {len(units) - 4} more" if len(units) > 4 else shown


def _read_event(
    kind: str, values: dict[str, Any], trace: Trace | None
) -> Header | TracedRequest | Eviction | Ending:
    """Return an event of a trace that has been read so far; ValueError or TypeError if it is none.

    Types are checked, too, and that kept units are some that were there.
    """
    _KINDS[kind](**values)  # names that are missing or unknown
    record: Header | TracedRequest | Eviction | Ending
    record = TypeAdapter(_KINDS[kind]).validate_python(values)
    if isinstance(record, Header):
        good = min(record.shape) >= 1
    elif trace is None:
        good = True  # the caller tells that it is not the first line's kind
    elif isinstance(record, TracedRequest):
        SamplingParams(**record.sampling), EvictionParams(**record.eviction)
        seeds = (record.sampling.get("seed"), record.eviction.get("eviction_seed"))
        good = record.request == len(trace.requests) and None not in seeds
    else:
        good = 0 <= record.request < len(trace.requests)
        if isinstance(record, Eviction):
            head, there = trace.header, -(-record.tokens_seen // trace.header.block_size)
            good = good and len(record.budget) == head.layers
            for shares in (record.kept, record.coverage):
                good = good and [len(layer) for layer in shares] == [head.rows] * head.layers
            good = good and all(0 <= i < there for layer in record.kept for r in layer for i in r)
    if not good:
        raise ValueError(f"not what the trace's {kind} can be")
    return record


_KINDS: dict[str, type[Header | TracedRequest | Eviction | Ending]] = {
    "engine": Header,
    "request": TracedRequest,
    "eviction": Eviction,
    "end": Ending,
}
