"""What the GPU check measures: each kernel at one size, its traffic, its arithmetic, its target."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from gpu_device import Array, Call, Device

from kvsift.builder import ops
from kvsift.runtime.kernels import FillHolesArgs, GatherArgs, Kernels

Inputs = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Scale:
    """Sizes of the measured model; the tests take smaller ones."""

    tokens: int = 32768
    block: int = 32
    kv_heads: int = 8
    heads: int = 32
    head_dim: int = 128
    window: int = 32
    layers: int = 8
    step_tokens: int = 8192
    most_copies: int = 256


@dataclass(frozen=True)
class Work:
    """One kernel to measure: what it reads and writes at least, and how much it calculates."""

    name: str
    op: str = ""
    attrs: Mapping[str, ops.Value] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    #: Times that keys must be read.
    key_reads: int = 1
    flops: float = 0.0
    #: Least share of the copy bandwidth; None: only its own roofline counts.
    target: float | None = None


@dataclass
class Figure:
    """A measurement. `roofline` is the share of the speed that copy bandwidth or fp32 allows."""

    name: str
    microseconds: float
    gbytes_per_s: float
    of_copy: float
    roofline: float
    torch_microseconds: float | None = None
    target: str = ""
    met: bool | None = None


def works(s: Scale) -> list[Work]:
    """Every op, at `kv_heads` rows of `tokens` x `head_dim` or as many scores."""
    tokens = {"B": 1, "E": 1, "L": 1, "N": s.tokens, "C": s.tokens}
    model = {"Hq": s.heads, "Hkv": s.kv_heads, "D": s.head_dim, "W": s.window}
    rows = {"E": 1, "L": 1, "R": s.kv_heads, "N": s.tokens}
    blocks = {"E": 1, "L": s.layers, "R": 1, "N": s.tokens // s.block, "W": s.window}
    dots = 2.0 * s.heads * s.tokens * s.head_dim  # every query head with every key
    made: list[Work] = []

    def add(op: str, sizes: Mapping[str, int], name: str = "", **more: Any) -> None:
        attrs = {**ops.TABLE[op].defaults(), **more.pop("attrs", {})}
        made.append(Work(name or op, op, attrs, sizes, **more))

    for mode, reduce in enumerate(ops.HEAD_REDUCE):
        sizes = {**tokens, **model, "N": s.tokens // s.block, "Hq": s.heads}
        work = s.window * dots if mode else s.window * dots / s.heads  # one mean head
        add("WindowMass", sizes, f"WindowMass {reduce}",
            attrs={"block_size": s.block, "head_reduce": mode},
            flops=work, target=None if mode else 0.8)  # fmt: skip
    add("NexusScore", blocks, attrs={"block_size": s.block})
    add("PhiloxUniform", {**rows, "n": 5})
    add("ReservoirSelect", {**rows, "n": 5}, attrs={"block_size": 1})
    add("TopKSelect", rows, attrs={"block_size": 1})
    add("HeadTopKSelect", rows, attrs={"block_size": 1})
    both = {**tokens, **model}
    add("KNormScore", both, target=0.8)
    add("KeyDiffScore", both, key_reads=2)
    add("NestedKVScore", both, key_reads=2)
    # Its logits are made twice, since keeping them would move more than the keys.
    add("WindowScore", both, key_reads=2, flops=2 * s.window * dots)
    add("AccumUpdate", {**both, "S": 1}, flops=dots)
    square = 2.0 * s.heads * s.head_dim**2
    add("QueryStatsUpdate", {**both, "B": 8, "S": 64}, flops=8 * 64 * square)
    add("ExpectedAttentionScore", {**both, "Dh": s.head_dim // 2}, flops=s.tokens * square + dots)
    return [*made, Work("KvAppend"), Work("kv_gather", target=0.8), Work("kv_gather in place"),
            Work("kv_fill_holes")]  # fmt: skip


def generated(work: Work) -> Inputs:
    """Random inputs of an op: one full slot of fp16 keys, half of it to be kept."""
    case = importlib.import_module("cases").Case
    harness = importlib.import_module("kernel_cases")
    tokens = work.sizes["N"] * int(work.attrs.get("block_size", 1))
    slots, steps = work.sizes.get("B", 1), work.sizes.get("S", 1)
    held = tokens - steps if work.op in ("AccumUpdate", "QueryStatsUpdate") else tokens
    sizes = {"B": 1, **work.sizes}
    made: Inputs = harness.inputs_of(
        case(work.op, work.name, work.attrs, sizes, lens=(held,) * slots, seen=(tokens,) * slots,
             new=(steps,) * slots, budget=work.sizes["N"] // 2),
        "float16",
    )  # fmt: skip
    return made


def op_calls(
    kernels: Kernels, device: Device, work: Work, inputs: Inputs, copies: int
) -> list[Call]:
    """One call per copy of an op's arrays."""
    op, calls = ops.TABLE[work.op], []
    sizes = kernels.sizes(work.op, work.attrs, [inputs[t.name].shape for t in op.inputs])
    shapes = kernels.output_shapes(work.op, sizes)
    space = kernels.workspace(work.op, work.attrs, "float16", sizes)
    for _ in range(copies):
        given = {name: device.upload(array) for name, array in inputs.items()}
        reads = [given[t.name] for t in op.inputs]
        # A state is updated in place, as in an engine.
        writes = [
            given.get(t.name.removesuffix("_out")) or device.empty(shape, 4)
            for t, shape in zip(op.outputs, shapes, strict=True)
        ]
        calls.append(call_of(kernels, work, reads, writes, device.empty((space,), 1)))
    return calls


