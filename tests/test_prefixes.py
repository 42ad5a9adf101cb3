"""Shared prefixes: read once, reused before anything is evicted, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engines import Engines, prompt, request, run_and_inspect
from kept import POLICIES, engine_of

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.prefixes import Prefixes
from kvsift.runtime.scheduler import Scheduler

PREFIX = prompt(150, seed=9)


def after(count: int, seed: int, answer: int = 40) -> Request:
    return request([*PREFIX, *prompt(count, seed)], answer, seed=seed)


def with_prefixes(engine: Engine) -> Prefixes:
    """Give an engine empty prefixes."""
    old = engine.prefixes
    engine.prefixes = Prefixes(old.longest, old.token_bytes)
    return engine.prefixes


@pytest.fixture
def engine(engines: Engines) -> Iterator[Engine]:
    engine = engine_of(engines, "nexus")
    with_prefixes(engine)
    yield engine
    with_prefixes(engine)


@pytest.mark.parametrize("name", ["full", *POLICIES])
def test_reuse_changes_nothing(engines: Engines, name: str) -> None:
    engine = engines("full") if name == "full" else engine_of(engines, name)
    asked = [after(200, 1), after(3, 2), after(90, 3)]
    without = [run_and_inspect(engine, [r])[0] for r in asked]
    prefixes = with_prefixes(engine)
    prefixes.add(PREFIX)
    first, *rest = (engine.generate([r])[0] for r in asked)
    # The cut at the prefix's end may sum in another order than no cut.
    assert [r.token_ids for r in (first, *rest)] == [t.tokens for t in without]
    assert [r.cached_tokens for r in (first, *rest)] == [0, 150, 150]
    assert prefixes.nbytes > 150 * engine.kv_bytes_per_token
    again = engine.generate([asked[0]])[0]
    assert again.token_ids == first.token_ids
    assert again.cached_tokens == 150
    np.testing.assert_allclose(again.coverages, first.coverages, rtol=1e-5)
    with_prefixes(engine)


def test_reused_rows_are_bit_for_bit_those_that_are_read(engine: Engine) -> None:
    engine.prefixes.add(PREFIX)
    logits = []
    for _ in range(2):
        sequence = engine.prepare(0, after(200, 1))
        logits.append(engine.prefill(sequence, 0))
        ids = sequence.slot.ids.tolist()
    assert sequence.cached_tokens == 150
    assert (logits[0] == logits[1]).all()
    assert ids == sequence.slot.ids.tolist()


def test_a_prefix_of_whole_chunks_changes_no_bit(engine: Engine) -> None:
    """Prompts are cut at multiples of the chunk anyway."""
    ids = prompt(300, seed=5)
    (before,) = run_and_inspect(engine, [request(ids, 30)])
    engine.prefixes.add(ids[:128])
    results = [engine.generate([request(ids, 30)])[0] for _ in range(2)]
    assert [r.token_ids for r in results] == [before.tokens] * 2
    assert before.result is not None
    assert [r.coverages for r in results] == [before.result.coverages] * 2
    assert results[1].cached_tokens == 128


def test_the_longest_prefix_counts(engine: Engine) -> None:
    engine.prefixes.add(PREFIX)
    engine.prefixes.add(PREFIX[:40])
    engine.prefixes.add([1, 2, 3])
    results = [engine.generate([r])[0] for r in (after(50, 1), after(50, 2))]
    assert [r.cached_tokens for r in results] == [0, 150]
    other = engine.generate([request([*PREFIX[:60], *prompt(50, 3)], 5)])[0]
    assert other.cached_tokens == 40
    exactly = engine.generate([request(PREFIX, 5)])[0]  # its last token must be read
    assert exactly.cached_tokens == 40
    assert engine.generate([request(200, 5)])[0].cached_tokens == 0


def test_a_batch_reuses_what_its_first_request_has_read(engine: Engine) -> None:
    alone = [engine.generate([after(60, n)])[0].token_ids for n in range(6)]
    engine.prefixes.add(PREFIX)
    with Scheduler(engine) as scheduler:
        tickets = scheduler.submit_all([after(60, n) for n in range(6)])
        results = [t.result(60) for t in tickets]
    assert [r.token_ids for r in results] == alone
    assert [r.cached_tokens for r in results] == [0] + [150] * 5


def test_a_session_may_begin_with_a_prefix(engine: Engine) -> None:
    engine.prefixes.add(PREFIX)
    engine.generate([after(50, 1)])
    first = after(20, 2)
    result = engine.generate([Request(first.prompt, first.sampling, session_id="p")])[0]
    assert result.cached_tokens == 150
    rest = Request(PREFIX[:5], first.sampling, session_id="p")
    assert engine.generate([rest])[0].cached_tokens == result.prompt_tokens + 39
    engine.conversations.drop("p")


def test_what_cannot_be_kept_is_refused(engine: Engine) -> None:
    prefixes = engine.prefixes
    with pytest.raises(UsageError, match="an empty prefix"):
        prefixes.add([])
    with pytest.raises(CapacityError, match="has 600 tokens and the engine can keep one of 512"):
        prefixes.add(prompt(600))
    prefixes.max_bytes = 200 * engine.kv_bytes_per_token
    prefixes.add(PREFIX)
    prefixes.add(PREFIX)
    with pytest.raises(CapacityError, match="remove one, or raise max_bytes"):
        prefixes.add(prompt(100))
    prefixes.remove(PREFIX)
    with pytest.raises(UsageError, match="no prefix of 150 such tokens"):
        prefixes.remove(PREFIX)
    assert len(prefixes) == 0
