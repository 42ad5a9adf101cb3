"""The whole graph: two attention forms, weights of integers, chunks, what a step touches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engines import LIMITS, Engines, Trace, prompt, request, run_and_inspect
from numpy.typing import NDArray
from tiny import FAMILIES, hf_config, random_weights, write_hf

from kvsift.builder import ops, schema
from kvsift.builder.families import from_hf_config
from kvsift.builder.package import GRAPH, Limits
from kvsift.builder.policies import resolve
from kvsift.builder.targets.ort import BuildOptions, build
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.sessions import Step, StepOutput

FORMS = ("gqa", "portable")
BLOCKS = {"options": {"block_size": 8}}
PER_HEAD = {"options": {"block_size": 8, "head_reduce": "per_head"}}
PREFILL_TOPK = {"options": {"block_size": 8, "prefill_selector": "topk"}}


def logits_of(trace: Trace) -> NDArray[np.float32]:
    return np.array(trace.logits)


@pytest.mark.parametrize(
    ("model", "eviction", "policy"),
    [(family, name, BLOCKS if name == "nexus" else {}) for family in FAMILIES
     for name in ("full", "nexus")]
    + [("tiny", "nexus", PER_HEAD), ("tiny", "nexus", PREFILL_TOPK), ("tiny", "streaming", {}),
       ("tiny", "random", {}), ("yarn", "nexus", BLOCKS), ("llama3", "full", {})],
)  # fmt: skip
def test_both_attention_forms_give_the_same(
    engines: Engines, model: str, eviction: str, policy: dict[str, Any]
) -> None:
    requests = [request(300, 100, density=0.2), request(90, 60, density=0.2)]
    if eviction == "full":
        requests = [request(300, 100), request(90, 60)]
    gqa, portable = (
        run_and_inspect(
            engines(eviction, model=model, build_options={"attention": form}, **policy), requests
        )
        for form in FORMS
    )
    for a, b in zip(gqa, portable, strict=True):
        assert a.tokens == b.tokens
        assert a.kept_sets() == b.kept_sets()
        assert bool(a.kept) == (eviction != "full")
        np.testing.assert_allclose(logits_of(a), logits_of(b), atol=2e-4)


@pytest.mark.parametrize(("quantize", "least"), [("int8", 0.999), ("int4", 0.8)])
@pytest.mark.parametrize("model", ["tiny", "tied", "qwen2", "qwen3"])
def test_integer_weights_agree_roughly(
    engines: Engines, model: str, quantize: str, least: float
) -> None:
    """Cosine of the logits over the prompt's tokens."""
    options = {"all_logits": True}
    exact = engines("nexus", model=model, build_options=options)
    rough = engines("nexus", model=model, build_options={**options, "quantize": quantize})
    pair = [run_and_inspect(e, [request(200, 60)])[0] for e in (exact, rough)]
    a, b = (np.concatenate(t.prompt_logits) for t in pair)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert least < np.median(cosine) < 1 - 1e-7
    assert len(pair[1].tokens) == 60
    assert pair[1].kept


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8), ("int4", 4)])
def test_integer_weights_are_the_rounded_ones(
    engines: Engines, tmp_path: Path, quantize: str, bits: int
) -> None:
    """A float model of weights rounded here differs by the activations' int8 steps only."""
    config = from_hf_config(hf_config("llama"))
    weights = random_weights(config)
    for name, w in weights.items():
        if w.ndim == 2 and "embed_tokens" not in name:
            blocks = w.reshape(len(w), -1, 32)
            scale = np.abs(blocks).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
            weights[name] = (np.round(blocks / scale) * scale).reshape(w.shape)
    build(
        open_model(write_hf(tmp_path / "rounded", weights=weights)),
        resolve("full"),
        Limits(**LIMITS),
        tmp_path / "engine",
        BuildOptions(all_logits=True),
    )
    options = {"all_logits": True, "quantize": quantize}
    pair = Engine(tmp_path / "engine"), engines("full", model="llama", build_options=options)
    a, b = (
        np.concatenate(run_and_inspect(engine, [request(200, 1)])[0].prompt_logits)
        for engine in pair
    )
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert cosine.min() > 0.995


