"""Sessions: what a turn has evicted never comes back, and nothing else is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engines, keys_and_values, prompt, request
from kept import POLICIES, engine_of

from kvsift.builder.errors import CapacityError, SessionError, UsageError
from kvsift.runtime.conversation_file import load_conversation, save_conversation
from kvsift.runtime.conversations import Conversations
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.recorder import recording
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.trace import read_trace

#: Prompt and answer lengths of five turns: long, short, of one token, ending in mid-block.
TURNS = [(150, 30), (90, 41), (1, 20), (37, 5), (200, 33)]


def turn(number: int, session: str = "s", **options: Any) -> Request:
    length, answer = TURNS[number]
    asked = {"seed": 7, "density": 0.3} | options
    made = request(prompt(length, seed=number + 1), answer, **asked)
    return replace(made, session_id=session)


def talk(engine: Engine, turns: range, session: str = "s") -> list[GenerationResult]:
    """Run turns one after the other; each session ends where its last turn left it."""
    return [engine.generate([turn(n, session)])[0] for n in turns]


def fresh(engine: Engine) -> Engine:
    """Return the engine without sessions and prefixes of earlier tests."""
    engine.conversations = Conversations()
    return engine


def same_rows(engine: Engine, one: str, other: str) -> None:
    """Assert that two sessions of an engine have said and hold the same, bit for bit."""
    a, b = (engine.conversations.get(name) for name in (one, other))
    portable = engine.manifest.attention == "portable"
    assert a.tokens == b.tokens
    assert a.rows.ids.tolist() == b.rows.ids.tolist()
    assert a.rows.lens.tolist() == b.rows.lens.tolist()
    assert (a.rows.seen, a.rows.steps) == (b.rows.seen, b.rows.steps)
    for x, y in zip(a.rows.layers, b.rows.layers, strict=True):
        assert x.keys() == y.keys()
        for name, array in x.items():
            # The portable form sums over the capacity, which grows from run to run.
            np.testing.assert_allclose(array, y[name], rtol=0, atol=1e-5 * portable)
    if a.rows.queries is not None:
        assert b.rows.queries is not None
        np.testing.assert_allclose(a.rows.queries, b.rows.queries, rtol=0, atol=1e-5 * portable)


@pytest.mark.parametrize("name", ["full", *POLICIES])
def test_five_turns_read_nothing_that_was_evicted(engines: Engines, name: str) -> None:
    """Equal to a run in which every evicted, moved or stale row was filled with NaN."""
    engine = fresh(engines("full") if name == "full" else engine_of(engines, name))
    clean = talk(engine, range(5), "clean")
    engine.cache.poison = engine.scratch.poison = True
    try:
        spoiled = talk(engine, range(5), "spoiled")
    finally:
        engine.cache.poison = engine.scratch.poison = False
    for a, b in zip(clean, spoiled, strict=True):
        assert a.token_ids == b.token_ids
        assert a.kept_tokens == b.kept_tokens
    same_rows(engine, "clean", "spoiled")
    assert [r.session_turn for r in clean] == [1, 2, 3, 4, 5]
    held = engine.conversations.get("clean").rows
    assert held.seen == sum(map(sum, TURNS)) - 1  # the last token is chosen, not read
    assert all(np.isfinite(a).all() for layer in held.layers for a in layer.values())
    if name != "full":
        assert held.steps == sum(r.evictions for r in clean) > 3
        assert held.lens.mean() < held.seen * (1 if name == "nexus-decode" else 0.5)


@pytest.mark.parametrize("name", ["nexus", "nexus-per_head", "adakv-both", "h2o", "nestedkv-both"])
def test_rows_are_those_that_were_written_for_their_positions(engines: Engines, name: str) -> None:
    """Layer 0's keys depend on token and position only, so a dense engine tells what they are."""
    engine = fresh(engine_of(engines, name))
    talk(engine, range(5))
    held = engine.conversations.get("s")
    dense = fresh(engines("full", limits={"max_input": 900}))
    dense.generate([Request(held.tokens[: held.rows.seen], request(1, 0).sampling)])
    keys, values = keys_and_values(dense.cache, 0)
    size = engine.manifest.policy.block_size
    for mine, theirs in (("key", keys[0]), ("value", values[0])):
        array = held.rows.layers[0][mine]
        for head in range(2):
            row = head if held.rows.ids.shape[1] > 1 else 0
            ids = held.rows.ids[0, row]
            ids = ids[ids >= 0]
            assert (np.diff(ids) > 0).all()
            positions = (ids[:, None] * size + np.arange(size)).ravel()
            positions = positions[positions < held.rows.seen]
            assert len(positions) == held.rows.lens[0, head if held.rows.lens.shape[1] > 1 else 0]
            np.testing.assert_allclose(
                array[head, : len(positions)], theirs[head, positions], atol=1e-5
            )


