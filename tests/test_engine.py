"""The engine on tiny models: batches, slots, seeds, positions, and what requests ask for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engines import Engines, request, run_and_inspect
from kept import engine_of, same

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.runtime.cache import KVCache
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions import Step, StepOutput


@pytest.mark.parametrize(
    "name", ["nexus", "nexus-per_head", "nexus-prefill_topk", "nexus-tokens", "streaming", "random"]
)
def test_a_batch_equals_each_alone(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    requests = [
        request(37, 120, seed=5, density=0.5),
        request(299, 90, seed=6, density=0.1),
        request(150, 30, seed=7, budget_tokens=64, eviction_seed=70),
        request(256, 100, seed=8, density=0.3),
    ]
    together = run_and_inspect(engine, requests)
    assert sorted(t.slot for t in together) == [0, 1, 2, 3]
    assert sum(len(t.kept) for t in together) > 10
    for one, trace in zip(requests, together, strict=True):
        (alone,) = run_and_inspect(engine, [one])
        assert alone.slot == 0
        same(alone, trace)


def test_more_requests_than_slots(engines: Engines) -> None:
    engine = engine_of(engines, "nexus", max_batch=2)
    requests = [request(60 + 31 * i, 20 + 13 * (i % 3), seed=i) for i in range(7)]
    results = run_and_inspect(engine, requests)
    assert {t.slot for t in results} == {0, 1}
    for one, trace in zip(requests, results, strict=True):
        same(run_and_inspect(engine, [one])[0], trace)


def test_the_middle_request_may_finish_first(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    requests = [request(200, 90), request(150, 9), request(250, 90), request(100, 90)]
    together = run_and_inspect(engine, requests)
    assert len(together[1].tokens) == 9
    for i in (0, 2, 3):
        same(run_and_inspect(engine, [requests[i]])[0], together[i])


def test_the_seed_decides_the_kept_set_and_nothing_else_does(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    a, b = request(300, 60, seed=3), request(280, 60, seed=4)
    (first,), (other,), (again,) = (run_and_inspect(engine, [r]) for r in (a, b, a))
    same(first, again)
    for slot in (1, 2, 3):
        crowd = [request(100 + i, 2 + i, seed=i) for i in range(slot)]
        trace = run_and_inspect(engine, [*crowd, a])[-1]
        assert trace.slot == slot
        same(first, trace)
    assert other.kept_sets() != first.kept_sets()
    seeds = [1, 2, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    sets = [
        run_and_inspect(engine, [request(300, 1, eviction_seed=s)])[0].kept_sets() for s in seeds
    ]
    assert all(x != y for i, x in enumerate(sets) for y in sets[:i])


def test_every_eviction_of_a_request_draws_anew(engines: Engines) -> None:
    steps: list[int] = []

    def watch(cache: KVCache, step: Step, output: StepOutput) -> None:
        if step.evictions is not None:
            steps.extend(step.evictions.step.tolist())

    engine = engine_of(engines, "nexus")
    for _ in range(2):
        run_and_inspect(engine, [request(300, 60)], watch=watch)
        assert steps == list(range(len(steps)))
        assert len(steps) > 5
        steps.clear()


def test_fifty_repeats_keep_the_same_set(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    sets = [run_and_inspect(engine, [request(300, 20)])[0].kept_sets() for _ in range(50)]
    assert all(s == sets[0] for s in sets)


def test_a_new_request_starts_with_an_empty_window(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    run_and_inspect(engine, [request(300, 60)])
    run_and_inspect(engine, [request(3, 0)])
    assert engine.cache.ring is not None
    assert engine.cache.ring[0, :3].any(axis=-1).all()
    assert not engine.cache.ring[0, 3:].any()


def test_requests_without_a_seed_get_their_own_and_report_it(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    bare = request(300, 40)
    bare = dataclasses.replace(bare, sampling=dataclasses.replace(bare.sampling, seed=None))
    first, second = (run_and_inspect(engine, [bare])[0] for _ in range(2))
    assert first.result is not None
    assert second.result is not None
    assert first.result.eviction_seed != second.result.eviction_seed
    repeat = request(300, 40, eviction_seed=first.result.eviction_seed)
    same(first, run_and_inspect(engine, [repeat])[0])


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 127, 128, 129, 300])
def test_positions_continue_from_the_true_length(engines: Engines, length: int) -> None:
    (trace,) = run_and_inspect(engine_of(engines, "nexus"), [request(length, 80)])
    assert trace.positions == list(range(length, length + 79))
    assert trace.result is not None
    assert trace.result.kv_bytes_dense > trace.result.kv_bytes


def test_logprobs_belong_to_the_logits(engines: Engines) -> None:
    (trace,) = run_and_inspect(engine_of(engines, "nexus"), [request(300, 12, logprobs=3)])
    assert trace.result is not None
    assert trace.result.logprobs is not None
    assert len(trace.result.logprobs) == 12
    for token, row, got in zip(trace.tokens, trace.logits, trace.result.logprobs, strict=True):
        wide = row.astype(np.float64)
        log = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        assert got.token == token == int(row.argmax())
        assert got.logprob == pytest.approx(log[token])
        assert [t for t, _ in got.top] == np.argsort(-row, kind="stable")[:3].tolist()


def test_stop_strings_and_streamed_text(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    (free,) = run_and_inspect(engine, [request(300, 60)])
    assert free.result is not None
    assert free.text == free.result.text
    ascii_only = [i for i in range(len(free.text) - 4) if free.text[i : i + 4].isascii()]
    stop = free.text[ascii_only[3] : ascii_only[3] + 4]
    (cut,) = run_and_inspect(engine, [request(300, 60, stop=[stop])])
    assert cut.result is not None
    assert cut.result.finish_reason == "stop"
    assert cut.text == cut.result.text == free.text[: free.text.index(stop)]
    token = free.tokens[7]
    (ended,) = run_and_inspect(engine, [request(300, 60, stop_token_ids=[token])])
    assert ended.tokens == free.tokens[: free.tokens.index(token) + 1]


def test_a_stop_string_may_span_an_eviction(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    (free,) = run_and_inspect(engine, [request(300, 60)])
    assert free.result is not None
    # The step that feeds token `made - 1` evicts; its own token, `made`, ends the stop string.
    for made in (seen - 300 for seen in free.seen[1:]):
        before, after = (engine.tokenizer.decode(free.tokens[:n]) for n in (made, made + 4))
        stop = after[len(before) - 2 : len(before) + 2]
        if "\ufffd" in stop or free.text.index(stop) != len(before) - 2:
            continue  # half a character, or found earlier
        (cut,) = run_and_inspect(engine, [request(300, 60, stop=[stop])])
        assert cut.result is not None
        assert cut.result.finish_reason == "stop"
        assert cut.result.text == free.text[: len(before) - 2]
        assert cut.result.evictions >= 2
        return
    pytest.fail("no eviction fell on readable text: choose another prompt")


def test_sampled_tokens_depend_on_the_seed_alone(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    warm = {"temperature": 1.0, "eviction_seed": 9}
    crowd = [request(200, 50, seed=s, **warm) for s in (1, 2, 1)]
    a, b, c = (t.tokens for t in run_and_inspect(engine, crowd))
    assert a == c != b
    assert run_and_inspect(engine, crowd[:1])[0].tokens == a


def test_a_bad_request_stops_everything_before_it_runs(engines: Engines) -> None:
    engine = engines("nexus")
    good = request(20, 5)
    for bad, message in (
        (request([], 5), "empty prompt"),
        (request("", 5), "empty prompt"),
        (request([5, 512], 5), r"token id 512 is outside the vocabulary \[0, 512\)"),
        (request([5, -1], 5), "token id -1 is outside"),
        (request(1025, 5), "the prompt has 1025 tokens and the model has 1024 positions"),
        (request(601, 5), "the prompt has 601 tokens and the engine was built with --max-input"),
        (request(20, 5, pin=[(0, 21)]), "pin must end within the prompt's 20 tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            next(engine.run([good, bad]))


def test_scope_prefill_refuses_more_than_the_slot_was_made_for(engines: Engines) -> None:
    engine = engine_of(engines, "nexus-prefill")
    with pytest.raises(CapacityError, match=r"max_tokens is 301 .* --max-output 300"):
        engine.generate([request(20, 301)])


def test_generation_stops_at_the_last_position(engines: Engines) -> None:
    engine = engines("nexus", model="llama")  # 512 positions
    (trace,) = run_and_inspect(engine, [request(500, 100)])
    assert trace.result is not None
    assert trace.result.finish_reason == "length"
    assert len(trace.tokens) == 12
    assert trace.positions[-1] == 510


def test_a_closed_run_leaves_the_engine_usable(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    requests = [request(300, 60, seed=3), request(200, 60)]
    before = run_and_inspect(engine, requests)
    updates = engine.run(requests)
    for _ in range(40):
        next(updates)
    updates.close()
    for a, b in zip(before, run_and_inspect(engine, requests), strict=True):
        same(a, b)


def test_max_batch_is_checked(engines: Engines) -> None:
    with pytest.raises(UsageError, match=r"max_batch must be in \[1, 1024\], got 0"):
        Engine(engines.package("nexus"), max_batch=0)


def test_a_huge_answer_limit_takes_no_memory(engines: Engines) -> None:
    limits = {"max_input": 1024, "density": 1.0}
    for engine in (
        engines("full", limits=limits),
        engines("nexus", limits=limits, options={"decode_interval": 32 << 40}),
    ):
        engine.generate([request(5, 1 << 50, stop_token_ids=range(512))])
        assert engine.cache.capacity <= 1024


def test_a_dense_engine_says_what_lets_a_long_answer_fit(engines: Engines) -> None:
    engine = engines("full", limits={"density": 1.0, "max_input": 100, "max_output": 50})
    with pytest.raises(CapacityError, match=r"reach 300 tokens.* has 150; .*--max-output$"):
        engine.generate([request(100, 200)])
