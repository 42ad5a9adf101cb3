"""Evaluation: the same logits, kept sets and answers as the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from engines import Engines, prompt, request, run_and_inspect
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvsift.builder.errors import CapacityError, EngineError, UsageError
from kvsift.builder.eviction_model import eviction_model
from kvsift.builder.policies import resolve
from kvsift.runtime.chat import ChatTemplate, encode_chat
from kvsift.runtime.evaluation import builds, fidelity, greedy, needles, suites, texts
from kvsift.runtime.evaluation.lab import Lab, fair_budget
from kvsift.runtime.evaluation.variants import Spec, Variant

SMALL = {"block_size": 8}


def variant(lab: Lab, eviction: str, selector: str | None = None, **options: Any) -> Variant:
    scope = options.pop("scope", None)
    name = " ".join([eviction, *filter(None, [selector, scope]), *map(str, options.items())])
    return builds.make_variant(lab.manifest.model, Spec(name, eviction, selector, options, scope))


@pytest.fixture(scope="module")
def lab(engines: Engines) -> Lab:
    out = engines.root / "lab"
    specs = [Spec("nestedkv", "nestedkv")]
    return builds.prepare(out, engines.model("tiny"), 512, specs, threads=1, slots=3)[0]


POLICIES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("nexus", None, {"head_reduce": "mean_qk", **SMALL}),
    ("nexus", None, {"head_reduce": "mean_prob", **SMALL}),
    ("nexus", None, {"head_reduce": "per_head", **SMALL}),
    ("nexus", "topk", {"walk_steps": 0, **SMALL}),
    ("nexus", None, {"prefill_selector": "topk", **SMALL}),
    ("streaming", None, {}),
    ("random", None, {"sink_units": 1, "recent_units": 1, **SMALL}),
    ("random", None, {}),
    ("snapkv", None, {"window": 16}),
    ("snapkv", None, {"window": 16, "scope": "both"}),
    ("pyramidkv", None, {"window": 4, "pyramid_beta": 4.0, "scope": "both"}),
    ("tova", None, {}),
    ("h2o", None, {}),
    ("morphkv", None, {"window": 8}),
    ("expected_attention", None, {}),
    ("keydiff", None, {"scope": "both"}),
    ("knorm", None, {}),
    ("adakv", None, {"window": 16, "scope": "both"}),
    ("nestedkv", None, {"scope": "both"}),
]


@pytest.mark.parametrize(("eviction", "selector", "options"), POLICIES)
@pytest.mark.parametrize(("length", "split"), [(197, 1), (192, 8)])
def test_logits_and_kept_sets_are_those_of_the_engine(
    engines: Engines,
    lab: Lab,
    eviction: str,
    selector: str | None,
    options: dict[str, Any],
    length: int,
    split: int,
) -> None:
    tried = variant(lab, eviction, selector, **options)
    scope = options.get("scope")
    given = {k: v for k, v in options.items() if k != "scope"} or None
    engine = engines(eviction, selector=selector, scope=scope, options=given)
    trace = run_and_inspect(engine, [request(length, 65, seed=5, budget_tokens=48)])[0]
    assert trace.kept, "nothing was evicted: the test shows nothing"

    lab.read(prompt(length, seed=length))
    budget = max(48 // tried.policy.block_size, 1)
    slot = lab.evict(tried, budget, 5)
    made = []
    for at in range(0, 64, split):
        made.append(lab.force(tried, slot, trace.tokens[at : at + split]))
        lab.evict_full(tried, slot)
    np.testing.assert_allclose(
        np.concatenate(made), np.array(trace.logits[1:]), rtol=1e-3, atol=1e-3
    )
    np.testing.assert_array_equal(
        np.sort(slot.ids[:, :, : int(slot.units.max())], axis=-1), np.sort(trace.ids, axis=-1)
    )


def sample(size: int, index: int = 0) -> texts.Sample:
    return texts.Sample("prose", index, "random ids", tuple(prompt(size, seed=index)))


def settings(**changes: Any) -> fidelity.Settings:
    given = {"prompt": 192, "follow": 32, "split": 32, "bins": 1, "densities": (0.5,), "seeds": 2}
    return fidelity.Settings(**(given | changes))


def test_the_full_cache_is_at_no_distance_from_itself_and_evicted_ones_are(lab: Lab) -> None:
    tried = [variant(lab, "full"), variant(lab, "nexus", **SMALL), variant(lab, "random")]
    full, *evicted = fidelity.measure(lab, sample(224), tried, settings())
    assert fidelity.check_full([full]) == pytest.approx(0.0, abs=1e-6)
    assert full["kept"] == 192
    assert full["agreement"] == [1.0]
    assert [r["kept"] for r in evicted] == [96] * 4
    assert all(r["kl"][0] > 1e-3 for r in evicted)
    assert evicted[0]["kl"] != evicted[1]["kl"], "two seeds gave one set"


def test_reference_text_leaves_no_trace_in_the_prompt(lab: Lab) -> None:
    tried = variant(lab, "nexus", **SMALL)
    tokens = prompt(160)
    lab.read(tokens)
    before = lab.evict(tried, 6, 3).ids.copy()
    ring = lab.scratch.ring.copy()
    lab.continue_dense(prompt(40, seed=9), 40)
    np.testing.assert_array_equal(lab.evict(tried, 6, 3).ids, before)
    np.testing.assert_array_equal(lab.scratch.ring, ring)


def test_kl_is_that_of_scipy(lab: Lab) -> None:
    rng = np.random.default_rng(0)
    full, other = (rng.normal(0, 4, (5, 300)).astype(np.float32) for _ in range(2))
    kl, same, nll = fidelity.Reference([full]).compare(0, other, [7, 3])
    p, q = (np.exp(x - x.max(-1, keepdims=True)).astype(np.float64) for x in (full, other))
    np.testing.assert_allclose(kl, stats.entropy(p, q, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(same, p.argmax(-1) == q.argmax(-1))
    chosen = (q / q.sum(-1, keepdims=True))[[0, 1], [7, 3]]
    np.testing.assert_allclose(nll[:2], -np.log(chosen), rtol=1e-5)
    assert np.isnan(nll[2:]).all()


@pytest.mark.parametrize(("density", "tokens"), [(0.2, 192), (0.5, 512), (0.001, 96), (1.0, 1024)])
def test_blocks_of_32_set_the_budget(density: float, tokens: int) -> None:
    for mode in suites.MODES:
        policy = resolve("nexus", options={"head_reduce": mode})
        assert fair_budget(policy, 1024, density) == tokens // 32
    assert fair_budget(resolve("full"), 1024, density) is None


@given(st.integers(120, 3000), st.floats(0.01, 1.0))
def test_every_variant_holds_the_same_number_of_tokens(prompt_tokens: int, density: float) -> None:
    held = {}
    for name, block_size in (("nexus", 32), ("nexus", 16), ("nexus", 8), ("nexus", 1), ("tova", 1),
                             ("streaming", 1), ("random", 1)):  # fmt: skip
        policy = resolve(name, options={"block_size": block_size} if name == "nexus" else None)
        units = fair_budget(policy, prompt_tokens, density)
        assert units is not None
        # The newest unit, which stays, is the one that may be partial.
        held[name, block_size] = min(
            prompt_tokens, units * block_size - -prompt_tokens % block_size
        )
    assert len(set(held.values())) == 1, held
    blocks = -(-prompt_tokens // 32)
    assert next(iter(held.values())) <= max(4, density * blocks + 1e-6) * 32


def test_a_lab_refuses_other_engines_and_long_texts(engines: Engines, lab: Lab) -> None:
    with pytest.raises(EngineError, match="no evaluation engine"):
        Lab(engines.package("nexus"), 256)
    with pytest.raises(CapacityError, match="1024 positions"):
        Lab(engines.root / lab_directory(engines), 4096)
    wide = variant(lab, "nexus", window=65)
    lab.read(prompt(128))
    with pytest.raises(EngineError, match="reads 65 queries"):
        lab.evict(wide, 2, 0)
    full = variant(lab, "full")
    slot = lab.evict(full, None, 0)
    with pytest.raises(CapacityError, match="cache holds"):
        lab.force(full, slot, prompt(400))
    other = variant(lab, "expected_attention", sink_units=8)
    with pytest.raises(EngineError, match="leaves 8 sinks out"):
        lab.evict(other, 12, 0)
    with pytest.raises(EngineError, match="different numbers of tokens"):
        Lab(engines.root / "lab" / "engine", 256).stage(variant(lab, "nestedkv").policy)


def lab_directory(engines: Engines) -> Path:
    return engines.package(
        "nexus", options={"head_reduce": "mean_prob"}, build_options={"all_logits": True}
    )


def test_eviction_model_asks_only_for_what_the_policy_reads(lab: Lab) -> None:
    def inputs(name: str, **options: Any) -> set[str]:
        made = eviction_model(lab.manifest.model, resolve(name, options=options or None))
        return {str(v.name).split(".")[0] for v in made.graph.inputs}

    common = {"evict_slots", "tokens_seen", "unit_ids", "budget", "pin_spans"}
    assert inputs("nexus") >= {"past_key", "q_ring_in", "eviction_seed"} | common
    assert "past_key" not in inputs("streaming")
    assert "past_value" not in inputs("nexus")
    assert "prompt_end" in inputs("nexus", prefill_selector="topk")
    with pytest.raises(UsageError, match="keeps everything"):
        eviction_model(lab.manifest.model, resolve("full"))


def test_a_needle_is_planted_whole_and_asked_for() -> None:
    tokenizer = tiny.tokenizer()
    template = ChatTemplate(tiny.CHAT_TEMPLATE)
    text = " ".join(f"This is sentence {i}." for i in range(4000))
    depths = set()
    for haystack in texts.prose_samples(tokenizer, text, "numbers", 16, 500):
        made = needles.make_needle(tokenizer, template, haystack, 500)
        asked = made.text.split("What is the ")[1].split("?")[0]
        assert f". Remember this: the {asked} is {made.answer}. This is" in made.text
        assert made.text.count(made.answer) == 1
        assert made.answer.isdigit() == (haystack.index % 2 == 0)
        assert 450 <= len(encode_chat(tokenizer, made.text)) <= 520
        depths.add(made.depth)
    assert len(depths) == needles.DEPTHS
    with pytest.raises(UsageError, match="too short"):
        needles.make_needle(tokenizer, template, haystack, 60)


def test_greedy_answers_are_those_of_the_engine(engines: Engines, lab: Lab) -> None:
    tried = variant(lab, "nexus", **SMALL)
    engine = engines("nexus", options=SMALL)
    ids = prompt(250, seed=4)
    expected = engine.generate([request(ids, 24, seed=7, budget_tokens=64)])[0].token_ids
    first = lab.read(ids)
    begun = [greedy.begin(tried, lab.evict(tried, 8, 7, index), first) for index in range(3)]
    answers = greedy.decode(lab, begun, 24)
    ends = set(lab.manifest.model.eos_token_ids)
    upto = next((i + 1 for i, token in enumerate(expected) if token in ends), 24)
    assert answers == [lab.tokenizer.decode(list(expected[:upto]))] * 3


@pytest.mark.parametrize("name", ["nexus", "h2o", "nestedkv"])
def test_answers_together_are_those_of_each_alone(lab: Lab, name: str) -> None:
    options = SMALL if name == "nexus" else {"scope": "both"}
    tried = variant(lab, name, **options)
    budgets = [4, 6, 9] if name == "nexus" else [32, 48, 72]
    ids = prompt(250, seed=4)

    def answers(slots: list[int]) -> list[tuple[list[int], np.ndarray[Any, Any]]]:
        first = lab.read(ids)
        begun = [
            greedy.begin(tried, lab.evict(tried, budgets[i], i, at), first)
            for at, i in enumerate(slots)
        ]
        greedy.decode(lab, begun, 90)
        return [(a.tokens, a.slot.ids) for a in begun]

    together = answers([0, 1, 2])
    for i in range(3):
        (tokens, ids_alone) = answers([i])[0]
        assert tokens == together[i][0]
        np.testing.assert_array_equal(ids_alone, together[i][1])
    assert len({tuple(tokens) for tokens, _ in together}) > 1, "all alike: the test shows nothing"