def test_turns_without_eviction_equal_one_long_prompt(engines: Engines) -> None:
    """What a session has said is what the model reads: nothing twice, nothing left out."""
    engine = fresh(engines("full"))
    results = talk(engine, range(4))
    history: list[int] = []
    for number, result in enumerate(results):
        history += prompt(TURNS[number][0], seed=number + 1)
        (whole,) = engine.generate([request(history, TURNS[number][1])])
        assert whole.token_ids == result.token_ids
        assert whole.prompt_tokens == result.prompt_tokens == len(history)
        assert result.cached_tokens == max(0, len(history) - TURNS[number][0] - 1) * (number > 0)
        history += result.token_ids


@pytest.mark.parametrize("first", [150, 277])  # the second one less than a window of queries
@pytest.mark.parametrize("name", [n for n in POLICIES if n != "nexus-decode"])
def test_a_later_turn_evicts_as_one_prompt_does(
    engines: Engines, tmp_path: Path, name: str, first: int
) -> None:
    """Queries, sums and moments of the first turn count in the second one's eviction."""
    engine = fresh(engine_of(engines, name))
    ids = prompt(280, seed=3)
    engine.generate([replace(request(ids[:first], 0, seed=5, density=1.0), session_id="s")])
    assert engine.conversations.get("s").rows.steps == 0
    ask = request(ids[first:], 60, seed=5, density=0.3)
    with recording(engine, tmp_path / "t"):
        (whole,) = engine.generate([replace(ask, prompt=ids)])
        (turn_,) = engine.generate([replace(ask, session_id="s")])
    trace = read_trace(tmp_path / "t")
    assert [r.past for r in trace.requests] == [0, first]
    assert [e.kept for e in trace.of(0)] == [e.kept for e in trace.of(1)]
    assert len(trace.of(0)) > (engine.manifest.policy.scope == "both")
    assert turn_.token_ids == whole.token_ids


@pytest.mark.parametrize(
    "name",
    ["nexus", "h2o", "expected_attention", "morphkv", "nestedkv-both", "adakv-both", "snapkv",
     "nexus-layers", "nexus-decode"],
)  # fmt: skip
def test_a_session_does_not_depend_on_what_runs_beside_it(engines: Engines, name: str) -> None:
    engine = fresh(engine_of(engines, name))
    alone = talk(engine, range(5), "alone")
    others = [request(220, 90, seed=3), request(40, 60, seed=4)]
    with Scheduler(engine) as scheduler:
        busy = []
        for number in range(5):
            tickets = scheduler.submit_all([others[0], turn(number, "busy"), others[1]])
            busy.append(tickets[1].result(120))
            tickets[0].cancel()
    assert [r.token_ids for r in busy] == [r.token_ids for r in alone]
    same_rows(engine, "alone", "busy")


@pytest.mark.parametrize("name", ["nexus", "h2o", "expected_attention", "adakv-both", "morphkv"])
def test_a_saved_session_goes_on(engines: Engines, tmp_path: Path, name: str) -> None:
    engine = fresh(engine_of(engines, name))
    whole = talk(engine, range(5), "whole")
    talk(engine, range(3), "half")
    engine.save_session("half", tmp_path / "half.session")
    assert [p.name for p in tmp_path.iterdir()] == ["half.session"]
    other = Engine(engine.directory, threads=1)
    other.load_session(tmp_path / "half.session", "again")
    engine.conversations.put("again", other.conversations.get("again"))
    same_rows(engine, "half", "again")
    rest = [other.generate([turn(n, "again")])[0] for n in (3, 4)]
    assert [r.token_ids for r in rest] == [r.token_ids for r in whole[3:]]
    engine.conversations.put("again", other.conversations.get("again"))
    same_rows(engine, "whole", "again")