def call_of(
    kernels: Kernels, work: Work, reads: Sequence[Array], writes: Sequence[Array], space: Array
) -> Call:
    """Return the call of an op on arrays of a device."""
    return lambda stream: kernels.run(work.op, work.attrs, "float16", reads, writes, space, stream)


def op_bytes(kernels: Kernels, work: Work, inputs: Inputs) -> int:
    """Least bytes that an op moves: inputs read once (keys `key_reads` times), outputs written."""
    shapes = [inputs[t.name].shape for t in ops.TABLE[work.op].inputs]
    sizes = kernels.sizes(work.op, work.attrs, shapes)
    read = sum(a.nbytes for a in inputs.values())
    read += (work.key_reads - 1) * (inputs["keys"].nbytes if "keys" in inputs else 0)
    return read + sum(4 * math.prod(shape) for shape in kernels.output_shapes(work.op, sizes))


def move_calls(
    kernels: Kernels, device: Device, work: Work, s: Scale, copies: int
) -> tuple[list[Call], int]:
    """The calls of what moves rows of keys and values, and the bytes that one of them moves."""
    rng = np.random.default_rng(0)
    calls: list[Call] = []
    shape = (1, s.kv_heads, s.tokens, s.head_dim)
    cache = np.ones(shape, np.float16)
    units, row = s.tokens // s.block, 2 * s.head_dim
    slots = device.upload(np.zeros(1, np.int32))
    for _ in range(copies):
        keys, values = device.upload(cache), device.upload(cache)
        if work.name == "KvAppend":
            steps = s.tokens // 8
            rows = device.upload(cache[:, :, :steps])
            past = device.upload(np.full((1, 1), s.tokens // 2, np.int32))
            new = device.upload(np.full(1, steps, np.int32))
            append = Work("KvAppend", "KvAppend")
            calls.append(call_of(kernels, append, [keys, rows, past, new], [keys], slots))
            moved = 2 * rows.nbytes
        elif work.name == "kv_fill_holes":
            count = units // 4
            order = rng.permutation(units // 2)[:count].astype(np.int32)
            origin = device.upload(np.arange(units - count, units, dtype=np.int32))
            target = device.upload(order)
            holes = FillHolesArgs(
                data=keys.address, second=values.address, slots=slots.address,
                origin=origin.address, target=target.address, B=1, Hkv=s.kv_heads, C=s.tokens,
                E=1, R=1, M=count, row_bytes=row, block_size=s.block,
            )  # fmt: skip
            calls.append(partial(kernels.fill_holes, holes))
            moved = 4 * count * s.block * s.kv_heads * row
        else:
            kept = np.full(units, -1, np.int32)
            kept[: units // 2] = np.sort(rng.permutation(units)[: units // 2])
            place = "in place" in work.name
            targets = (keys, values) if place else (device.upload(cache), device.upload(cache))
            args = gather_args(s, (keys, values), targets, slots, device.upload(kept),
                               device.upload(np.full(1, s.tokens, np.int32)))  # fmt: skip
            calls.append(partial(kernels.gather, args))
            moved = 4 * (units // 2) * s.block * s.kv_heads * row
    return calls, moved


def gather_args(
    s: Scale, source: tuple[Array, Array], target: tuple[Array, Array], slots: Array,
    units: Array, lens: Array,
) -> GatherArgs:  # fmt: skip
    """Arguments of `kv_gather` for the keys and values of one slot."""
    capacity = source[0].shape[2]
    return GatherArgs(
        source=source[0].address, second_source=source[1].address,
        target=target[0].address, second_target=target[1].address,
        source_slots=slots.address, target_slots=slots.address,
        units=units.address, lens=lens.address, Bs=1, Bt=1, Hkv=s.kv_heads, Cs=capacity,
        Ct=capacity, E=1, R=1, N=capacity // s.block, Rl=1, row_bytes=2 * s.head_dim,
        block_size=s.block, in_place=source[0] is target[0],
    )  # fmt: skip


def copies_for(device: Device, nbytes: int, s: Scale) -> int:
    """How many buffers to rotate, so that none is in the L2 cache when its turn comes again."""
    return max(2, min(s.most_copies, math.ceil(4 * device.l2_bytes / max(1, nbytes))))


def copy_bandwidth(device: Device, s: Scale) -> float:
    """Bytes read and written per second by copies of the size of the keys."""
    nbytes = s.kv_heads * s.tokens * s.head_dim * 2
    with device.scope():
        pairs = [
            (device.empty((nbytes,), 1), device.empty((nbytes,), 1))
            for _ in range(copies_for(device, 2 * nbytes, s))
        ]
        calls = [partial(device.copy, a.address, b.address, nbytes) for a, b in pairs]
        return 2 * nbytes * len(calls) / device.seconds(calls)


def measure(
    kernels: Kernels, device: Device, work: Work, s: Scale, copy: float,
    torch_seconds: Callable[[Work, Inputs, int], float | None],
) -> Figure:  # fmt: skip
    """Measure one kernel."""
    with device.scope():
        peer = None
        if work.op:
            inputs = generated(work)
            moved = op_bytes(kernels, work, inputs)
            copies = copies_for(device, moved, s)
            calls = op_calls(kernels, device, work, inputs, copies)
            peer = torch_seconds(work, inputs, copies)
        else:
            copies = copies_for(device, 4 * s.kv_heads * s.tokens * s.head_dim, s)
            calls, moved = move_calls(kernels, device, work, s, copies)
        seconds = device.seconds(calls) / len(calls)
    speed = moved / seconds
    ideal = max(moved / copy, work.flops / device.fp32_flops)
    figure = Figure(work.name, seconds * 1e6, speed / 1e9, speed / copy, ideal / seconds)
    figure.torch_microseconds = peer * 1e6 if peer else None
    if work.target:
        figure.target = f">= {work.target:.0%} of copy"
        figure.met = figure.of_copy >= work.target
    return figure


def as_json(figure: Figure) -> dict[str, Any]:
    """The figure as a dictionary."""
    return asdict(figure)