def test_all_logits_end_in_the_last_ones(engines: Engines) -> None:
    every = engines("nexus", build_options={"all_logits": True}, **BLOCKS)
    (a,) = run_and_inspect(engines("nexus", **BLOCKS), [request(300, 60)])
    (b,) = run_and_inspect(every, [request(300, 60)])
    assert [rows.shape for rows in b.prompt_logits] == [(128, 512), (128, 512), (44, 512)]
    assert a.tokens == b.tokens
    np.testing.assert_allclose(logits_of(a), logits_of(b), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", [BLOCKS, PER_HEAD], ids=["layer", "per_head"])
def test_chunks_do_not_matter(engines: Engines, form: str, policy: dict[str, Any]) -> None:
    built = {"build_options": {"attention": form}, **policy}
    small = engines("nexus", limits={"chunk": 64}, **built)
    large = engines("nexus", limits={"chunk": 512}, **built)
    requests = [request(n, 60) for n in (1, 63, 64, 65, 300, 500)]
    for a, b in zip(*(run_and_inspect(e, requests) for e in (small, large)), strict=True):
        assert len(b.prompt_logits) == 1 <= len(a.prompt_logits)
        assert a.tokens == b.tokens
        assert a.kept_sets() == b.kept_sets()
        np.testing.assert_allclose(logits_of(a), logits_of(b), atol=2e-4)


class Bare:
    """A session with two slots that steps by hand."""

    def __init__(self, engine: Engine, capacity: int = 64) -> None:
        self.session = engine.session
        self.cache: HostCache = engine.session.new_cache(2, capacity)
        self.lens = np.zeros(2, np.int32)

    def step(self, tokens: list[list[int]]) -> StepOutput:
        """Append tokens to each slot, padded to the longest with token 3."""
        size = max(len(t) for t in tokens)
        ids = np.array([t + [3] * (size - len(t)) for t in tokens], np.int64)
        n_new = np.array([len(t) for t in tokens], np.int32)
        positions = self.lens[:, None] + np.arange(size, dtype=np.int64)
        output = self.session.run(self.cache, Step(ids, positions, n_new, self.lens[None].copy()))
        self.lens += n_new
        return output

    def state(self, slot: int) -> list[NDArray[np.float32]]:
        """Return a copy of the slot's valid rows and, last, its window."""
        rows = [a[slot, :, : self.lens[slot]] for a in self.cache.keys + self.cache.values]
        return [*(a.copy() for a in rows), self.window(slot)]

    def window(self, slot: int) -> NDArray[np.float32]:
        """Return the slot's newest queries [W, L*Hq*D] in order; rows before the start are 0."""
        size = self.cache.ring.shape[1]
        positions = int(self.lens[slot]) - size + 1 + np.arange(size - 1)
        window = self.cache.ring[slot, positions % size].copy()
        window[positions < 0] = 0.0
        return window


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["mean_qk", "mean_prob"])
def test_a_slot_without_new_tokens_is_untouched(engines: Engines, form: str, mode: str) -> None:
    options = {"options": {"head_reduce": mode}, "build_options": {"attention": form}}
    bare = Bare(engines("nexus", **options))
    for _ in range(20):
        bare.step([[7], [9]])
    before = bare.state(0), bare.state(1)
    assert all(np.any(w) for w in before[0])
    bare.step([[], [11]])
    bare.step([[], [12]])
    assert bare.lens.tolist() == [20, 22]
    for old, new in zip(before[0], bare.state(0), strict=True):
        np.testing.assert_array_equal(old, new)
    assert (before[1][-1] != bare.window(1)).any()


@pytest.mark.parametrize(
    # GroupQueryAttention takes several slots of several tokens only at their start.
    ("form", "sizes"), [("gqa", (2, 1, 1)), ("portable", (5, 2, 1, 8))]
)  # fmt: skip
def test_padding_tokens_change_nothing(engines: Engines, form: str, sizes: tuple[int, ...]) -> None:
    """Slots of a step may have fewer real tokens than the step is wide."""
    engine = engines("nexus", build_options={"attention": form})
    ragged, alone = Bare(engine), Bare(engine)
    for i, size in enumerate(sizes):
        step = prompt(size, seed=size)
        wide = 1 if form == "gqa" and i else 9
        both = ragged.step([prompt(wide, seed=1), step])
        one = alone.step([step, step])
        np.testing.assert_allclose(both.logits[1], one.logits[1], atol=1e-4)
    # The queries of padding tokens do enter the window: a ragged step must not be scored.
    for mixed, plain in zip(ragged.state(1)[:-1], alone.state(1)[:-1], strict=True):
        np.testing.assert_allclose(mixed, plain, atol=1e-4)


