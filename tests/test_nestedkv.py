"""What the key-only scorers must do: NestedKV, and KeyDiff and the key norm beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import REFERENCE
from reference_keys import anomaly, blend_weights, current, episodic, min_max, unit
from runners import IMPLEMENTATIONS

from kvsift.builder import ops
from kvsift.builder.bodies import Dims, body
from kvsift.builder.errors import UsageError
from kvsift.builder.policies import resolve

Array = NDArray[Any]

KEY_OPS = ("KNormScore", "KeyDiffScore", "NestedKVScore")
SMALL: dict[str, ops.Value] = {"window": 5, "block_div": 8, "block_min": 6, "block_max": 12}

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def inputs(keys: Array, counts: Any = None, slots: Sequence[int] | None = None) -> dict[str, Array]:
    """Inputs of a scorer: keys [B,Hkv,C,D], valid units [E,Hkv] (all of C by default)."""
    picked = list(range(len(keys))) if slots is None else list(slots)
    heads, capacity = keys.shape[1:3]
    lens = np.full((len(picked), heads), capacity) if counts is None else np.asarray(counts)
    units = np.arange(max(1, lens.max(initial=1)))
    ids = np.where(units < lens[:, :, None], units, -1)
    return {
        "keys": keys.astype(np.float32),
        "unit_ids": ids.astype(np.int32),
        "evict_slots": np.array(picked, np.int32),
    }


def score(implementation: str, op: str, x: dict[str, Array], **attrs: ops.Value) -> Array:
    """Scores [E,Hkv,N] with the default attributes but for `attrs`."""
    dims = Dims(4, x["keys"].shape[1], x["keys"].shape[3], 6)
    merged = ops.TABLE[op].defaults() | attrs
    return IMPLEMENTATIONS[implementation](op, merged, dims, x)[0]


def drifting(seed: int, *shape: int) -> Array:
    """Keys like a model's: a common direction, a slow drift, and noise."""
    rng = np.random.default_rng(seed)
    drift = np.cumsum(rng.standard_normal(shape), axis=2) * 0.05
    return rng.standard_normal((*shape[:2], 1, shape[3])) + drift + rng.standard_normal(shape)


@every
@pytest.mark.parametrize("op", KEY_OPS)
@pytest.mark.parametrize("units", [1000, 6500, 8192])
def test_scores_at_size(implementation: str, op: str, units: int) -> None:
    """Long rows keep their bits: several blocks, the last of them ragged (6500 = 32 * 203 + 4)."""
    x = inputs(drifting(units, 1, 2, units, 16))
    got = score(implementation, op, x)
    want = REFERENCE[op](ops.TABLE[op].defaults(), x)[0]
    np.testing.assert_allclose(got, want, atol=5e-6, rtol=1e-6)


@every
@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 60), min_size=6, max_size=6),
    seed=st.integers(0, 99),
    spare=st.integers(0, 40),
    window=st.integers(1, 70),
    block=st.integers(1, 20),
)
def test_ragged_rows_match_the_oracle(
    implementation: str, counts: list[int], seed: int, spare: int, window: int, block: int
) -> None:
    """Rows of different lengths, shorter than the window or longer, garbage behind each."""
    lens = np.array(counts).reshape(3, 2)
    keys = drifting(seed, 4, 2, max(1, lens.max()) + spare, 8)
    slots = [2, 0, 3]
    for e, r in np.ndindex(3, 2):
        keys[slots[e], r, lens[e, r] :] = [np.nan, np.inf, 1e30][(e + r) % 3]
    keys[1] = np.nan
    x = inputs(keys, lens, slots)
    attrs: dict[str, ops.Value] = {"window": window, "block_min": block, "block_div": 4}
    for op in KEY_OPS:
        mine = attrs if op == "NestedKVScore" else {}
        got = score(implementation, op, x, **mine)
        want = REFERENCE[op](ops.TABLE[op].defaults() | mine, x)[0]
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


@every
@pytest.mark.parametrize("op", KEY_OPS)
@pytest.mark.parametrize("units", [1, 7, 64, 130, 192, 257, 340, 448, 660])
def test_a_slot_is_scored_alone_as_in_a_batch(implementation: str, op: str, units: int) -> None:
    """No bit depends on other slots, on the capacity, or on what lies behind a row."""
    keys = drifting(units, 3, 2, 1100, 16)
    small = {"block_min": 9, "block_div": 20} if op == "NestedKVScore" else {}
    lens = np.array([[1100, 311], [units, units], [64, 699]])
    batch = score(implementation, op, inputs(keys, lens), **small)[1, :, :units]
    mine = keys[1:2]
    alone = score(implementation, op, inputs(mine[:, :, :units]), **small)[0]
    assert np.array_equal(batch, alone)
    for garbage in (0.0, 1e30, np.inf, np.nan):
        rows = mine[:, :, : units + 70].copy()
        rows[:, :, units:] = garbage
        behind = score(implementation, op, inputs(rows, [[units, units]]), **small)
        assert np.array_equal(behind[0], alone)


