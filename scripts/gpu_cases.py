"""The kernel tests on a device: the same cases, oracle and comparisons, with copies in between."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gpu_device import Array, Device, DeviceError

from kvsift.builder import ops
from kvsift.runtime.kernels import FillHolesArgs, GatherArgs, KernelError, Kernels, pointer

#: Bytes behind every array that a kernel must leave alone, and what they hold.
GUARD, GUARD_BYTE = 256, 0xA5


class CopyingKernels(Kernels):
    """Kernels for arrays of the host: each call copies them to the device and back."""

    def __init__(self, path: str, device: Device) -> None:
        super().__init__(path)
        self._device = device

    def run(
        self,
        op: str,
        attrs: Mapping[str, float],
        dtype: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        workspace: Any = None,
        stream: int = 0,
    ) -> None:
        """Run an op and wait for it."""
        arrays = [*inputs, *outputs, *([] if workspace is None else [workspace])]
        with self._device.scope():
            copies = Copies(self._device)
            there = [copies.of(pointer(a), a.nbytes, a.shape) for a in arrays]
            first, last = len(inputs), len(inputs) + len(outputs)
            space = there[last] if workspace is not None else None
            super().run(op, attrs, dtype, there[:first], there[first:last], space, stream)
            copies.back({pointer(a) for a in arrays[first:]})

    def gather(self, args: GatherArgs, stream: int = 0) -> None:
        """Run `kv_gather` and wait for it."""
        a = args
        source = a.Bs * a.Hkv * a.Cs * a.row_bytes
        target = a.Bt * a.Hkv * a.Ct * a.row_bytes
        sizes = {"source": source, "second_source": source, "target": target}
        sizes |= {"second_target": target, "source_slots": 4 * a.E, "target_slots": 4 * a.E}
        sizes |= {"units": 4 * a.E * a.R * a.N, "lens": 4 * a.E * a.Rl}
        self._moved(args, sizes, {a.target, a.second_target}, super().gather, stream)

    def fill_holes(self, args: FillHolesArgs, stream: int = 0) -> None:
        """Run `kv_fill_holes` and wait for it."""
        a = args
        data, moves = a.B * a.Hkv * a.C * a.row_bytes, 4 * a.E * a.R * a.M
        sizes = {"data": data, "second": data, "slots": 4 * a.E, "origin": moves, "target": moves}
        self._moved(args, sizes, {a.data, a.second}, super().fill_holes, stream)

    def _moved(
        self,
        args: Any,
        sizes: Mapping[str, int],
        written: set[int | None],
        call: Callable[[Any, int], None],
        stream: int,
    ) -> None:
        with self._device.scope():
            copies = Copies(self._device)
            there = type(args)()
            ctypes.pointer(there)[0] = args
            for name, nbytes in sizes.items():
                setattr(there, name, pointer(copies.of(getattr(args, name), nbytes, (nbytes,))))
            call(there, stream)
            copies.back(written)


class Copies:
    """Copies of host arrays on a device, one for each address: what is in place stays so."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[int, Array] = {}

    def of(self, host: int | None, nbytes: int, shape: tuple[int, ...]) -> Array:
        """Return the copy of the array at an address; None has no memory."""
        if not host or not nbytes:
            return Array(0, shape, 0)
        if host not in self._made:
            guard = np.full(GUARD, GUARD_BYTE, np.uint8)
            made = self._device.empty((nbytes + GUARD,), 1)
            self._device.copy_in(made.address, host, nbytes)
            self._device.copy_in(made.address + nbytes, guard.ctypes.data, GUARD)
            self._made[host] = Array(made.address, shape, nbytes)
        kept = self._made[host]
        return Array(kept.address, shape, kept.nbytes)

    def back(self, written: set[int | None]) -> None:
        """Wait, then copy back what is at the host addresses `written`.

        Raises KernelError if a kernel wrote into another array or behind any.
        """
        self._device.sync()
        guard = np.empty(GUARD, np.uint8)
        for host, made in self._made.items():
            now = np.empty(made.nbytes, np.uint8)
            self._device.copy_out(now.ctypes.data, made.address, made.nbytes)
            if host in written:
                ctypes.memmove(host, now.ctypes.data, made.nbytes)
            elif ctypes.string_at(host, made.nbytes) != now.tobytes():
                raise KernelError(f"wrote into an input of {made.nbytes} bytes")
            self._device.copy_out(guard.ctypes.data, made.address + made.nbytes, GUARD)
            if (guard != GUARD_BYTE).any():
                raise KernelError(f"wrote behind an array of {made.nbytes} bytes")


def checks(kernels: Kernels, small: bool = False) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of every kernel test and a function that fails like it.

    `small` leaves out the long rows and all but the cases that are repeated per float type.
    """
    harness = importlib.import_module("kernel_cases")
    moves = importlib.import_module("kv_moves")
    cases_of = importlib.import_module("step_scene").cases_of
    yield "row moves", partial(moves.check_moves, kernels)
    for op in ops.OPS:
        repeated = harness.small_cases(op.name)
        every = [(case, "float32") for case in (repeated if small else cases_of(op))]
        if harness.has_floats(op.name):
            halves = [t for t in harness.DTYPES if t != "float32"]
            every += [(case, dtype) for dtype in halves for case in repeated]
        if not small and op.name in harness.LONG:
            every.append((harness.long_case(op.name), "float32"))
        for case, dtype in every:
            yield f"{case} {dtype}", partial(harness.run_and_check, kernels, case, dtype)


def run_checks(
    kernels: Kernels, small: bool = False, stop_after: int = 20
) -> tuple[int, dict[str, str]]:
    """Run every kernel test; return how many passed and what the others said."""
    passed, failed = 0, {}
    for name, check in checks(kernels, small):
        try:
            check()
            passed += 1
        except (AssertionError, KernelError) as error:
            failed[name] = " ".join(str(error).split())[:300] or "not what numpy gives"
        except DeviceError as error:  # nothing works after an illegal access
            failed[name] = str(error)
            break
        if len(failed) >= stop_after:
            break
    return passed, failed