def test_the_window_holds_the_newest_queries_in_order(engines: Engines) -> None:
    """Sixteen steps of one token leave the window that one step of sixteen leaves."""
    engine = engines("nexus", build_options={"attention": "portable"})
    tokens = prompt(40)
    slow, fast = Bare(engine), Bare(engine)
    for token in tokens:
        slow.step([[token], [token]])
    fast.step([tokens[:24], tokens[:24]])
    early = fast.window(0)[8:]
    fast.step([tokens[24:32], tokens[24:32]])
    np.testing.assert_array_equal(early, fast.window(0)[:8])
    fast.step([tokens[32:], tokens[32:]])
    for a, b in zip(slow.state(0), fast.state(0), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


PACKAGES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("nexus", {}),
    ("nexus", {"options": {"head_reduce": "mean_qk", "walk_steps": 0}}),
    ("nexus", PER_HEAD),
    ("nexus", PREFILL_TOPK),
    ("nexus", {"selector": "topk"}),
    ("streaming", {}),
    ("random", {}),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("eviction", "policy"), PACKAGES)
def test_the_graph_passes_the_onnx_checker(
    engines: Engines, eviction: str, policy: dict[str, Any], form: str
) -> None:
    schema.register()
    path = engines.package(eviction, build_options={"attention": form}, **policy) / GRAPH
    onnx.checker.check_model(str(path), full_check=True)


def test_the_checker_knows_the_ops(engines: Engines, tmp_path: Path) -> None:
    schema.register()
    model = onnx.load(engines.package("nexus") / GRAPH, load_external_data=False)
    (guard,) = [n for n in model.graph.node if n.op_type == "If"]
    (then,) = [a.g for a in guard.attribute if a.name == "then_branch"]
    (node,) = [n for n in then.node if n.op_type == "ReservoirSelect"]
    onnx.checker.check_node(node, _context())
    del node.attribute[0]
    with pytest.raises(onnx.checker.ValidationError, match="attribute"):
        onnx.checker.check_node(node, _context())


def _context() -> onnx.checker.C.CheckerContext:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {"": 24, ops.DOMAIN: ops.OPSET}
    return context


def test_only_the_guarded_branch_holds_eviction_nodes(engines: Engines) -> None:
    """A step without evictions must not pay for one."""
    model = onnx.load(engines.package("nexus") / GRAPH, load_external_data=False)
    assert {n.domain for n in model.graph.node} == {"", "com.microsoft"}
    (guard,) = [n for n in model.graph.node if n.op_type == "If"]
    branches = {a.name: a.g for a in guard.attribute}
    then = [n.op_type for n in branches["then_branch"].node if n.domain == ops.DOMAIN]
    assert sorted(then) == [
        "NexusScore",
        "PhiloxUniform",
        "ReservoirSelect",
        "WindowMass",
        "WindowMass",
    ]
    assert {n.op_type for n in branches["else_branch"].node} <= {"Constant", "Identity"}
    for node in branches["then_branch"].node:
        if node.domain == ops.DOMAIN:
            assert {a.name for a in node.attribute} == {
                a.name for a in ops.TABLE[node.op_type].attrs
            }


def test_the_portable_graph_is_standard_onnx_but_for_eviction(engines: Engines) -> None:
    path = engines.package("nexus", build_options={"attention": "portable"})
    model = onnx.load(path / GRAPH, load_external_data=False)
    assert {n.domain for n in model.graph.node} == {""}
    assert {o.domain: o.version for o in model.opset_import}[""] == 24


def test_the_full_policy_has_no_eviction_inputs(engines: Engines) -> None:
    full, nexus = (engines(name).manifest for name in ("full", "nexus"))
    extra = {spec.name for spec in nexus.inputs} - {spec.name for spec in full.inputs}
    assert {"evict_slots", "unit_ids", "budget", "eviction_seed", "q_ring_in"} <= extra
    assert {spec.name for spec in full.inputs} <= {spec.name for spec in nexus.inputs}