@every
@settings(max_examples=20)
@given(units=st.integers(1, 150), seed=st.integers(0, 99))
def test_without_its_parts_it_is_keydiff(implementation: str, units: int, seed: int) -> None:
    x = inputs(drifting(seed, 2, 2, units, 8))
    off: dict[str, ops.Value] = {"continuum": 0, "adaptive": 0, "gate": 0}
    plain = score(implementation, "NestedKVScore", x, **off, **SMALL)
    keydiff = score(implementation, "KeyDiffScore", x)
    if implementation == "onnx":
        assert np.array_equal(plain, keydiff)
    else:  # kernels of their own, which sum in another order
        np.testing.assert_allclose(plain, keydiff, rtol=0, atol=1e-6)


@every
@settings(max_examples=30)
@given(
    units=st.integers(1, 80), seed=st.integers(0, 99), adaptive=st.booleans(), gate=st.booleans()
)
def test_scores_lie_between_0_and_1(
    implementation: str, units: int, seed: int, adaptive: bool, gate: bool
) -> None:
    x = inputs(drifting(seed, 2, 2, units, 8))
    switches: dict[str, ops.Value] = {"adaptive": int(adaptive), "gate": int(gate)}
    got = score(implementation, "NestedKVScore", x, **switches, **SMALL)
    rounding = 0.0 if implementation == "onnx" else 1e-6
    assert ((got >= -rounding) & (got <= 1 + rounding)).all()
    if units == 1:  # one unit is like itself at every scale
        assert (got == 0).all()


@every
def test_constant_and_zero_keys_are_finite(implementation: str) -> None:
    keys = np.ones((2, 2, 300, 8))
    keys[1] = 0.0
    x = inputs(keys)
    assert (score(implementation, "NestedKVScore", x) == 0).all()
    np.testing.assert_allclose(score(implementation, "KeyDiffScore", x)[0], -1.0, atol=1e-6)
    assert (score(implementation, "KeyDiffScore", x)[1] == 0).all()


@every
def test_the_length_of_keys_does_not_matter(implementation: str) -> None:
    keys = drifting(3, 1, 2, 200, 8)
    factor = np.exp2(np.random.default_rng(0).integers(-8, 9, (1, 2, 200, 1)))
    for op in ("KeyDiffScore", "NestedKVScore"):
        plain, longer = (score(implementation, op, inputs(k)) for k in (keys, keys * factor))
        np.testing.assert_allclose(longer, plain, atol=1e-6)


@every
@pytest.mark.parametrize(("units", "size"), [(100, 100), (4200, 131), (9000, 256)])
def test_episodic_blocks_are_clipped(implementation: str, units: int, size: int) -> None:
    """Block = clip(floor(N / 32), 128, 256): a change of direction shows where a block ends."""
    alone: dict[str, ops.Value] = {"prior_stable": 0.0, "prior_current": 0.0, "gate": 0}
    keys = np.zeros((1, 1, units, 4))
    keys[..., 0] = 1.0
    last = (units - 1) // size * size
    keys[:, :, last:, 1] = 5.0  # the last block is of one direction, another than the rest
    keys[:, :, 0, 2] = 0.5  # something to scale by
    got = score(implementation, "NestedKVScore", inputs(keys), **alone)[0, 0]
    assert got.argmax() == 0
    np.testing.assert_allclose(got[last:] if last else got[1:], got[-1], atol=1e-5)
    if last:
        keys[:, :, last - 1, 1] = 5.0  # the same key one place earlier is alone in its block
        moved = score(implementation, "NestedKVScore", inputs(keys), **alone)[0, 0]
        assert moved.argmax() == last - 1


@every
def test_episodic_memory_finds_what_the_stable_one_misses(implementation: str) -> None:
    """A key of the document's main direction inside a long passage about something else."""
    rng = np.random.default_rng(0)
    keys = 0.05 * rng.standard_normal((1, 1, 1024, 8))
    keys[..., 0] += 1.0
    passage, planted = slice(512, 640), 600
    keys[:, :, passage, :2] += [-1.0, 1.0]
    keys[:, :, planted, :2] += [1.0, -1.0]
    stable = score(implementation, "KeyDiffScore", inputs(keys))[0, 0]
    assert (stable[planted] < np.delete(stable[passage], planted - 512)).all()
    assert (stable > stable[planted]).sum() > 128
    plain: dict[str, ops.Value] = {"adaptive": 0, "gate": 0}
    only = plain | {"prior_stable": 0.0, "prior_current": 0.0}
    episode = score(implementation, "NestedKVScore", inputs(keys), **only)[0, 0]
    assert episode.argmax() == planted
    whole = score(implementation, "NestedKVScore", inputs(keys))[0, 0]
    assert whole[planted] > np.median(whole[passage])


