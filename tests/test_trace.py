"""Traces tell what evictions kept; a replay finds the first difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import is_error, kvsift
from engines import Engines, request, run_and_inspect
from kept import POLICIES, engine_of

from kvsift.builder.errors import UsageError
from kvsift.runtime.engine import Engine
from kvsift.runtime.recorder import listening, recording
from kvsift.runtime.replay import Replay
from kvsift.runtime.trace import ReplayError, Trace, read_trace
from kvsift.runtime.trace_plot import kept_shares

REQUESTS = [request(300, 90, seed=3), request(180, 70, seed=4), request(40, 5, seed=5)]


def trace_of(engine: Engine, path: Path, requests: Any = REQUESTS) -> Trace:
    with recording(engine, path):
        engine.generate(requests)
    return read_trace(path)


def replay(engine: Engine, trace: Trace) -> Replay:
    checker = Replay(trace, engine.manifest)
    with listening(engine, checker):
        for again in checker.requests():
            engine.generate([again])
    return checker


@pytest.mark.parametrize("name", ["nexus", "nexus-per_head", "h2o", "adakv-both", "nexus-layers"])
def test_a_trace_holds_every_kept_set(engines: Engines, tmp_path: Path, name: str) -> None:
    engine = engine_of(engines, name)
    inspected = run_and_inspect(engine, REQUESTS)
    trace = trace_of(engine, tmp_path / "t.jsonl")
    assert engine.recorder is None
    assert [len(r.prompt) for r in trace.requests] == [300, 180, 40]
    for number, seen in enumerate(inspected):
        events = trace.of(number)
        assert [e.step for e in events] == list(range(len(seen.kept)))
        assert [e.tokens_seen for e in events] == seen.seen
        assert [e.phase for e in events][:1] == ["prompt"] * bool(events)
        for event, ids in zip(events, seen.kept, strict=True):
            rows = [np.sort(row[row >= 0]).tolist() for row in ids.reshape(-1, ids.shape[-1])]
            assert [row for layer in event.kept for row in layer] == rows
        assert seen.result is not None
        coverages = [np.nan_to_num(np.array(e.coverage, float)).mean() for e in events]
        np.testing.assert_allclose(coverages, np.nan_to_num(seen.result.coverages), rtol=1e-6)
        ending = next(e for e in trace.endings if e.request == number)
        assert tuple(ending.token_ids) == seen.result.token_ids


@pytest.mark.parametrize("name", ["nexus", "random", "nestedkv-both", "morphkv", "nexus-layers"])
def test_a_replay_is_equal(engines: Engines, tmp_path: Path, name: str) -> None:
    """Traced in a batch, replayed alone: neither batch nor slot is part of a choice."""
    engine = engine_of(engines, name)
    trace = trace_of(engine, tmp_path / "t.jsonl")
    assert replay(engine, trace).compared == len(trace.evictions) > 2


def test_a_replay_stops_at_the_first_difference(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    trace = trace_of(engine, tmp_path / "t.jsonl")
    third = trace.of(0)[2]
    third.kept[1][0][3] += 1000
    with pytest.raises(
        ReplayError, match=r"request 0, eviction 2 \(decode, .*layer 1, row 0: only"
    ):
        replay(engine, trace)
    assert engine.recorder is None
    trace = read_trace(tmp_path / "t.jsonl")
    trace.evictions.remove(trace.of(0)[-1])
    with pytest.raises(ReplayError, match="is not in the trace"):
        replay(engine, trace)
    trace = read_trace(tmp_path / "t.jsonl")
    trace.endings[-1].token_ids[7] += 1
    with pytest.raises(ReplayError, match="another token at place 7"):
        replay(engine, trace)
    other = engine_of(engines, "nexus-topk")
    with pytest.raises(UsageError, match="made by another engine: the packages' hashes differ"):
        replay(other, read_trace(tmp_path / "t.jsonl"))


def test_a_seed_that_is_not_the_traced_one_is_found(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus")
    trace = trace_of(engine, tmp_path / "t.jsonl", REQUESTS[:1])
    trace.requests[0].eviction["eviction_seed"] = 4
    with pytest.raises(ReplayError, match=r"eviction 0 .*: seed 4 replayed, 3 traced"):
        replay(engine, trace)


@pytest.mark.parametrize("name", ["nexus", "nexus-per_head", "knorm", "random"])
def test_scores_are_traced_and_change_nothing(engines: Engines, tmp_path: Path, name: str) -> None:
    plain = engine_of(engines, name)
    scored = engine_of(engines, name, build_options={"trace_scores": True})
    (a,) = run_and_inspect(plain, REQUESTS[:1])
    (b,) = run_and_inspect(scored, REQUESTS[:1])
    assert a.tokens == b.tokens
    assert a.kept_sets() == b.kept_sets()
    assert all(e.scores is None for e in trace_of(plain, tmp_path / "p.jsonl").evictions)
    for event in trace_of(scored, tmp_path / "s.jsonl").evictions:
        assert event.units is not None
        assert event.scores is not None
        assert np.shape(event.scores) == np.shape(event.units)
        for kept, units in zip(event.kept, event.units, strict=True):
            assert all(set(x) <= set(y) for x, y in zip(kept, units, strict=True))
        if name == "knorm":  # top-k by the score: nothing kept scores below what was dropped
            score = np.array(event.scores)
            stays = np.array([[np.isin(u, k) for u, k in zip(us, ks, strict=True)]
                              for us, ks in zip(event.units, event.kept, strict=True)])  # fmt: skip
            newest = event.tokens_seen - 1
            forced = np.array(event.units) == newest
            worst = np.where(stays & ~forced, score, np.inf).min()
            assert worst >= np.where(stays, -np.inf, score).max(axis=-1).min()


def test_trace_commands(engines: Engines, tmp_path: Path) -> None:
    package = engines.package("nexus", **POLICIES["nexus"])
    args = ("--prompt", "the rain in spain " * 30, "--max-tokens", "60", "--ignore-eos")
    args += ("--min-budget-tokens", "0")
    for name, seed in (("a", 1), ("b", 2)):
        done = kvsift(
            "generate", package, *args, "--seed", seed, "--trace", tmp_path / f"{name}.jsonl"
        )
        assert done.exit_code == 0, done.output
    shown = kvsift("trace", "show", tmp_path / "a.jsonl")
    assert shown.exit_code == 0, shown.output
    events = read_trace(tmp_path / "a.jsonl").evictions
    assert shown.stdout.count("decode") == len(events) - 1
    picture = tmp_path / "a.png"
    assert kvsift("trace", "plot", tmp_path / "a.jsonl").exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    same = kvsift("trace", "diff", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert same.exit_code == 0
    assert f"all {len(events)} evictions" in same.stdout
    other = kvsift("trace", "diff", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert other.exit_code == 1
    assert "first difference: request 0, eviction 0" in other.stdout
    again = kvsift("generate", package, "--replay", tmp_path / "a.jsonl")
    assert again.exit_code == 0, again.output
    assert f"all {len(events)} evictions equal" in again.stdout
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    kept = lines[3]["kept"][0][0]
    kept[-2] = next(i for i in range(kept[-1]) if i not in kept)
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    is_error(
        kvsift("generate", package, "--replay", tmp_path / "c.jsonl"), 1, "request 0, eviction"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("hello", "line 1 is no event of a trace"),
        ('{"event":"end","request":0,"finish_reason":"stop","token_ids":[]}', "does not begin"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t").write_text(text)
    is_error(kvsift("trace", "show", tmp_path / "t"), 2, words)
    is_error(kvsift("trace", "show", tmp_path / "absent"), 2, "cannot read the trace")


def test_a_line_that_was_cut_off_is_left_out(engines: Engines, tmp_path: Path) -> None:
    trace = trace_of(engine_of(engines, "nexus"), tmp_path / "t.jsonl")
    text = (tmp_path / "t.jsonl").read_text()
    (tmp_path / "t.jsonl").write_text(text[:-40])
    assert read_trace(tmp_path / "t.jsonl") == replace(trace, endings=trace.endings[:-1])


def test_the_picture_counts_what_is_kept(engines: Engines, tmp_path: Path) -> None:
    engine = engine_of(engines, "nexus-per_head")
    events = trace_of(engine, tmp_path / "t.jsonl", REQUESTS[:1]).of(0)
    steps, layers = kept_shares(events, 8)
    rows = [row for layer in events[-1].kept for row in layer]
    for unit in range(steps.shape[1]):
        assert steps[-1, unit] == pytest.approx(np.mean([unit in row for row in rows]))
    assert np.isnan(steps[0, -1])
    assert layers.sum() * 2 == pytest.approx(sum(map(len, rows)))  # two heads of a layer
