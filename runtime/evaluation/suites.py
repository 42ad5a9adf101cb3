"""What is compared with what: named sets of variants, and the pairs that answer a question."""

from __future__ import annotations

import itertools
from dataclasses import replace

from kvsift.builder.errors import unknown_name
from kvsift.runtime.evaluation.variants import Option, Spec

MODES = ("mean_qk", "mean_prob", "per_head")
#: The setting that the paper describes, to which all others are compared.
PAPER = "mean_qk/walk/reservoir"


def _nexus(mode: str, walk: bool, selector: str) -> Spec:
    name = f"{mode}/{'walk' if walk else 'no-walk'}/{selector}"
    options: dict[str, Option] = {"head_reduce": mode}
    if not walk:
        options["walk_steps"] = 0
    return Spec(name, "nexus", selector, options)


def _prefill_topk(mode: str) -> Spec:
    options: dict[str, Option] = {"head_reduce": mode, "prefill_selector": "topk"}
    return Spec(f"{mode}/walk/prefill-topk", "nexus", "reservoir", options)


_GRID = [
    _nexus(m, w, s) for m, w, s in itertools.product(MODES, (True, False), ("reservoir", "topk"))
]
_RANDOM_BLOCKS = Spec(
    "random-blocks", "random", options={"block_size": 32, "sink_units": 1, "recent_units": 1}
)
_ANCHORS = [Spec("full", "full"), Spec("streaming", "streaming")]
_RANDOM_TOKENS = Spec("random-tokens", "random")
_SMALL_BLOCKS = Spec(
    "per_head/walk/topk, blocks of 8",
    "nexus",
    "topk",
    {"head_reduce": "per_head", "block_size": 8},
)

#: One eviction at a prompt's end cannot tell prefill_selector=topk from selector topk, so only one
#: mode shows it there.
ONE_SHOT = [
    *_GRID,
    _prefill_topk("mean_prob"),
    _SMALL_BLOCKS,
    *_ANCHORS,
    _RANDOM_BLOCKS,
    _RANDOM_TOKENS,
]
STREAM = [
    *(s for s in _GRID if "/walk/" in s.name),
    *(_prefill_topk(m) for m in MODES),
    *_ANCHORS,
    # By itself it would stop evicting at the prompt's end and keep more than the others.
    replace(_RANDOM_BLOCKS, scope="both"),
]

#: Every policy as `--eviction NAME` builds it, and what this project changes about two papers.
POLICIES = [
    Spec("full", "full"),
    Spec("nexus", "nexus"),
    Spec("nexus as published", "nexus", options={"head_reduce": "mean_qk"}),
    Spec("nexus, prefill topk", "nexus", options={"prefill_selector": "topk"}),
    Spec("nestedkv", "nestedkv"),
    Spec("nestedkv, newest 32", "nestedkv", options={"recent_units": 32}),
    *(Spec(name, name) for name in ("snapkv", "adakv", "pyramidkv", "tova", "h2o", "morphkv")),
    *(Spec(name, name) for name in ("expected_attention", "keydiff", "knorm", "streaming")),
    _RANDOM_BLOCKS,
    _RANDOM_TOKENS,
]


def _changed(**options: Option) -> Spec:
    return Spec(f"nexus {' '.join(f'{k}={v}' for k, v in options.items())}", "nexus", None, options)


