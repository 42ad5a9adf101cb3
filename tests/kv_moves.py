"""KvAppend, kv_gather and kv_fill_holes against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.runtime.kernels import FillHolesArgs, GatherArgs, Kernels, pointer

Array = NDArray[Any]


def ints(values: Any) -> Array:
    return np.ascontiguousarray(values, np.int32)


def append(kernels: Kernels, cache: Array, rows: Array, past: Array, new: Array) -> None:
    kernels.run("KvAppend", {}, str(cache.dtype), [cache, rows, past, new], [cache])


def check_append(kernels: Kernels, dtype: Any, heads: int = 1) -> None:
    """Slots of different lengths; a row beyond the capacity is dropped."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((4, 2, 9, 8)).astype(dtype)
    rows = rng.standard_normal((4, 2, 5, 8)).astype(dtype)
    past = ints(rng.integers(0, 5, (4, heads)))
    past[3] = 7
    new = ints([5, 0, 2, 4])
    want = cache.copy()
    for b, h in np.ndindex(4, 2):
        start = past[b, h % heads]
        count = min(int(new[b]), 9 - start)
        want[b, h, start : start + count] = rows[b, h, :count]
    append(kernels, cache, rows, past, new)
    assert np.array_equal(cache, want)


def gather(
    kernels: Kernels, source: list[Array], target: list[Array], slots: tuple[Array, Array],
    units: Array, lens: Array, block: int,
) -> None:  # fmt: skip
    """Call kv_gather on one or two tensors."""
    first = source[0]
    args = GatherArgs(
        source=pointer(source[0]), target=pointer(target[0]),
        second_source=pointer(source[1]) if len(source) > 1 else None,
        second_target=pointer(target[1]) if len(source) > 1 else None,
        source_slots=pointer(slots[0]), target_slots=pointer(slots[1]),
        units=pointer(units), lens=pointer(lens),
        Bs=first.shape[0], Bt=target[0].shape[0], Hkv=first.shape[1],
        Cs=first.shape[2], Ct=target[0].shape[2],
        E=units.shape[0], R=units.shape[1], N=units.shape[2], Rl=lens.shape[1],
        row_bytes=first[0, 0, 0].nbytes, block_size=block, in_place=source[0] is target[0],
    )  # fmt: skip
    kernels.gather(args)


def wanted_rows(units: Array, length: int, block: int) -> list[int]:
    rows = [int(u) * block + t for u in units if u >= 0 for t in range(block)]
    return [row for row in rows if row < length]


def check_gather(
    kernels: Kernels, dtype: Any, width: int, block: int, heads: int, in_place: bool
) -> None:
    """Random kept units of slots of different lengths, one of them skipped."""
    rng = np.random.default_rng(block + heads)
    capacity, slots = 300, 3
    count = -(-capacity // block)
    source = [rng.standard_normal((4, 2, capacity, width)).astype(dtype) for _ in range(2)]
    if width == 1:
        source = source[:1]
    target = source if in_place else [np.zeros((5, 2, 280, width), dtype) for _ in source]
    origin = ints([3, -1, 0])  # 3 ends where the tensor ends
    places = origin if in_place else ints([4, 1, 2])
    lens = ints(rng.integers(1, capacity + 1, (slots, heads)))
    lens[0] = capacity
    units = np.full((slots, heads, count), -1, np.int32)
    for e, r in np.ndindex(slots, heads):
        held = -(-int(lens[e, r]) // block)
        kept = np.sort(rng.permutation(held)[: rng.integers(0, held + 1)])
        if e == 0:  # the last unit is a partial one
            kept = np.union1d(kept, [held - 1])
        units[e, r, : len(kept)] = kept
    want = [a.copy() for a in target]
    for e, h in np.ndindex(slots, 2):
        if origin[e] < 0:
            continue
        rows = wanted_rows(units[e, h % heads], int(lens[e, h % heads]), block)[: want[0].shape[2]]
        for to, from_ in zip(want, source, strict=True):
            to[places[e], h, : len(rows)] = from_[origin[e], h, rows].copy()
    gather(kernels, source, target, (origin, places), units, lens, block)
    for ours, theirs in zip(target, want, strict=True):
        assert np.array_equal(ours, theirs)


def check_fill_holes(kernels: Kernels, dtype: Any, width: int, heads: int) -> None:
    """The last blocks move into holes; -1 moves nothing."""
    rng = np.random.default_rng(1)
    block, blocks = 4, 6
    data = [rng.standard_normal((3, 2, blocks * block, width)).astype(dtype) for _ in range(2)]
    slots = ints([1, -1, 2])
    source = np.full((3, heads, 2), -1, np.int32)
    target = source.copy()
    source[:, :, 0], target[:, :, 0] = 5, rng.integers(0, 3, (3, heads))
    source[2, :, 1], target[2, :, 1] = 4, 3
    want = [a.copy() for a in data]
    for e, h, m in np.ndindex(3, 2, 2):
        a, b = source[e, h % heads, m], target[e, h % heads, m]
        if slots[e] >= 0 and a >= 0:
            for tensor in want:
                moved = tensor[slots[e], h, a * block : (a + 1) * block]
                tensor[slots[e], h, b * block : (b + 1) * block] = moved
    kernels.fill_holes(
        FillHolesArgs(
            data=pointer(data[0]), second=pointer(data[1]), slots=pointer(slots),
            origin=pointer(source), target=pointer(target), B=3, Hkv=2, C=blocks * block,
            E=3, R=heads, M=2, row_bytes=data[0][0, 0, 0].nbytes, block_size=block,
        )
    )  # fmt: skip
    for ours, theirs in zip(data, want, strict=True):
        assert np.array_equal(ours, theirs)


def check_moves(kernels: Kernels) -> None:
    """All of the above at shapes that meet every branch."""
    for heads in (1, 2):
        check_append(kernels, np.float16, heads)
        check_append(kernels, np.float32, heads)
        check_fill_holes(kernels, np.float16, 8, heads)
        check_fill_holes(kernels, np.float32, 1, heads)
        for block in (1, 7, 32):
            for in_place in (False, True):
                check_gather(kernels, np.float16, 8, block, heads, in_place)
                check_gather(kernels, np.float32, 24, block, heads, in_place)
                check_gather(kernels, np.float32, 1, block, heads, in_place)
