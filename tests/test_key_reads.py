"""How often the kernels read a key: once, or twice where a row statistic must come first.

The CPU build counts every load of 16 bytes; what is not read so is not read at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cases import Case
from kernel_builds import library
from kernel_cases import DTYPES, Hooks, inputs_of
from kernel_run import run_kernel
from runners import cpu_kernels

from kvsift.builder import ops

#: Several tiles, chunks and spans, the last ones cut; more query rows than fit a tile.
SIZES = {"B": 3, "E": 2, "L": 1, "Hq": 6, "Hkv": 2, "D": 64, "N": 1300, "C": 1300, "W": 17, "S": 1}
LENS = (1300, 1171, 900)


@dataclass(frozen=True)
class Reads:
    """An op, and the most loads of each key (or value) that its kernels make."""

    op: str
    most: int
    attrs: Mapping[str, ops.Value] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    tensor: str = "keys"

    def __str__(self) -> str:
        return "-".join([self.op, self.tensor, *map(str, {**self.attrs, **self.sizes}.values())])


BLOCKS = {"N": 41, "C": 41 * 32}
ALL = [
    Reads("KNormScore", 1),
    Reads("WindowMass", 1, {"head_reduce": 0}, BLOCKS),
    Reads("WindowMass", 1, {"head_reduce": 1}, BLOCKS),
    Reads("WindowMass", 1, {"head_reduce": 2, "block_size": 100}, {"R": 2, "N": 13}),
    Reads("ExpectedAttentionScore", 1),
    Reads("ExpectedAttentionScore", 1, {"use_covariance": 0}),
    Reads("ExpectedAttentionScore", 1, tensor="values"),
    Reads("KeyDiffScore", 2),
    # The softmax over a row comes first; few logits are kept, many are made again.
    Reads("WindowScore", 1, sizes={"W": 1}),
    Reads("WindowScore", 2),
    Reads("WindowScore", 2, {"shared": 1}, {"R": 1}),
    Reads("AccumUpdate", 1),
    Reads("AccumUpdate", 2, sizes={"S": 19}),
]


def counted(
    reads: Reads, dtype: str, attrs: Mapping[str, ops.Value] | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Run the op; return the loads of each 16 bytes [B, Hkv, C, pieces], and the rows in use."""
    op = ops.TABLE[reads.op]
    default = {"R": 2} if any("R" in t.shape for t in op.inputs) else {}
    case = Case(
        reads.op,
        "reads",
        op.defaults() | dict(attrs or reads.attrs),
        SIZES | default | ({"R": 1} if "head_reduce" in dict(reads.attrs) else {}) | reads.sizes,
        lens=LENS,
        seen=LENS,
        slots=(2, 0),
        new=(1, 1, 0),
    )
    inputs = inputs_of(case, dtype)
    array = inputs[reads.tensor]
    with Hooks(library("plain")).loads_of(array) as counts:
        run_kernel(cpu_kernels(), reads.op, case.attrs, inputs)
    used = ~np.isnan(array.astype(np.float32)).any(-1)
    if "evict_slots" in inputs:
        active = np.isin(np.arange(len(array)), inputs["evict_slots"])
    else:
        active = inputs["n_new"] > 0
    used &= active[:, None, None]
    return counts.reshape(*array.shape[:3], -1), used


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("reads", ALL, ids=str)
def test_a_key_is_read_no_oftener_than_said(reads: Reads, dtype: str) -> None:
    counts, used = counted(reads, dtype)
    assert counts.max() == reads.most
    assert (counts[~used] == 0).all()
    read = counts[used]
    # All pieces of a key alike. Units that no rule lets a score see are not read.
    assert (read == read[:, :1]).all()
    assert (read[:, 0] == reads.most).mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 20, 64])
def test_nestedkv_reads_keys_twice_and_a_window_per_span(window: int, dtype: str) -> None:
    """The window before each span of 512 tokens but the first is read once more."""
    counts, used = counted(Reads("NestedKVScore", 3), dtype, {"window": window})
    rows = used.sum(-1)
    again = (window - 1) * (-(-rows // 512) - 1) * (rows > 0)
    assert np.array_equal(counts[..., 0].sum(-1), 2 * rows + again)
    assert (counts == counts[..., :1]).all()
    assert counts.max() <= 3


def test_a_longer_window_is_read_again_as_it_moves() -> None:
    """Its keys do not fit into shared memory, so those that leave are read twice more."""
    counts, used = counted(Reads("NestedKVScore", 6), "float16", {"window": 600})
    assert (counts[used] >= 2).all()
    assert 3 < counts.max() <= 5
