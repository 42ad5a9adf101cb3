"""Traces of engines that are at work, of requests that did not end, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import is_error, kvsift
from engines import Engines, request
from kept import engine_of
from test_trace import replay, trace_of

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime.engine import Engine
from kvsift.runtime.recorder import TraceWriter, listening, recording
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.ticket import Ticket
from kvsift.runtime.trace import ReplayError, read_trace


def answering(scheduler: Scheduler, tokens: int = 20, **options: Any) -> Ticket:
    """Return a request that has said some tokens and goes on."""
    ticket = scheduler.submit(request(200, 700, seed=3, **options))
    for update in ticket:
        if len(ticket.updates) >= tokens or update.result:
            break
    return ticket


def test_a_trace_may_begin_and_end_while_requests_run(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    with Scheduler(engine) as scheduler:
        early = answering(scheduler)
        with recording(engine, tmp_path / "t.jsonl"):
            scheduler.submit(request(300, 60, seed=4)).result(60)
            late = answering(scheduler, density=0.3)
        results = [ticket.result(60) for ticket in (early, late)]
        assert [r.finish_reason for r in results] == ["length"] * 2
        assert scheduler.stats().failed == 0
    trace = read_trace(tmp_path / "t.jsonl")
    assert [len(r.prompt) for r in trace.requests] == [300, 200]
    assert [e.request for e in trace.endings] == [0]
    assert replay(engine, trace).cut == 1


def test_an_engine_has_one_trace_at_a_time(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    with recording(engine, tmp_path / "a.jsonl"):
        for path in ("a.jsonl", "b.jsonl"):
            second = recording(engine, tmp_path / path)
            with pytest.raises(EngineError, match="traced already"):
                second.__enter__()
        engine.generate([request(300, 5)])
    assert len(read_trace(tmp_path / "a.jsonl").evictions) == 1
    assert not (tmp_path / "b.jsonl").exists()


class _Full:
    """A file on a disk that is full."""

    closed = False

    def write(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    flush = close = lambda self: None
    tell = lambda self: 0  # noqa: E731


def test_a_trace_that_cannot_be_written_fails_no_request(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    writer = TraceWriter(tmp_path / "t", engine.manifest)
    writer._file.close()
    writer._file = _Full()  # type: ignore[assignment]
    with listening(engine, writer):
        results = engine.generate([request(300, 40)])
    with pytest.raises(EngineError, match=r"cannot write the trace .*t: No space left on device"):
        writer.close()
    assert len(results[0].token_ids) == 40
    for wrong in ("", "a\0b", None):
        with pytest.raises(UsageError, match="the trace must be a path"):
            TraceWriter(wrong, engine.manifest)  # type: ignore[arg-type]


def test_a_refused_request_leaves_an_older_trace(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    trace_of(engine, old, [request(300, 5)])
    before = old.read_bytes()
    for path in (old, new):
        args = ("generate", engine.directory, "--prompt", "x " * 5000, "--trace", path)
        is_error(kvsift(*args), 2, "shorten it")
    assert old.read_bytes() == before
    assert not new.exists()
    for path in (old, new):
        assert len(trace_of(engine, path, [request(200, 1)]).requests) == 1
    assert trace_of(engine, old, []).requests == []


@pytest.mark.parametrize("tokens", [1, 60])
def test_a_cancelled_request_is_replayed_as_far_as_it_went(
    engines: Engines, tmp_path: Path, tokens: int
) -> None:
    engine = engine_of(engines, "nexus")
    with Scheduler(engine) as scheduler, recording(engine, tmp_path / "t.jsonl"):
        ticket = answering(scheduler, tokens)
        ticket.cancel()
        assert ticket.result(60).finish_reason == "cancelled"
        scheduler.submit(request(150, 50)).result(60)
    trace = read_trace(tmp_path / "t.jsonl")
    checker = replay(engine, trace)
    assert checker.cut == 1
    assert checker.compared == len(trace.evictions) >= 1
    trace.endings[0].token_ids[0] += 1
    with pytest.raises(ReplayError, match="request 0 has another token at place 0"):
        replay(engine, trace)


def test_requests_without_evictions_are_traced_too(engines: Engines, tmp_path: Path) -> None:
    for engine, options in ((engines("full"), {}), (engine_of(engines, "nexus"), {"density": 1.0})):
        trace = trace_of(engine, tmp_path / "t.jsonl", [request(100, 5, **options)])
        assert trace.requests[0].budget_units is None
        assert replay(engine, trace).compared == len(trace.evictions) == 0


EVICTION, REQUEST = 2, 1


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (0, {"layers": "x"}), (0, {"block_size": 0}), (0, {"rows": 0}),
        (REQUEST, {"prompt": "abc"}), (REQUEST, {"request": 7}), (REQUEST, {"sampling": {}}),
        (REQUEST, {"sampling": {"seed": 1, "foo": 2}}),
        (REQUEST, {"sampling": {"seed": 1, "temperature": -1}}),
        (REQUEST, {"eviction": {"eviction_seed": None}}),
        (EVICTION, {"budget": 3}), (EVICTION, {"budget": []}), (EVICTION, {"tokens_seen": "a"}),
        (EVICTION, {"kept": [[["a"]], [[1]]]}), (EVICTION, {"kept": [[[1]]]}),
        (EVICTION, {"kept": [[[10**6]], [[1]]]}), (EVICTION, {"kept": [[[-1]], [[1]]]}),
        (EVICTION, {"coverage": "x"}), (EVICTION, {"coverage": [[0.5]]}),
        (EVICTION, {"request": 3}), (EVICTION, {"phase": "later"}), (EVICTION, {"more": 1}),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(
    engines: Engines, tmp_path: Path, line: int, change: dict[str, Any]
) -> None:
    engine: Engine = engine_of(engines, "nexus")
    trace_of(engine, tmp_path / "t.jsonl", [request(300, 5)])
    events = [json.loads(text) for text in (tmp_path / "t.jsonl").read_text().splitlines()]
    events[line].update(change)
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, events)))
    with pytest.raises(UsageError, match=f"line {line + 1} is no event of a trace"):
        read_trace(tmp_path / "t.jsonl")


def test_what_a_replay_would_ignore_is_refused(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    path = tmp_path / "t.jsonl"
    trace_of(engine, path, [])
    args = ("generate", engine.directory, "--replay", path)
    is_error(kvsift(*args), 2, "holds no request to run again")
    trace_of(engine, path, [request(100, 5)])
    for option in ("--density", "--max-tokens", "--seed", "--budget-tokens"):
        is_error(kvsift(*args, option, "1"), 2, f"leave out {option}")
    assert kvsift(*args, "--threads", 1).exit_code == 0
