"""The adapter for TensorRT-LLM keeps what the oracle keeps: numpy arrays, CPU kernels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kernel_cases import DTYPES
from numpy.typing import NDArray
from reference import REFERENCE
from runners import cpu_kernels

from kvsift.builder.errors import UsageError
from kvsift.builder.ops import HEAD_REDUCE
from kvsift.builder.policies import resolve
from kvsift.runtime.seeds import request_seed, seed_words
from kvsift.runtime.trtllm import SparseKv

Array = NDArray[Any]
HQ, HKV, D = 4, 2, 16
BUDGET = 24
NEXUS = {"block_size": 4, "window": 5}
POLICIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "snapkv": ("snapkv", {}, {"window": 6}),
    "snapkv-sinks": ("snapkv", {}, {"window": 6, "sink_units": 3, "group_reduce": "max"}),
    "snapkv-reservoir": ("snapkv", {"selector": "reservoir"}, {"window": 6, "draws": 3}),
    "nexus": ("nexus", {}, NEXUS),
    "nexus-per-head": ("nexus", {}, NEXUS | {"head_reduce": "per_head"}),
    "nexus-topk": ("nexus", {}, NEXUS | {"prefill_selector": "topk"}),
}
#: Below, at and above the budget; with and without a partial tail; one and three sequences.
LENS = [(61,), (64, 24, 9), (25, 70, 43)]


@dataclass
class Metadata:
    """The fields of TensorRT-LLM's TrtllmAttentionMetadata that are read."""

    num_contexts: int
    seq_lens: Any
    kv_lens: Any = None
    request_ids: list[int] = field(default_factory=lambda: [7, 3, 12, 40])


def adapter(policy: str = "snapkv", budget: int = BUDGET, **given: Any) -> SparseKv:
    eviction, parts, options = POLICIES[policy]
    sizes = {"num_heads": HQ, "num_kv_heads": HKV, "head_dim": D} | given
    resolved = resolve(eviction, **parts, options=options)
    return SparseKv(resolved, budget, kernels=cpu_kernels(), layer_idx=2, seed=5, **sizes)


