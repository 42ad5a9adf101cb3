"""Requests that broke comparable systems, one line each in cases.jsonl.

Its lines are `id`, `request`, `expect` and `why`; an `expect` key names the check of that name
below.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import op_calls
import pytest
from engines import Engines, Trace, prompt, request, run_and_inspect

from kvsift.builder.errors import UsageError
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.params import EvictionParams, SamplingParams

LINES = (Path(__file__).with_name("cases.jsonl")).read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
REQUESTS = {name: case for name, case in CASES.items() if "max_tokens" in case["request"]}
#: Their answers are text that only a trained model gives.
WITH_TEXT = ["emoji", "stop-across-tokens", "decode-1-token-prompt", "one-token"]
WEIGHTLESS = [name for name in REQUESTS if name not in WITH_TEXT]


@dataclass(frozen=True)
class Run:
    """A case with the engines that can repeat it."""

    engines: Engines
    engine: Engine
    request: Request
    options: Mapping[str, Any]
    trace: Trace


def limits(model: str) -> dict[str, Any]:
    positions = 512 if model == "smollm2" else 8192
    return {"max_input": positions, "max_output": 200, "max_batch": 1, "chunk": 1024}


def make(options: Mapping[str, Any], model: str) -> Request:
    # A random model ends its answers at random; a repeated request needs its seed.
    given = {"ignore_eos": model != "smollm2", "seed": 0, **options}
    length = given.pop("prompt_tokens", 0)
    given.setdefault("prompt", prompt(length, seed=length) if length else "")
    if given.get("density") == "nan":
        given["density"] = math.nan
    parts: list[dict[str, Any]] = [
        {key: given[key] for key in given if key in kind.__dataclass_fields__}
        for kind in (SamplingParams, EvictionParams)
    ]
    known = {"eviction", "prompt", "fill_evicted", *parts[0], *parts[1]}
    assert set(given) <= known
    return Request(given["prompt"], SamplingParams(**parts[0]), EvictionParams(**parts[1]))


def check(engines: Engines, name: str, model: str) -> None:
    options, expect = CASES[name]["request"], dict(CASES[name]["expect"])
    engine = engines(options["eviction"], model=model, limits=limits(model))
    if error := expect.pop("error", None):
        with pytest.raises(UsageError) as caught:
            engine.generate([make(options, model)])
        message = str(caught.value)
        assert "\n" not in message
        parts = ["9000", "8192 positions"] if name == "too-long" else [error]
        assert all(part in message for part in parts)
        assert not expect
        return
    poison = options.get("fill_evicted") == "nan"
    (trace,) = run_and_inspect(engine, [make(options, model)], poison=poison)
    run = Run(engines, engine, make(options, model), options, trace)
    for key, value in expect.items():
        CHECKS[key.lower()](run, value)


@pytest.mark.parametrize("name", WEIGHTLESS)
def test_case(engines: Engines, name: str) -> None:
    check(engines, name, "long")


@pytest.mark.parametrize("name", WITH_TEXT)
def test_case_with_text(engines: Engines, smollm2_gguf: Path, name: str) -> None:
    check(engines, name, "smollm2")


def kept_tokens_min(run: Run, value: int) -> None:
    assert run.trace.result is not None
    assert run.trace.result.kept_tokens >= value
    assert run.trace.result.evictions == 0


def finite_logits(run: Run, value: bool) -> None:
    assert len(run.trace.logits) == run.options["max_tokens"]
    assert np.isfinite(run.trace.logits).all() == value


def position_of_first_new_token(run: Run, value: int) -> None:
    assert run.trace.positions[0] == value


def decode_evictions(run: Run, value: int) -> None:
    assert run.trace.result is not None
    assert len(run.trace.tokens) > 1
    assert run.trace.result.evictions == value


def kept_tokens_max(run: Run, value: str) -> None:
    assert value == "budget + one block"
    assert run.trace.result is not None
    budget = run.trace.result.budget_tokens
    assert budget is not None
    assert budget < run.trace.most_rows <= budget + run.engine.manifest.policy.block_size
    assert len(run.trace.kept) > 2


def equals(run: Run, value: str) -> None:
    """Compare with the full cache, or with a run of clean rows."""
    if value == "eviction=full":
        full = run.engines("full", model="long", limits=limits("long"))
        (other,) = run_and_inspect(full, [run.request])
    else:
        assert value == "without the fill"
        (other,) = run_and_inspect(run.engine, [run.request])
        assert len(other.kept) > 2
        assert other.kept_sets() == run.trace.kept_sets()
    assert other.tokens == run.trace.tokens
    np.testing.assert_allclose(other.logits, run.trace.logits, atol=1e-5)


def deterministic(run: Run, value: bool) -> None:
    assert run.trace.result is not None
    assert run.trace.result.eviction_seed == run.options["eviction_seed"]
    run_and_inspect(run.engine, [request(1500, 5, eviction_seed=12345)])
    (again,) = run_and_inspect(run.engine, [run.request])
    assert len(again.kept) == 1
    assert (again.kept_sets() == run.trace.kept_sets()) == value
    assert again.tokens == run.trace.tokens


def stream_never_splits_utf8(run: Run, value: bool) -> None:
    assert run.trace.result is not None
    assert run.trace.text == run.trace.result.text
    whole = run.engine.tokenizer.decode(list(run.trace.tokens), skip_special_tokens=True)
    assert whole.startswith(run.trace.text.rstrip("\ufffd"))
    assert value
    assert not any("\ufffd" in piece for piece in run.trace.pieces[:-1])


def stop_string_not_in_text(run: Run, value: bool) -> None:
    assert run.trace.result is not None
    assert run.trace.result.finish_reason == "stop"
    assert (run.options["stop"][0] not in run.trace.text) == value
    assert run.trace.text == run.trace.result.text


def newest_w_kept(run: Run, value: bool) -> None:
    """The policy's newest units are in every kept set, tokens that decode has just added too."""
    policy, result = run.engine.manifest.policy, run.trace.result
    assert result is not None
    assert result.budget_tokens is not None
    newest = policy.recent_units + int(policy.recent_fraction * result.budget_tokens)
    assert newest > 1
    for ids, seen in zip(run.trace.kept, run.trace.seen, strict=True):
        rows = ids.reshape(-1, ids.shape[-1])
        wanted = set(range(seen - newest, seen))
        assert all(wanted <= set(row.tolist()) for row in rows) == value