def test_files_of_others_are_refused(engines: Engines, tmp_path: Path) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    talk(engine, range(1))
    file = tmp_path / "s"
    engine.save_session("s", file)
    with pytest.raises(SessionError, match=r"saved by another engine \(policy nexus, package "):
        engine_of(engines, "nexus-topk").load_session(file, "s")
    data = file.read_bytes()
    for damaged in (data[:100], data[: len(data) // 2], b"", b"\0" * 1000):
        file.write_bytes(damaged)
        with pytest.raises(SessionError, match="is no session, or a damaged one"):
            engine.load_session(file, "x")
    with pytest.raises(UsageError, match="there is no session"):
        engine.load_session(tmp_path / "absent", "x")
    with pytest.raises(SessionError, match="no session 'y'; sessions here: 's'"):
        engine.save_session("y", file)
    with pytest.raises(UsageError, match="cannot write the session"):
        engine.save_session("s", tmp_path / "no" / "folder")


def test_a_file_with_wrong_shapes_is_refused(engines: Engines, tmp_path: Path) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    talk(engine, range(1))
    held = engine.conversations.get("s")
    short = tuple({k: a[:, :-1] for k, a in layer.items()} for layer in held.rows.layers)
    wrong = replace(held, rows=replace(held.rows, layers=short))
    save_conversation(tmp_path / "s", wrong, engine.manifest)
    with pytest.raises(SessionError, match=r"is damaged .*key.0 is float32"):
        load_conversation(tmp_path / "s", engine.manifest)


def test_a_busy_session_is_refused_and_freed(engines: Engines) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    with Scheduler(engine) as scheduler:
        first = scheduler.submit(turn(0))
        with pytest.raises(SessionError, match=r"session 's' is busy with an earlier request"):
            scheduler.submit(turn(1))
        first.result(60)
        with pytest.raises(SessionError, match="busy"):
            scheduler.submit_all([turn(1), turn(2)])
        with pytest.raises(UsageError, match="empty prompt"):
            scheduler.submit_all([turn(1), Request("")])
        assert scheduler.submit(turn(1)).result(60).session_turn == 2
    run = engine.run([turn(2)])
    next(run)
    with pytest.raises(SessionError, match="busy"):
        engine.conversations.get("s")
    run.close()
    assert engine.conversations.get("s").turns == 2  # the turn did not end
    (again,) = engine.generate([turn(2)])
    assert again.session_turn == 3


def test_a_cancelled_turn_keeps_what_was_said(engines: Engines) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    with Scheduler(engine) as scheduler:
        scheduler.submit(turn(0)).result(60)
        ticket = scheduler.submit(replace(turn(1), sampling=request(1, 5000).sampling))
        for update in ticket:
            if len(update.text) and update.result is None:
                ticket.cancel()
        said = ticket.result(60)
        assert said.finish_reason == "cancelled"
        held = engine.conversations.get("s")
        assert held.tokens[-len(said.token_ids) :] == said.token_ids
        next_turn = scheduler.submit(turn(2)).result(60)
    assert next_turn.session_turn == 3
    assert next_turn.prompt_tokens == len(held.tokens) + 1


def test_a_turn_that_is_cancelled_before_it_begins_changes_nothing(engines: Engines) -> None:
    engine = fresh(engine_of(engines, "nexus", max_batch=1))
    with Scheduler(engine) as scheduler:
        scheduler.submit(turn(0)).result(60)
        before = engine.conversations.get("s")
        long = scheduler.submit(request(200, 5000))
        waiting = scheduler.submit(turn(1))
        waiting.cancel()
        assert waiting.result(60).finish_reason == "cancelled"
        assert engine.conversations.get("s") is before
        long.cancel()


def test_a_closing_end_token_is_not_repeated(engines: Engines) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    end = engine.manifest.model.eos_token_ids[0]
    (first,) = engine.generate([turn(0)])
    held = engine.conversations.get("s")
    ended = replace(held, tokens=(*held.tokens[:-1], end))
    assert ended.prompt([end, 5, 6], engine.manifest.model) == [*ended.tokens, 5, 6]
    assert held.prompt([end, 5, 6], engine.manifest.model) == [*held.tokens, end, 5, 6]
    assert first.token_ids[-1] != end


def test_seeds_of_turns_are_functions_of_the_first(engines: Engines) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    runs = []
    for session in ("a", "b"):
        first = replace(turn(0, session), sampling=request(1, 20, temperature=1.0).sampling)
        rest = replace(first.sampling, seed=None)
        engine.generate([first])
        runs.append([engine.generate([replace(turn(n, session), sampling=rest)])[0]
                     for n in (1, 2)])  # fmt: skip
        engine.generate([request(20, 3)])  # numbers requests that name no seed
    assert [r.token_ids for r in runs[0]] == [r.token_ids for r in runs[1]]
    assert runs[0][0].seed != runs[0][1].seed
    assert runs[0][0].eviction_seed == runs[0][1].eviction_seed == 1


def test_sessions_end_at_the_models_last_position(engines: Engines) -> None:
    engine = fresh(engines("nexus", model="llama", options={"block_size": 8}))  # 512 positions
    engine.generate([replace(request(400, 60), session_id="s")])
    with pytest.raises(CapacityError, match=r"has 460 tokens, with this turn 520, .* 512 posit"):
        engine.generate([replace(request(60, 10), session_id="s")])
    (last,) = engine.generate([replace(request(40, 100), session_id="s")])
    assert last.finish_reason == "length"
    assert len(last.token_ids) == 12


def test_pins_hold_through_all_turns(engines: Engines) -> None:
    engine = fresh(engine_of(engines, "nexus"))
    engine.generate([turn(0, pin=[(20, 30)], density=0.6)])
    engine.generate([turn(1, density=0.6)])
    engine.generate([turn(4, pin=[(300, 310)])])
    held = engine.conversations.get("s")
    assert held.pins == ((20, 30), (300, 310))
    for row in held.rows.ids.reshape(-1, held.rows.ids.shape[-1]).tolist():
        assert {2, 3, 37, 38} <= set(row)


def test_sessions_expire(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    now = [0.0]
    engine.conversations = Conversations(ttl_s=10, clock=lambda: now[0])
    talk(engine, range(1), "old")
    now[0] = 8.0
    talk(engine, range(1), "new")
    assert engine.conversations.ids() == ["old", "new"]
    now[0] = 11.0
    assert engine.conversations.ids() == ["new"]
    with pytest.raises(SessionError, match="session 'old' is gone: it was not used for 10 s"):
        engine.generate([turn(1, "old")])
    each = engine.conversations.nbytes
    engine.conversations = Conversations(max_bytes=2 * each + 100)
    for name in ("a", "b", "c"):
        talk(engine, range(1), name)
    assert engine.conversations.ids() == ["b", "c"]
    assert engine.conversations.nbytes == 2 * each
    with pytest.raises(SessionError, match=f"'a' is gone: sessions may hold {2 * each + 100} byt"):
        engine.generate([turn(1, "a")])
    engine.conversations.drop("b")
    assert engine.conversations.ids() == ["c"]
    engine.conversations.drop("a")  # the id of one that is gone is free again
    assert talk(engine, range(1), "a")[0].session_turn == 1
    fresh(engine)


@pytest.mark.parametrize("name", ["", "x" * 257, 3, b"x"])
def test_session_ids_are_texts(engines: Engines, name: Any) -> None:
    with pytest.raises(UsageError, match="session_id must be a text of 1 to 256 characters"):
        engine_of(engines, "nexus").generate([replace(request(5), session_id=name)])