#: Values beside the default of each of Nexus' parameters.
SWEEPS: dict[str, list[Spec]] = {
    "walk_steps": [_changed(walk_steps=n) for n in (0, 1, 5)],
    "walk_lambda": [_changed(walk_lambda=x) for x in (0.1, 1.0, 2.0)],
    "window": [_changed(window=n) for n in (4, 8, 32, 64)],
    "block_size": [_changed(block_size=n) for n in (1, 8, 16, 64)],
    "draws": [_changed(draws=n) for n in (1, 20)],
    "head_reduce": [_changed(head_reduce=m) for m in ("mean_qk", "per_head")],
}
_TOKENS: dict[str, Option] = {"head_reduce": "per_head", "block_size": 1, "sink_units": 4}
#: From the published Nexus to SnapKV, one part at a time: score, selector, unit, window, pool.
NEXUS_LADDER = [
    Spec("nexus as published", "nexus", None, {"head_reduce": "mean_qk"}),
    Spec("+ mean of probabilities", "nexus"),
    Spec("+ one set per head", "nexus", None, {"head_reduce": "per_head"}),
    Spec("+ topk for the reservoir", "nexus", "topk", {"head_reduce": "per_head"}),
    Spec("+ tokens for blocks", "nexus", "topk", _TOKENS),
    Spec("+ no walk", "nexus", "topk", {**_TOKENS, "walk_steps": 0}),
    Spec("+ window of 64", "nexus", "topk", {**_TOKENS, "walk_steps": 0, "window": 64}),
    Spec("snapkv", "snapkv"),
]
#: From KeyDiff to NestedKV, one part at a time, and what its missing recency costs.
NESTED_LADDER = [
    Spec("keydiff", "keydiff"),
    Spec("+ 4 sinks", "keydiff", options={"sink_units": 4}),
    Spec("+ three scales", "nestedkv", "topk", {"adaptive": "off", "gate": "off"}),
    Spec("+ weights per head", "nestedkv", "topk", {"gate": "off"}),
    Spec("+ gate", "nestedkv", "topk"),
    Spec("nestedkv (+ heads compete)", "nestedkv"),
    Spec("+ newest 32 forced", "nestedkv", options={"recent_units": 32}),
]
#: Score and selector apart: the same score under both selectors.
APART = [
    Spec("nexus score, topk", "nexus", "topk"),
    Spec("snapkv score, reservoir", "snapkv", "reservoir"),
    Spec("h2o score, topk", "h2o", scope="prefill"),
    Spec("h2o score, reservoir", "h2o", "reservoir", scope="prefill"),
    _RANDOM_BLOCKS,
]
ABLATION = list(
    {
        spec.name: spec
        for spec in (
            Spec("full", "full"),
            Spec("nexus", "nexus"),
            *itertools.chain(*SWEEPS.values()),
            *NEXUS_LADDER,
            *NESTED_LADDER,
            *APART,
        )
    }.values()
)
#: Sampled policies, whose spread over eviction seeds `seeds` measures.
SAMPLED = [
    Spec("nexus", "nexus"),
    Spec("nexus as published", "nexus", options={"head_reduce": "mean_qk"}),
    Spec("nexus, one draw", "nexus", options={"draws": 1}),
    Spec("snapkv score, reservoir", "snapkv", "reservoir"),
    _RANDOM_BLOCKS,
]
SUITES = {
    "policies": POLICIES,
    "grid": ONE_SHOT,
    "stream": STREAM,
    "ablation": ABLATION,
    "sampled": SAMPLED,
}

Pairs = list[tuple[str, str]]


def _steps(ladder: list[Spec]) -> Pairs:
    return [(b.name, a.name) for a, b in itertools.pairwise(ladder)]


#: Pairs (a, b) whose difference a - b answers one question each.
CONTRASTS: dict[str, Pairs] = {
    "head_reduce": [
        (f"{a}/walk/{s}", f"{b}/walk/{s}")
        for s in ("reservoir", "topk")
        for a, b in (("mean_prob", "mean_qk"), ("per_head", "mean_qk"), ("per_head", "mean_prob"))
    ],
    "walk": [(f"{m}/walk/{s}", f"{m}/no-walk/{s}") for m in MODES for s in ("reservoir", "topk")],
    "selector": [(f"{m}/walk/topk", f"{m}/walk/reservoir") for m in MODES],
    "prefill_selector": [
        *((f"{m}/walk/prefill-topk", f"{m}/walk/reservoir") for m in MODES),
        *((f"{m}/walk/prefill-topk", f"{m}/walk/topk") for m in MODES),
    ],
    "random": [(f"{m}/walk/reservoir", "random-blocks") for m in MODES],
    "Nexus against the baselines": [
        *(("nexus", name) for name in ("snapkv", "tova", "h2o", "streaming", "random-blocks")),
        ("nexus, prefill topk", "nexus"),
        ("nexus", "nexus as published"),
    ],
    "NestedKV against the baselines": [
        *(("nestedkv", name) for name in ("snapkv", "expected_attention", "keydiff", "streaming")),
        ("nestedkv, newest 32", "nestedkv"),
    ],
    **{f"Nexus: {name}": [(s.name, "nexus") for s in found] for name, found in SWEEPS.items()},
    "from Nexus to SnapKV, a part at a time": _steps(NEXUS_LADDER),
    "from KeyDiff to NestedKV, a part at a time": _steps(NESTED_LADDER),
    "score and selector apart": [
        ("nexus score, topk", "nexus"),
        ("snapkv", "snapkv score, reservoir"),
        ("h2o score, topk", "h2o score, reservoir"),
        ("nexus", "random-blocks"),
    ],
}


def suite(name: str) -> list[Spec]:
    """Return the variants of a suite; UsageError for an unknown name."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]


def reference(asked: str | None, specs: list[Spec]) -> str:
    """Return the variant that others are compared to: ours, or the paper's in its grid.

    UsageError if another one is asked for that does not run.
    """
    names = [spec.name for spec in specs]
    if asked is not None and asked not in names:
        raise unknown_name("reference", asked, names)
    return asked or next((name for name in ("nexus", PAPER) if name in names), names[0])


def pick(specs: list[Spec], names: list[str]) -> list[Spec]:
    """Return the specs called `names`, all if there are none; UsageError for an unknown name."""
    known = [spec.name for spec in specs]
    for name in names:
        if name not in known:
            raise unknown_name("variant", name, known)
    return [spec for spec in specs if not names or spec.name in names]
