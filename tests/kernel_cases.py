"""Runs the kernels compiled for the CPU on generated cases and compares with the oracle."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case, attribute_choices
from kernel_run import run_kernel
from near_ties import near_ties
from numpy.typing import NDArray
from reference import PRIORITY, REFERENCE
from step_scene import cases_of, scene_of

from kvsift.builder import ops
from kvsift.runtime.kernels import Kernels

Array = NDArray[Any]

#: Orders of the threads of a block: ascending, descending, yielding at barriers, random.
SCHEDULES = (0, 1, 2, 7)
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
if importlib.util.find_spec("ml_dtypes"):  # the GPU check runs where it is missing, too
    DTYPES["bfloat16"] = importlib.import_module("ml_dtypes").bfloat16
#: Cases of every op that together meet every branch of its kernels at small shapes.
NAMES = ("typical", "rows", "empty-slot", "first-tokens", "ragged-capacity", "skipped-slot", "full")
STEP_NAMES = ("attrs0", "heads", "first-step", "full", "nothing-new", "decode")
#: Units or tokens of a long row.
LARGE = 131072
#: One small request of everything; what counts is the length.
ONE = {"B": 1, "E": 1, "L": 1, "Hq": 2, "Hkv": 1, "W": 3, "n": 2, "P": 1, "S": 2, "R": 1}
#: PhiloxUniform has no sums or choices, QueryStatsUpdate no axis of tokens.
LONG = [op.name for op in ops.OPS if op.name not in ("PhiloxUniform", "QueryStatsUpdate")]


class Hooks:
    """What the CPU build offers to tests only."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.cudacpu_set_schedule.argtypes = [ctypes.c_uint64]
        self._lib.cudacpu_launches.restype = ctypes.c_uint64
        pointers = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._lib.cudacpu_watch.argtypes = pointers
        self._lib.cudacpu_list_launches.restype = ctypes.c_char_p

    def schedule(self, seed: int) -> None:
        self._lib.cudacpu_set_schedule(seed)

    def launches(self) -> int:
        return int(self._lib.cudacpu_launches())

    @contextmanager
    def listing(self) -> Iterator[list[tuple[str, int, int]]]:
        """List kernels instead of running them while the context is open.

        Once it is closed the list has each kernel's name, blocks, and threads a block.
        """
        listed: list[tuple[str, int, int]] = []
        self._lib.cudacpu_list_launches(1)
        try:
            yield listed
        finally:
            for line in self._lib.cudacpu_list_launches(0).decode().splitlines():
                name, blocks, threads = line.rsplit(" ", 2)
                listed.append((name, int(blocks), int(threads)))

    @contextmanager
    def loads_of(self, array: Array) -> Iterator[Array]:
        """Count the loads of each 16 bytes of an array while the context is open."""
        assert array.flags.c_contiguous
        assert array.nbytes % 16 == 0
        counts = np.zeros(array.nbytes // 16, np.uint32)
        self._lib.cudacpu_watch(array.ctypes.data, array.nbytes, counts.ctypes.data)
        try:
            yield counts
        finally:
            self._lib.cudacpu_watch(None, 0, None)


def has_floats(op: str) -> bool:
    """Whether an op takes tensors of the model's float type."""
    return any(t.dtype == "T" for t in ops.TABLE[op].inputs)


def inputs_of(case: Case, dtype: str) -> dict[str, Array]:
    """The case's inputs with the float tensors rounded to a type."""
    made = scene_of(case).inputs()
    for tensor in ops.TABLE[case.op].inputs:
        if tensor.dtype == "T":
            made[tensor.name] = made[tensor.name].astype(DTYPES[dtype])
    return made


def small_cases(op: str) -> list[Case]:
    """The cases to repeat for every float type, schedule and sanitizer."""
    suffixes = ("", "-mean_qk", "-mean_prob", "-per_head", "-shared0", "-shared1")
    names = {f"{name}{suffix}" for name in NAMES for suffix in suffixes} | set(STEP_NAMES)
    return [case for case in cases_of(ops.TABLE[op]) if case.name in names]


def long_case(op: str) -> Case:
    """The op at 131072 units or tokens."""
    attrs = next(attribute_choices(ops.TABLE[op]))
    if op == "NestedKVScore":  # tiny memories would be tens of thousands
        attrs |= {"block_min": 128, "block_max": 256}
    block = int(attrs.get("block_size", 1)) if op == "WindowMass" else 1
    if "block_size" in attrs:
        attrs = attrs | {"block_size": block}
    sizes = ONE | {"N": LARGE // block, "C": LARGE}
    lens = (LARGE - 5,)
    return Case(op, "large", attrs, sizes, lens=lens, seen=lens, budget=LARGE // 5, new=(2,))


def several_tiles(op: str) -> Case:
    """The op where blocks take several turns and share a row, at few tokens."""
    attrs = ops.TABLE[op].defaults()
    attrs |= {"block_size": 100} if op == "WindowMass" else {}
    attrs |= {"window": 20} if op == "NestedKVScore" else {}
    tokens = 9000 if "Select" in op else 2000 if op == "NexusScore" else 150
    block = int(attrs.get("block_size", 1))
    units = -(-tokens // block) if op == "WindowMass" else tokens
    sizes = ONE | {"Hq": 4, "W": 10, "S": 10, "D": 64, "Dh": 32, "N": units, "C": tokens}
    seen = tokens if op == "WindowMass" else tokens * block
    lens = (tokens - 12,) if op == "AccumUpdate" else (seen,)
    return Case(op, "tiles", attrs, sizes, lens=lens, seen=(seen,), budget=tokens // 3, new=(10,))


def check(
    op: str, attrs: Mapping[str, ops.Value], inputs: Mapping[str, Array], got: list[Any]
) -> None:
    """Assert that a kernel's outputs are the oracle's, sets up to near ties."""
    with np.errstate(invalid="ignore"):
        want = REFERENCE[op](attrs, inputs)
    if op in PRIORITY:
        assert np.array_equal(got[1], want[1])
        near_ties(got[0], want[0], PRIORITY[op](attrs, inputs))
        np.testing.assert_allclose(got[2], want[2], rtol=1e-4)
        return
    for ours, theirs in zip(got, want, strict=True):
        defined = ~np.isnan(theirs)
        scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
        np.testing.assert_allclose(ours[defined], theirs[defined], rtol=1e-5, atol=1e-6 * scale)


def run_and_check(kernels: Kernels, case: Case, dtype: str) -> list[Any]:
    """Run a case and compare with the oracle; return the outputs."""
    inputs = inputs_of(case, dtype)
    got = run_kernel(kernels, case.op, case.attrs, inputs)
    check(case.op, case.attrs, inputs, got)
    return got
