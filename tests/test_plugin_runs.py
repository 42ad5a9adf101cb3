"""Every plugin executed through TensorRT's calls on host memory, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import Case, all_cases
from near_ties import near_ties
from numpy.typing import DTypeLike, NDArray
from plugin_host import Host
from reference import PRIORITY, REFERENCE
from step_scene import cases_of, scene_of

from kvsift.builder import ops
from kvsift.builder.native_ops import NATIVE_OPS

Array = NDArray[Any]
KV_APPEND = next(op for op in NATIVE_OPS if op.name == "KvAppend")
#: Cases that meet what a plugin adds to its kernel: shapes, types, attributes, empty tensors.
NAMES = {"typical", "no-slot", "skipped-slot", "half", "one-unit", "rows", "no-pins"}
STEP_NAMES = {"decode", "heads", "nothing-new", "one-slot"}
MODE_NAMES = {
    "half-mean_qk",
    "half-per_head",
    "no-slot-mean_prob",
    "half-shared1",
    "no-slot-shared0",
}


def chosen(op: ops.Op) -> list[Case]:
    """Seven choices of attributes, and the edges named above."""
    cases = cases_of(op)
    attributes = [c for c in cases if c.name.startswith("attrs")]
    edges = [c for c in cases if c.name in NAMES | STEP_NAMES | MODE_NAMES]
    return [*attributes[:: max(1, len(attributes) // 6)], *edges]


CASES = [case for op in ops.OPS for case in chosen(op)]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.close()


def as_type(inputs: Mapping[str, Array], op: ops.Op, dtype: DTypeLike) -> dict[str, Array]:
    """The inputs with the model's float type changed."""
    kinds = {t.name: t.dtype for t in op.inputs}
    return {k: a.astype(dtype) if kinds[k] == "T" else a for k, a in inputs.items()}


def run(host: Host, case: Case, inputs: Mapping[str, Array]) -> list[Array]:
    """Create, describe, serialise, re-create, attach and enqueue, as an engine's life goes."""
    op = ops.TABLE[case.op]
    assert host.create(op, case.attrs).words
    arrays = [inputs[t.name] for t in op.inputs]
    outputs = host.output_descs(arrays)
    host.ok("recreate")
    host.ok("attach")
    return host.run(arrays, outputs)


def agree(case: Case, inputs: Mapping[str, Array], got: list[Array], exact: float) -> None:
    with np.errstate(invalid="ignore"):
        want = REFERENCE[case.op](case.attrs, {k: widened(a) for k, a in inputs.items()})
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
    if case.op in PRIORITY:
        assert np.array_equal(got[1], want[1])
        priority = PRIORITY[case.op](case.attrs, inputs)
        assert near_ties(got[0], want[0], priority) == 0
        np.testing.assert_allclose(got[2], want[2], rtol=1e-5)
    elif case.op == "PhiloxUniform":
        assert np.array_equal(got[0], want[0])
    else:
        for ours, theirs in zip(got, want, strict=True):
            defined = ~np.isnan(theirs)
            scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
            np.testing.assert_allclose(
                ours[defined], theirs[defined], rtol=exact, atol=0.1 * exact * scale
            )


def widened(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plugin_equals_oracle(host: Host, case: Case) -> None:
    inputs = scene_of(case).inputs()
    agree(case, inputs, run(host, case, inputs), 1e-4)


WITH_FLOATS = [op for op in ops.OPS if any(t.dtype == "T" for t in op.inputs)]


@pytest.mark.parametrize("op", WITH_FLOATS, ids=lambda op: op.name)
def test_plugin_takes_bfloat16(host: Host, op: ops.Op) -> None:
    case = cases_of(op)[0]
    inputs = as_type(scene_of(case).inputs(), op, ml_dtypes.bfloat16)
    agree(case, inputs, run(host, case, inputs), 1e-4)


@pytest.mark.parametrize("name", ["AccumUpdate", "QueryStatsUpdate"])
def test_states_in_place_equal_states_apart(host: Host, name: str) -> None:
    """With and without TensorRT's preview feature for aliased plugin I/O."""
    case = next(c for c in cases_of(ops.TABLE[name]) if c.name == "half")
    op = ops.TABLE[name]
    arrays = list(scene_of(case).inputs().values())
    host.create(op, case.attrs)
    outputs = host.output_descs(arrays)
    together, apart = (host.run(arrays, outputs, mode) for mode in ("aliased", "apart"))
    for one, other in zip(together, apart, strict=True):
        assert np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
def test_kv_append(host: Host, dtype: DTypeLike, heads: int) -> None:
    """Rows land behind those of their slot and head; nothing else of the cache changes."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((4, 3, 12, 16)).astype(dtype)
    rows = rng.standard_normal((4, 3, 5, 16)).astype(dtype)
    past = np.array([[0, 3, 7], [2, 2, 1], [9, 12, 10], [4, 0, 5]], np.int32)[:, :heads]
    new = np.array([5, 1, 5, 0], np.int32)
    want = cache.copy()
    for b, h in np.ndindex(4, 3):
        start = past[b, h % heads]
        count = min(new[b], 12 - start)
        want[b, h, start : start + count] = rows[b, h, :count]
    host.create(KV_APPEND, {})
    arrays = [cache, rows, past, new]
    outputs = host.output_descs(arrays)
    assert outputs == [(np.dtype(dtype), (4, 3, 12, 16))]
    got = host.run(arrays, outputs)[0]
    assert got.tobytes() == want.tobytes()


def test_kv_append_asks_for_aliased_memory(host: Host) -> None:
    """Without the preview feature the cache would have to be copied: an error, not a copy."""
    arrays = [np.zeros((1, 1, 4, 8), np.float32), np.ones((1, 1, 1, 8), np.float32)]
    arrays += [np.zeros((1, 1), np.int32), np.ones(1, np.int32)]
    host.create(KV_APPEND, {})
    with pytest.raises(AssertionError, match="PreviewFeature kALIASED_PLUGIN_IO_10_03"):
        host.run(arrays, host.output_descs(arrays), "apart")


def test_a_kernel_error_is_logged(host: Host) -> None:
    """A head size that is not a multiple of 16 bytes is refused by the kernel, and said."""
    case = all_cases(ops.TABLE["KNormScore"])[0].but(sizes={"D": 7})
    with pytest.raises(AssertionError, match=r"kvsift: KNormScore: kernel failed: .*invalid"):
        run(host, case, scene_of(case).inputs())


def test_engine_life_keeps_attributes(host: Host) -> None:
    """Two plugins of one op with other attributes give other results: no state is shared."""
    op = ops.TABLE["TopKSelect"]
    case = all_cases(op)[0].but(budget=3)
    inputs = scene_of(case).inputs()
    first = run(host, case, inputs)
    other = case.but(attrs=dict(case.attrs) | {"sink_units": 5, "recent_units": 5})
    agree(other, inputs, run(host, other, inputs), 1e-4)
    again = run(host, case, inputs)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True))
