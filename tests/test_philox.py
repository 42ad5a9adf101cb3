"""PhiloxUniform: known answers, and draws that depend on a request's own seed and history only."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_philox import philox4x32
from runners import IMPLEMENTATIONS
from scipy.stats import chisquare

from kvsift.builder import ops
from kvsift.builder.bodies import Dims, philox_uniform
from kvsift.builder.bodies.tools import Body

DIMS = Dims(4, 2, 8, 6)
ATTRS = ops.TABLE["PhiloxUniform"].defaults() | {"heads_per_layer": 2}
#: Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a8885a308d313198a2e03707344",
        "a4093822299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def words(text: str) -> list[int]:
    """Split hexadecimal text into 32-bit words."""
    text = text.replace(" ", "")
    return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]


def split_seed(seed: int) -> list[int]:
    """A 64-bit seed as int32 [2], low word first."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32).tolist()


def draw(implementation: str, ids: Any, seeds: list[int], steps: list[int]) -> NDArray[np.float32]:
    """Run the op."""
    inputs = {
        "unit_ids": np.array(ids, np.int32),
        "seed": np.array([split_seed(s) for s in seeds], np.int32),
        "step": np.array(steps, np.int32),
    }
    u: NDArray[Any] = IMPLEMENTATIONS[implementation]("PhiloxUniform", ATTRS, DIMS, inputs)[0]
    return u.astype(np.float32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(implementation: str, counter: str, key: str, expected: str) -> None:
    """The oracle and the body's generator give Random123's vectors."""
    c, k = words(counter), words(key)
    assert philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1])) == words(expected)
    if implementation != "onnx":
        return  # the op's counters cannot be set freely; test_op_matches_oracle covers the rest
    names = ("c0", "c1", "c2", "c3", "k0", "k1")
    raw = ops.Op(
        "Raw",
        "",
        tuple(ops.Tensor(n, "int32", (), "") for n in names),
        tuple(ops.Tensor(f"w{i}", "int32", (), "") for i in range(4)),
        (),
        "",
        "",
    )
    b = Body(raw)
    values = [b.input(n) for n in names]
    out = philox_uniform.philox(b, values[:4], values[4:])
    kind = ir.TensorType(ir.DataType.UINT64)
    inputs = [ir.Value(name=n, type=kind, shape=ir.Shape([])) for n in names]
    outputs = [ir.Value(name=f"out{i}", type=kind) for i in range(4)]
    node = ir.node("Raw", inputs, {}, domain=ops.DOMAIN, outputs=outputs)
    imports = {"": 24, ops.DOMAIN: ops.OPSET}
    graph = ir.Graph(inputs, outputs, nodes=[node], opset_imports=imports, name="raw")
    model = ir.to_proto(ir.Model(graph, ir_version=11, functions=[b.finish(out)]))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {n: np.array(v, np.uint64) for n, v in zip(names, c + k, strict=True)}
    assert [int(w) for w in session.run(None, feeds)] == words(expected)


def test_seeds_of_the_whole_range_differ(implementation: str) -> None:
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1]
    ids = np.tile(np.arange(9), (1, len(seeds), 1, 1))
    u = draw(implementation, ids, seeds, [0] * len(seeds))
    assert len({row.tobytes() for row in u[0]}) == len(seeds)
    assert u.min() > 0
    assert u.max() < 1


def test_layers_heads_steps_and_draws_use_counters_of_their_own(implementation: str) -> None:
    ids = np.tile(np.arange(50), (3, 2, 2, 1))  # 3 layers, 2 steps of one seed, 2 heads
    u = draw(implementation, ids, [7, 7], [0, 1])
    # 3 * 2 * 2 * 5 * 50 values of 23 bits: a shared counter would repeat 50 of them at once.
    assert u.size - len(np.unique(u)) < 10


@given(data=st.data(), seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**31 - 1))
def test_draws_follow_the_unit_not_the_place(
    implementation: str, data: st.DataObject, seed: int, step: int
) -> None:
    """A request draws the same alone, in any slot, and wherever its units lie."""
    ids = data.draw(st.lists(st.integers(0, 10**6), min_size=4, max_size=4, unique=True))
    order = data.draw(st.permutations(range(4)))
    slot = data.draw(st.integers(0, 2))
    alone = draw(implementation, [[[ids]]], [seed], [step])
    batch = np.zeros((1, 3, 1, 6), np.int32)
    batch[0, slot, 0, :4] = [ids[i] for i in order]
    seeds, steps = [1, 2, 3], [4, 5, 6]
    seeds[slot], steps[slot] = seed, step
    together = draw(implementation, batch, seeds, steps)
    assert np.array_equal(together[0, slot, 0, :, :4], alone[0, 0, 0][:, order])


def test_draws_are_uniform(implementation: str) -> None:
    ids = np.arange(20000).reshape(1, 1, 1, -1)
    u = draw(implementation, ids, [123], [9])[0, 0, 0]
    for row in u:
        counts = np.histogram(row, bins=64, range=(0, 1))[0]
        assert chisquare(counts).pvalue > 1e-3
    correlation = np.corrcoef(u) - np.eye(len(u))
    assert np.abs(correlation).max() < 4 / np.sqrt(u.shape[1])
