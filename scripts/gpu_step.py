"""A whole Nexus eviction step of one layer: five kernels, each on what the one before has left."""

from __future__ import annotations

import numpy as np
from gpu_device import Array, Call, Device
from gpu_measure import Figure, Scale, Work, call_of, copies_for, gather_args, generated

from kvsift.builder import ops
from kvsift.runtime.kernels import Kernels

#: Microseconds that a step at 8192 tokens may take.
TARGET_US = 20.0
CHAIN = ("WindowMass", "NexusScore", "PhiloxUniform", "ReservoirSelect")


def step_calls(kernels: Kernels, device: Device, s: Scale) -> tuple[list[Call], dict[str, Array]]:
    """Return the calls of one step, and all its arrays by name."""
    sizes = {"B": 1, "E": 1, "L": 1, "R": 1, "N": s.step_tokens // s.block, "C": s.step_tokens}
    sizes |= {"Hq": s.heads, "Hkv": s.kv_heads, "D": s.head_dim, "W": s.window, "n": 5}
    wanted = {"block_size": s.block, "head_reduce": 0, "heads_per_layer": s.kv_heads}
    held: dict[str, Array] = {}
    calls: list[Call] = []
    for name in CHAIN:
        op = ops.TABLE[name]
        attrs = {k: wanted.get(k, v) for k, v in op.defaults().items()}
        work = Work(name, name, attrs, sizes)
        inputs = generated(work)
        for tensor in op.inputs:
            if tensor.name not in held:
                held[tensor.name] = device.upload(inputs[tensor.name])
        # The axis of layers, which is 1, is all that differs between uses of an array.
        shapes = [inputs[t.name].shape for t in op.inputs]
        reads = [
            Array(held[t.name].address, shape, held[t.name].nbytes)
            for t, shape in zip(op.inputs, shapes, strict=True)
        ]
        found = kernels.sizes(name, attrs, shapes)
        for tensor, shape in zip(op.outputs, kernels.output_shapes(name, found), strict=True):
            held[tensor.name] = device.empty(shape, 4)
        space = device.empty((kernels.workspace(name, attrs, "float16", found),), 1)
        calls.append(call_of(kernels, work, reads, [held[t.name] for t in op.outputs], space))
    held["values"] = device.empty(held["keys"].shape, 2)
    lens = held["lens"] = device.upload(np.full(1, s.step_tokens, np.int32))
    cache = (held["keys"], held["values"])
    args = gather_args(s, cache, cache, held["evict_slots"], held["keep"], lens)
    calls.append(lambda stream: kernels.gather(args, stream))
    return calls, held


def measure_step(kernels: Kernels, device: Device, s: Scale, copy: float) -> Figure:
    """Measure the step over rotating caches."""
    row = s.kv_heads * 2 * s.head_dim
    moved = s.step_tokens * row * 3  # keys read once; half of keys and values read and written
    with device.scope():
        sets = [
            step_calls(kernels, device, s)[0]
            for _ in range(copies_for(device, 2 * s.step_tokens * row, s))
        ]
        seconds = device.seconds([call for calls in sets for call in calls]) / len(sets)
    speed, name = moved / seconds, f"nexus step, one layer, {s.step_tokens} tokens"
    figure = Figure(name, seconds * 1e6, speed / 1e9, speed / copy, speed / copy)
    figure.target, figure.met = f"<= {TARGET_US:.0f} us", figure.microseconds <= TARGET_US
    return figure