def qk(tokens: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    rng = np.random.default_rng(tokens)
    made = [rng.standard_normal((tokens, heads * D)).astype(dtype) for heads in (HQ, HKV)]
    return made[0], made[1]


def expected(policy: str, q: Array, k: Array, request: int) -> list[list[int]]:
    """The positions that each KV head keeps of one prompt, by the oracle."""
    eviction, parts, given = POLICIES[policy]
    n, block, window = len(q), given.get("block_size", 1), given["window"]
    if n <= BUDGET:
        return [list(range(n))] * HKV
    shared = eviction == "nexus" and given.get("head_reduce") != "per_head"
    ids = np.tile(np.arange(-(-n // block)), (1, 1, 1 if shared else HKV, 1))
    x = {"q_window": q[None, -window:], "keys": k.reshape(1, n, HKV, D).transpose(0, 2, 1, 3)}
    x |= {"unit_ids": ids[0], "tokens_seen": np.array([n]), "evict_slots": np.array([0])}
    if eviction == "snapkv":
        reduce = 2 if given.get("group_reduce") == "max" else 0
        attrs = {"window_reduce": 0, "group_reduce": reduce, "pool_size": 5, "shared": 0}
        score = REFERENCE["WindowScore"](attrs, x)[0][None]
    else:
        reduce = HEAD_REDUCE.index(given.get("head_reduce", "mean_prob"))
        mass = REFERENCE["WindowMass"]({"block_size": block, "head_reduce": reduce}, x)[0]
        attrs = {"walk_steps": 3, "walk_order": 0, "walk_lambda": 0.5, "tie_eps": 1e-6}
        walk = x | {"mass": mass[None], "unit_ids": ids}
        score = REFERENCE["NexusScore"](attrs | {"block_size": block}, walk)[0]
    recent, sinks = -(-window // block), given.get("sink_units", 0 if eviction == "snapkv" else 1)
    select = {"block_size": block, "sink_units": sinks, "recent_units": recent}
    select |= {"score_is_mass": 1, "normalize": int(eviction == "snapkv")}
    y = {"score": score, "unit_ids": ids, "tokens_seen": np.array([n])}
    y |= {"budget": np.full(ids.shape[:3], BUDGET // block), "pin_spans": np.zeros((1, 0, 2))}
    topk = given.get("prefill_selector") or (eviction == "snapkv" and not parts)
    if not topk:
        seed = seed_words([request_seed(request_seed(5, 2), request)])
        draws = {"draws": given.get("draws", 5), "heads_per_layer": HKV}
        y["u"] = REFERENCE["PhiloxUniform"](draws, y | {"seed": seed, "step": np.array([0])})[0]
    keep = REFERENCE["TopKSelect" if topk else "ReservoirSelect"](select, y)[0][0, 0]
    rows = [
        [t for unit in row if unit >= 0 for t in range(unit * block, min(n, (unit + 1) * block))]
        for row in keep
    ]
    return rows * HKV if shared else rows


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_sequence_keeps_what_the_oracle_keeps(policy: str, lens: tuple[int, ...]) -> None:
    q, k = qk(sum(lens) + 1)  # and a sequence in generation
    metadata = Metadata(len(lens), np.array([*lens, 1]), np.array([*lens, 30]))
    indices, offsets = adapter(policy).sparse_kv_predict(q, k, metadata, None)
    assert indices.dtype == offsets.dtype == np.int32
    assert indices.shape == (HKV, offsets[-1])
    assert len(offsets) == len(lens) + 1
    start = 0
    for i, n in enumerate(lens):
        rows = slice(start, start + n)
        got = indices[:, offsets[i] : offsets[i + 1]].tolist()
        assert got == expected(policy, q[rows], k[rows], metadata.request_ids[i])
        assert len(got[0]) <= BUDGET
        start += n


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_qkv_gives_what_q_and_k_give(dtype: str) -> None:
    q, k = qk(90, DTYPES[dtype])
    metadata, layer = Metadata(2, [40, 50]), adapter()
    split = layer.sparse_kv_predict(q, k, metadata)
    packed = layer.sparse_kv_predict(np.concatenate([q, k, k], axis=1), None, metadata)
    for ours, theirs in zip(packed, split, strict=True):
        assert np.array_equal(ours, theirs)


def test_a_sequence_keeps_the_same_beside_others() -> None:
    q, k = qk(120)
    layer = adapter("nexus")
    indices, offsets = layer.sparse_kv_predict(q, k, Metadata(2, [50, 70]))
    alone = Metadata(1, [70], request_ids=[3])
    assert np.array_equal(
        layer.sparse_kv_predict(q[50:], k[50:], alone)[0], indices[:, offsets[1] :]
    )


def test_generation_alone_predicts_nothing() -> None:
    q, k = qk(2)
    assert adapter().sparse_kv_predict(q, k, Metadata(0, [1, 1])) == (None, None)


GOOD = Metadata(1, [40])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"metadata": object()}, "num_contexts"),
        ({"metadata": Metadata(2, [40])}, "seq_lens has 1 values and there are 2"),
        ({"metadata": Metadata(1, [0])}, r"seq_lens\[0\] is 0"),
        ({"metadata": Metadata(1, [40], [60])}, "brings 40 of its 60 tokens"),
        ({"metadata": Metadata(1, [41])}, "num_tokens >= 41"),
        ({"k": None}, "packed QKV"),
        ({"k": qk(40)[1][:, 1:]}, r"k has the shape \[40, 31\]"),
        ({"k": qk(40)[1].astype(np.float16)}, "both must have one type"),
        ({"q": qk(40)[0].astype(np.int8)}, "type int8"),
    ],
)
def test_bad_input_is_one_clear_error(given: dict[str, Any], reason: str) -> None:
    q, k = qk(40)
    with pytest.raises(UsageError, match=reason) as caught:
        adapter().sparse_kv_predict(**{"q": q, "k": k, "metadata": GOOD} | given)
    assert "\n" not in str(caught.value)


def test_policies_and_budgets_that_do_not_fit_are_refused() -> None:
    sizes = {"num_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "kernels": cpu_kernels()}
    for name in ("nestedkv", "adakv", "pyramidkv", "full"):
        with pytest.raises(UsageError, match="does not fit here"):
            SparseKv(resolve(name), 4096, **sizes)
    with pytest.raises(UsageError, match="give 6 or more"):
        adapter(budget=5)
    with pytest.raises(UsageError, match="multiple of num_kv_heads"):
        adapter(num_heads=3)


def test_the_adapter_needs_neither_torch_nor_tensorrt_llm() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['tensorrt_llm'] = None\n"
        "import kvsift.runtime.trtllm"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
