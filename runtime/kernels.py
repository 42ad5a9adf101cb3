"""The CUDA kernels from Python: a thin ctypes layer over the C functions of `plugins/capi.h`.

Arrays may be numpy (for a library compiled for the CPU), torch, cupy or cuda-python buffers: all
that is read of them is a pointer and a shape. Nothing is copied, allocated or waited for.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from kvsift.builder.errors import EngineError, UsageError, unknown_name

#: Float types of the model by the number that the C functions take.
FLOAT_TYPES = ("float32", "float16", "bfloat16")


class KernelError(EngineError):
    """A kernel did not start or did not end well."""


@dataclass(frozen=True)
class Interface:
    """What an op takes and gives, in order, as the library tells."""

    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]
    attributes: tuple[str, ...]
    sizes: tuple[tuple[str, int, int, str, str], ...]


def fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Return fields of a C structure that have one type."""
    return [(name, kind) for name in names.split()]


class GatherArgs(ctypes.Structure):
    """Arguments of `kv_gather`, see plugins/kernels/kv_gather.h."""

    _fields_ = (
        fields(ctypes.c_void_p, "source second_source target second_target")
        + fields(ctypes.c_void_p, "source_slots target_slots units lens")
        + fields(ctypes.c_int32, "Bs Bt Hkv Cs Ct E R N Rl row_bytes block_size")
        + fields(ctypes.c_bool, "in_place")
    )


class FillHolesArgs(ctypes.Structure):
    """Arguments of `kv_fill_holes`, see plugins/kernels/kv_fill_holes.h.

    `origin` and `target` are `from` and `to` there.
    """

    _fields_ = fields(ctypes.c_void_p, "data second slots origin target") + fields(
        ctypes.c_int32, "B Hkv C E R M row_bytes block_size"
    )


def pointer(array: Any) -> int | None:
    """Return the address of an array's first element; None for None and for empty arrays."""
    if array is None or 0 in tuple(array.shape):
        return None
    if hasattr(array, "data_ptr"):  # torch
        return int(array.data_ptr())
    if hasattr(array, "__cuda_array_interface__"):
        return int(array.__cuda_array_interface__["data"][0])
    return int(array.__array_interface__["data"][0])


class Kernels:
    """The kernels of one library, for one device or for the CPU."""

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"cannot load the kernels of {str(path)!r}: {error}") from None
        pointers, doubles = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_double)
        call: list[Any] = [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int32), doubles]
        lib = self._lib
        lib.kvsift_describe.restype = ctypes.c_char_p
        lib.kvsift_error.restype = ctypes.c_char_p
        lib.kvsift_workspace.argtypes = call
        lib.kvsift_workspace.restype = ctypes.c_size_t
        lib.kvsift_run.argtypes = [*call, pointers, pointers, ctypes.c_void_p, ctypes.c_void_p]
        lib.kvsift_kv_gather.argtypes = [ctypes.POINTER(GatherArgs), ctypes.c_void_p]
        lib.kvsift_kv_fill_holes.argtypes = [ctypes.POINTER(FillHolesArgs), ctypes.c_void_p]
        told = json.loads(lib.kvsift_describe())
        self.version: str = told["version"]
        self.ops = {
            name: Interface(
                tuple((n, d, s) for n, d, s in op["inputs"]),
                tuple((n, d, s) for n, d, s in op["outputs"]),
                tuple(name for name, _ in op["attributes"]),
                tuple((s, i, a, d, n) for s, i, a, d, n in op["sizes"]),
            )
            for name, op in told["ops"].items()
        }

    def sizes(
        self, op: str, attrs: Mapping[str, float], shapes: Sequence[tuple[int, ...]]
    ) -> dict[str, int]:
        """Return the number behind each symbol of the op's shapes, given those of its inputs."""
        if op not in self.ops:
            raise unknown_name("op", op, self.ops)
        found: dict[str, int] = {}
        for symbol, index, axis, divisor, attribute in self.ops[op].sizes:
            size = int(attrs[attribute]) if index < 0 else shapes[index][axis]
            found[symbol] = size // found[divisor] if divisor else size
        return found

    def output_shapes(self, op: str, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the shapes of the op's outputs."""
        shapes = []
        for _, _, shape in self.ops[op].outputs:
            dims = []
            for dim in shape.split(","):
                size = 1
                for factor in dim.split("*"):
                    size *= int(factor) if factor.isdigit() else sizes[factor]
                dims.append(size)
            shapes.append(tuple(dims))
        return shapes

    def _call(
        self, op: str, attrs: Mapping[str, float], dtype: str, sizes: Mapping[str, int]
    ) -> tuple[Any, ...]:
        if dtype not in FLOAT_TYPES:
            raise unknown_name("float type", dtype, FLOAT_TYPES)
        known = self.ops[op]
        missing = [name for name in known.attributes if name not in attrs]
        if missing:
            raise UsageError(f"{op} needs the attribute {missing[0]!r}; give every attribute")
        values = (ctypes.c_double * max(1, len(known.attributes)))(
            *(attrs[name] for name in known.attributes)
        )
        numbers = (ctypes.c_int32 * len(known.sizes))(*(sizes[s[0]] for s in known.sizes))
        return op.encode(), FLOAT_TYPES.index(dtype), numbers, values

    def workspace(
        self, op: str, attrs: Mapping[str, float], dtype: str, sizes: Mapping[str, int]
    ) -> int:
        """Return the bytes of workspace (aligned to 16) that `run` needs."""
        return int(self._lib.kvsift_workspace(*self._call(op, attrs, dtype, sizes)))

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
        """Enqueue an op on a stream.

        `inputs` and `outputs` are contiguous device arrays in the op table's order, `dtype` the
        model's float type. Raises KernelError with CUDA's reason.
        """
        sizes = self.sizes(op, attrs, [tuple(a.shape) for a in inputs])
        reads = (ctypes.c_void_p * len(inputs))(*map(pointer, inputs))
        writes = (ctypes.c_void_p * len(outputs))(*map(pointer, outputs))
        call = self._call(op, attrs, dtype, sizes)
        space = pointer(workspace)
        self._check(op, self._lib.kvsift_run(*call, reads, writes, space, stream or None))

    def gather(self, args: GatherArgs, stream: int = 0) -> None:
        """Enqueue `kv_gather`."""
        self._check("kv_gather", self._lib.kvsift_kv_gather(args, stream or None))

    def fill_holes(self, args: FillHolesArgs, stream: int = 0) -> None:
        """Enqueue `kv_fill_holes`."""
        self._check("kv_fill_holes", self._lib.kvsift_kv_fill_holes(args, stream or None))

    def _check(self, what: str, result: int) -> None:
        if result:
            reason = self._lib.kvsift_error(result).decode()
            raise KernelError(f"{what} failed: {reason} (CUDA error {result})")