@every
def test_current_memory_sees_the_newest_window_only(implementation: str) -> None:
    """A change of direction is news for as long as the window is mostly older."""
    keys = np.zeros((1, 1, 400, 4))
    keys[:, :, :200, 0] = keys[:, :, 200:, 1] = 1.0
    alone: dict[str, ops.Value] = {"prior_stable": 0.0, "prior_episodic": 0.0, "gate": 0}
    got = score(implementation, "NestedKVScore", inputs(keys), **alone)[0, 0]
    assert got.argmax() == 200
    assert (np.diff(got[200:264]) < 0).all()
    np.testing.assert_allclose(np.delete(got, slice(200, 263)), 0.0, atol=1e-6)


@every
def test_gate_opens_on_disagreement_only(implementation: str) -> None:
    """Where the memories agree the gate changes little; where one stands alone it wins."""
    keys = drifting(11, 1, 1, 600, 8)
    keys[:, :, 300:, :2] += [6.0, -4.0]
    x = inputs(keys)
    base = ops.TABLE["NestedKVScore"].defaults()
    k = unit(x["keys"][0, 0].astype(np.float64))
    memories = (np.broadcast_to(k.mean(axis=0), k.shape), episodic(base, k), current(64, k))
    a = np.array([min_max(anomaly(k, memory)) for memory in memories])
    blend, strongest = blend_weights(base, a) @ a, a.max(axis=0)
    sharp: dict[str, ops.Value] = {"kappa": 400.0, "tau": 0.3}
    got = score(implementation, "NestedKVScore", x, **sharp)[0, 0]
    s = min_max(a.std(axis=0))
    above = s - s.mean()
    open_, shut = above > 0.33, above < 0.27
    assert open_.any()
    assert shut.any()
    np.testing.assert_allclose(got[open_], strongest[open_], atol=1e-4)
    np.testing.assert_allclose(got[shut], blend[shut], atol=1e-4)
    closed = score(implementation, "NestedKVScore", x, gate=0)[0, 0]
    np.testing.assert_allclose(closed, blend, atol=1e-5)


@every
def test_blend_leans_to_the_scale_that_tells_units_apart(implementation: str) -> None:
    """With beta the weights move from the prior; a scale that is flat loses its share."""
    keys = np.zeros((1, 1, 200, 4))  # one block: the stable and the episodic memory agree
    keys[..., 0] = 1.0
    keys[:, :, ::10, 1] = 1.0
    x = inputs(keys)
    scores = [score(implementation, "NestedKVScore", x, gate=0, adaptive=v)[0, 0] for v in (0, 1)]
    want = [
        REFERENCE["NestedKVScore"](ops.TABLE["NestedKVScore"].defaults() | {"gate": 0, **v}, x)[0]
        for v in ({"adaptive": 0}, {"adaptive": 1})
    ]
    for ours, theirs in zip(scores, want, strict=True):
        np.testing.assert_allclose(ours, theirs[0, 0], atol=1e-5)
    assert not np.allclose(*scores, atol=1e-4)


def test_policies_of_keys() -> None:
    nested, keydiff, knorm = (resolve(name) for name in ("nestedkv", "keydiff", "knorm"))
    assert nested.layout == "head"
    assert keydiff.layout == knorm.layout == "sequence"
    assert all(p.per_head and p.scope == "prefill" for p in (nested, keydiff, knorm))
    assert (nested.sink_units, keydiff.sink_units, knorm.sink_units) == (4, 0, 0)
    assert nested.recent_units == 0
    assert resolve("nestedkv", selector="topk").layout == "sequence"
    assert resolve("nestedkv", selector="reservoir").selector == "reservoir"
    off = resolve("nestedkv", options={"gate": "off", "adaptive": 0, "continuum": "false"})
    assert [off.scorer_options[k] for k in ("gate", "adaptive", "continuum")] == [0, 0, 0]
    given = nested.scorer_options | nested.selector_options
    for op in ("NestedKVScore", "HeadTopKSelect"):
        for attr in ops.TABLE[op].attrs:
            assert given.get(attr.name, attr.default) == attr.default, attr.name
    assert {a.name for a in ops.TABLE["NestedKVScore"].attrs} == set(nested.scorer_options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"block_min": 300}}, "block_min 300 is above block_max 256"),
        ({"options": {f"prior_{m}": 0 for m in ("stable", "episodic", "current")}}, "priors are 0"),
        ({"options": {"tail": 0.9}}, "tail=0.9: input should be less than or equal to 0.5"),
        ({"options": {"block_size": 32}}, "block_size must be 1"),
        ({"options": {"continuum": 0}, "selector": "reservoir"}, "negative ones"),
        ({"options": {"max_head_ratio": "nan"}}, "max_head_ratio"),
    ],
)
def test_bad_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve("nestedkv", **change)


def test_scores_that_go_negative_are_no_weights() -> None:
    for name in ("keydiff", "knorm"):
        with pytest.raises(UsageError, match="positive weights"):
            resolve(name, selector="reservoir")
    zero = {f"prior_{m}": 0.0 for m in ("stable", "episodic", "current")}
    attrs = ops.TABLE["NestedKVScore"].defaults() | zero
    with pytest.raises(UsageError, match="priors are 0"):
        body("NestedKVScore", attrs, Dims(4, 2, 8, 6))