def kept_set_changes(run: Run, value: bool) -> None:
    sets = run.trace.kept_sets()
    assert len(sets) > 2
    assert all(a != b for a, b in itertools.pairwise(sets)) == value


def new_tokens(run: Run, value: int) -> None:
    assert len(run.trace.tokens) == value


def new_tokens_max(run: Run, value: int) -> None:
    assert 1 <= len(run.trace.tokens) <= value


def finish_reason(run: Run, value: str) -> None:
    assert run.trace.result is not None
    assert run.trace.result.finish_reason == value


def kv_bytes(run: Run, value: str) -> None:
    assert value == "kept * layers * Hkv * 2 * D * dtype size"
    result, model = run.trace.result, run.engine.manifest.model
    assert result is not None
    kept = run.trace.keys[0].shape[1]
    assert kept < result.prompt_tokens / 4
    assert result.kv_bytes == kept * model.num_layers * model.num_kv_heads * 2 * model.head_dim * 4
    assert result.kv_bytes == sum(a.nbytes for a in run.trace.keys + run.trace.values)
    assert model.num_heads > model.num_kv_heads


CHECKS: dict[str, Callable[[Run, Any], None]] = {
    f.__name__: f
    for f in (
        kept_tokens_min, finite_logits, position_of_first_new_token, decode_evictions,
        kept_tokens_max, equals, deterministic, stream_never_splits_utf8,
        newest_w_kept, kept_set_changes, stop_string_not_in_text,
        new_tokens, new_tokens_max, finish_reason, kv_bytes,
    )
}  # fmt: skip


def test_equal_scores() -> None:
    case = CASES["equal-scores"]["request"]
    score = np.ones((1, case["units"]))
    sets = [
        np.flatnonzero(op_calls.select("onnx", "TopKSelect", score, case["keep"])[0]).tolist()
        for _ in range(case["repeat"])
    ]
    assert all(s == list(range(case["keep"])) for s in sets)
    drawn = [
        np.flatnonzero(op_calls.select("onnx", "ReservoirSelect", score, case["keep"])[0]).tolist()
        for _ in range(case["repeat"])
    ]
    assert all(s == drawn[0] for s in drawn)
    assert len(drawn[0]) == case["keep"]


@pytest.mark.parametrize("op", ["TopKSelect", "ReservoirSelect"])
def test_forced_under_inf(op: str) -> None:
    case = CASES["forced-under-inf"]["request"]
    score = np.full((1, case["units"]), 0.5)
    score[0, 10:50] = np.inf
    score[0, [2, 55, 60]] = np.nan
    forced = {"sink_units": 2, "recent_units": 3}
    pins = ((3, 5), (54, 56))
    kept, count, _ = op_calls.select("onnx", op, score, case["keep"], pins=pins, **forced)
    assert count.tolist() == [case["keep"]] == [kept.sum()]
    assert kept[0, [0, 1, 3, 4, 54, 55, 61, 62, 63]].all()
    assert not kept[0, [2, 60]].any()


def test_a_b_a(engines: Engines) -> None:
    engine = engines("nexus")
    made = {"A": request(300, 80, seed=1), "B": request(500, 80, seed=2)}
    runs = [run_and_inspect(engine, [made[name]])[0] for name in CASES["a-b-a"]["request"]["run"]]
    assert runs[0].tokens == runs[2].tokens
    assert runs[0].kept_sets() == runs[2].kept_sets()
    np.testing.assert_array_equal(runs[0].logits, runs[2].logits)
    assert runs[0].kept_sets() != runs[1].kept_sets()


def test_middle_finishes(engines: Engines) -> None:
    case = CASES["middle-finishes"]["request"]
    engine = engines("nexus")
    requests = [
        request(200 + 30 * i, 8 if i == case["finish_first"] else 90) for i in range(case["batch"])
    ]
    together = run_and_inspect(engine, requests)
    for i, one in enumerate(requests):
        (solo,) = run_and_inspect(engine, [one])
        assert solo.tokens == together[i].tokens
        assert solo.kept_sets() == together[i].kept_sets()


def test_every_line_is_a_test() -> None:
    others = {"equal-scores", "forced-under-inf", "a-b-a", "middle-finishes"}
    assert set(CASES) == {*WEIGHTLESS, *WITH_TEXT} | others
    assert all(f"test_{name.replace('-', '_')}" in globals() for name in others)
    keys = {key.lower() for name in REQUESTS for key in CASES[name]["expect"]}
    assert keys == {*CHECKS, "error"}
