"""How kernels spread over a GPU: what reads a long row takes more blocks than an H200 has SMs."""

from __future__ import annotations

import numpy as np
import pytest
from cases import numbers
from kernel_builds import library
from kernel_cases import Hooks, inputs_of, long_case
from kernel_run import run_kernel
from runners import cpu_kernels

from kvsift.builder import ops

#: Multiprocessors of an H200.
MULTIPROCESSORS = 132
SELECTORS = ("TopKSelect", "ReservoirSelect", "HeadTopKSelect")
TYPES = {"float32": np.float32, "int32": np.int32, "T": np.float16}
#: Kernels that work on a few numbers per row, chunk, query, head or memory, not on units.
SMALL = {
    *("settle", "count_kept", "add_coverage", "count_places", "count_free", "share_ties"),
    *("spread", "merge", "count_row", "count_tails", "measure", "normalize", "sum_row"),
    *("mean_direction", "average_rotations"),
}


def launches(op: str, sizes: dict[str, int]) -> list[tuple[str, int]]:
    """The kernels and blocks that an op takes at some sizes; none runs, no array is touched."""
    row, kernels = ops.TABLE[op], cpu_kernels()
    attrs = row.defaults()
    if op == "WindowMass":
        attrs |= {"block_size": 32, "head_reduce": 2}
        sizes = sizes | {"N": sizes["N"] // 32}
    inputs = [np.empty(numbers(t, sizes), TYPES[t.dtype]) for t in row.inputs]
    found = kernels.sizes(op, attrs, [a.shape for a in inputs])
    shapes = kernels.output_shapes(op, found)
    outputs = [np.empty(s, TYPES[t.dtype]) for s, t in zip(shapes, row.outputs, strict=True)]
    space = np.empty(kernels.workspace(op, attrs, "float16", found), np.uint8)
    with Hooks(library("plain")).listing() as listed:
        kernels.run(op, attrs, "float16", inputs, outputs, space)
    return [(name.strip("()").split("<")[0], blocks) for name, blocks, _ in listed]


#: NexusScore reads sums over blocks, a 32nd of the tokens; QueryStatsUpdate has no row of them.
ROWS = [op.name for op in ops.OPS if op.name not in ("NexusScore", "QueryStatsUpdate")]


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("tokens", [32768, 131072])
def test_eight_long_rows_fill_the_chip(op: str, tokens: int) -> None:
    sizes = {"B": 1, "E": 1, "L": 1, "Hq": 32, "Hkv": 8, "R": 8, "D": 128, "Dh": 64, "W": 32}
    sizes |= {"N": tokens, "C": tokens, "S": 1, "n": 5, "P": 1, "Rl": 1}
    listed = launches(op, sizes)
    few = {name: blocks for name, blocks in listed if blocks < MULTIPROCESSORS}
    assert set(few) <= SMALL, few
    assert not listed or len(few) < len(listed)


def test_kernels_that_are_listed_do_not_run() -> None:
    listed = launches("TopKSelect", {"L": 1, "E": 1, "R": 1, "N": 9000, "P": 0})
    assert ("count_bytes", 9) in listed
    assert ("place", 9) in listed
    short = launches("TopKSelect", {"L": 1, "E": 1, "R": 1, "N": 8192, "P": 0})
    assert ("select_row", 1) in short


@pytest.mark.parametrize("op", SELECTORS)
def test_one_block_and_several_choose_alike(op: str) -> None:
    """Padding a row until several blocks share it changes no bit, coverage included."""
    case = long_case(op).but(
        sizes={"R": 2, "N": 8192, "E": 1, "L": 1, "n": 1, "P": 1},
        lens=(6000,),
        seen=(6000,),
        budget=999,
    )
    inputs = inputs_of(case, "float32")
    inputs["score"] = np.abs(np.round(inputs["score"] * 8) / 8)  # ties
    short = run_kernel(cpu_kernels(), op, case.attrs, inputs)
    padded = dict(inputs)
    for tensor in ops.TABLE[op].inputs:
        if tensor.shape[-1] == "N":
            array = inputs[tensor.name]
            width = [(0, 0)] * (array.ndim - 1) + [(0, 3000)]
            filler = {"score": -np.inf, "unit_ids": -1}.get(tensor.name, 0.5)
            padded[tensor.name] = np.pad(array, width, constant_values=filler)
    long = run_kernel(cpu_kernels(), op, case.attrs, padded)
    assert short[0].tobytes() == np.ascontiguousarray(long[0][..., :8192]).tobytes()
    assert (long[0][..., 8192:] == -1).all()
    assert short[1].tobytes() == long[1].tobytes()
    assert short[2].tobytes() == long[2].tobytes()
