"""Body of NexusScore."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.tools import FAR, Body, Dims, index
from kvsift.builder.errors import UsageError

FLOAT = ir.DataType.FLOAT
#: Times a distance of at least one position: far below every logit, and finite up to FAR.
MASK_SLOPE = 1e20


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]: the weight of each unit, -inf at padding and for skipped slots.

    The keys are gathered row by row and laid out unit after unit, so that ragged capacities need
    no padding and rows beyond the length, which may hold anything, are replaced by a valid row
    before they can turn a product into NaN.
    """
    mode = ops.HEAD_REDUCE[int(attrs["head_reduce"])]
    if mode != "mean_qk" and dims.window_heads % dims.num_kv_heads:
        raise UsageError(
            f"head_reduce {mode!r} needs the window of every query head; got "
            f"{dims.window_heads} for {dims.num_kv_heads} KV heads"
        )
    ids = b.input("unit_ids")
    position, nearest = key_positions(b, int(attrs["block_size"]))
    probs = probabilities(b, mode, position, dims)  # [E, heads, W, N*b]
    units = b.reshape(probs, slot_count(b), 0, 0, b.size(ids, 2), int(attrs["block_size"]))
    mass = b.reduce("Sum", units, 4)  # [E, heads, W, N]
    if mode == "per_head":
        group = dims.window_heads // dims.num_kv_heads
        shape = (slot_count(b), dims.num_kv_heads, group, dims.window, b.size(ids, 2))
        mass = b.reduce("Mean", b.reshape(mass, *shape), 2)
    else:
        mass = b.reduce("Mean", mass, 1, keep=True)  # [E, 1, W, N]

    # A query that sees no key (older than the sequence) has an arbitrary row here: drop it.
    has_key = b.op("LessOrEqual", nearest, query_positions(b, dims.window))  # [E, R, W, 1]
    rows = b.op("Where", has_key, mass, b.f32(0.0))
    seen = b.op("Clip", b.input("tokens_seen"), b.i32(1), b.i32(dims.window))
    count = b.reshape(b.cast(seen, FLOAT), -1, 1, 1)
    weight = b.op("Div", b.reduce("Sum", rows, 2), count)
    if attrs["walk_steps"] and attrs["walk_lambda"]:
        walked = walk(b, rows, walk_rows(attrs, dims.window))
        weight = b.op("Add", weight, b.op("Mul", walked, b.f32(attrs["walk_lambda"])))
    if attrs["tie_eps"]:
        weight = b.op("Add", weight, b.op("Mul", ramp(b, ids), b.f32(attrs["tie_eps"])))
    used = b.op("GreaterOrEqual", b.reshape(b.input("evict_slots"), -1, 1, 1), b.i32(0))
    used = b.op("And", used, b.op("GreaterOrEqual", ids, b.i32(0)))
    return [b.op("Where", used, weight, b.f32(-np.inf))]


def slot_count(b: Body) -> ir.Value:
    """Return E as int64 [1], for reshapes.

    ONNX Runtime rewrites a reshape with one unknown size to -1, which fails where E is 0; a
    second unknown keeps it from that.
    """
    return b.size(b.input("evict_slots"), 0)


def key_positions(b: Body, block: int) -> tuple[ir.Value, ir.Value]:
    """Return (position of each key [E,R,N*b], FAR where invalid; the least of a row [E,R,1,1])."""
    ids = b.input("unit_ids")
    start = b.op("Mul", b.unsqueeze(ids, 3), b.i32(block))
    inside = b.const(np.arange(block), np.int32)
    row = b.op("Add", b.op("Mul", b.reshape(index(b, ids, 2), -1, 1), b.i32(block)), inside)
    valid = b.op("Less", row, b.reshape(b.input("lens"), -1, 1, 1, 1))  # [E, 1, N, b]
    valid = b.op("And", valid, b.op("GreaterOrEqual", start, b.i32(0)))
    position = b.op("Where", valid, b.op("Add", start, inside), b.i32(FAR))  # [E, R, N, b]
    position = b.reshape(position, slot_count(b), 0, b.op("Mul", b.size(ids, 2), b.i64(block)))
    return position, b.unsqueeze(b.reduce("Min", position, 2, keep=True), 3)


def query_positions(b: Body, window: int) -> ir.Value:
    """Return the position of each window query as int32 [E,1,W,1]; negative before the start."""
    newest = b.reshape(b.input("tokens_seen"), -1, 1, 1, 1)
    return b.op("Add", newest, b.const(np.arange(-window, 0).reshape(-1, 1), np.int32))


def probabilities(b: Body, mode: str, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the causal attention [E,heads,W,N*b] of the window over the keys of the slots.

    The mask is added: (query - key) * MASK_SLOPE where the key is newer, which costs one pass over
    the logits where a Where would cost seven. An empty row comes out arbitrary.
    """
    heads = dims.num_kv_heads
    slots = b.op("Max", b.input("evict_slots"), b.i32(0))
    keys = slot_keys(b, slots, position, dims)
    query = b.cast(b.op("Gather", b.input("q_window"), slots, axis=0), FLOAT)
    query = b.reshape(query, 0, 0, dims.window_heads, dims.head_dim)
    query = b.op("Mul", query, b.f32(dims.head_dim**-0.5))
    if mode == "mean_qk":
        query = b.reshape(b.reduce("Mean", query, 2), 0, 1, dims.window, dims.head_dim)
        keys = b.reduce("Mean", keys, 1, keep=True)
    else:
        query = b.op("Transpose", query, perm=[0, 2, 1, 3])
        group = dims.window_heads // heads
        query = b.reshape(query, 0, heads, group * dims.window, dims.head_dim)
    logits = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 1, 3, 2]))
    distance = b.op("Sub", query_positions(b, dims.window), b.unsqueeze(position, 2))
    bias = b.cast(b.op("Min", distance, b.i32(0)), FLOAT)
    bias = b.op("Mul", bias, b.f32(MASK_SLOPE))  # [E, R, W, N*b]
    count = b.size(position, 2)
    if mode == "per_head":
        grouped = b.reshape(logits, slot_count(b), heads, group, dims.window, count)
        logits = b.op("Add", grouped, b.unsqueeze(bias, 2))
        probs = b.op("Softmax", logits, axis=-1)
        return b.reshape(probs, slot_count(b), dims.window_heads, dims.window, count)
    queries = 1 if mode == "mean_qk" else dims.window_heads
    logits = b.reshape(logits, slot_count(b), queries, dims.window, count)
    return b.op("Softmax", b.op("Add", logits, bias), axis=-1)


def slot_keys(b: Body, slots: ir.Value, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the keys of the slots as fp32 [E,Hkv,N*b,D], invalid rows replaced by a valid one."""
    keys = b.input("keys")
    capacity = b.cast(b.size(keys, 2), ir.DataType.INT32)
    row = index(b, position, 2)
    some = b.op("ArgMin", position, axis=2, keepdims=1)  # of the oldest key, if there is one
    some = b.cast(some, ir.DataType.INT32)
    row = b.op("Where", b.op("Less", position, b.i32(FAR)), row, some)  # [E, R, N*b]
    head = b.op("Mul", b.reshape(slots, -1, 1), b.i32(dims.num_kv_heads))
    head = b.op("Add", head, b.const(np.arange(dims.num_kv_heads), np.int32))  # [E, Hkv]
    row = b.op("Add", row, b.unsqueeze(b.op("Mul", head, capacity), 2))
    flat = b.reshape(keys, -1, dims.head_dim)
    return b.cast(b.op("Gather", flat, row, axis=0), FLOAT)


def walk_rows(attrs: Mapping[str, ops.Value], window: int) -> list[int]:
    """Return the window rows that the walk visits, in its order.

    `chronological` and `newest_first` take the newest H; `strided` takes H rows spread evenly over
    the window, the newest included, in chronological order.
    """
    steps = min(int(attrs["walk_steps"]), window)
    order = ops.WALK_ORDER[int(attrs["walk_order"])]
    if order == "strided":
        return [window - 1 - i * window // steps for i in reversed(range(steps))]
    newest = list(range(window - steps, window))
    return newest[::-1] if order == "newest_first" else newest


def walk(b: Body, rows: ir.Value, visited: list[int]) -> ir.Value:
    """Return c [E,R,N] of the walk over the `visited` rows [E,R,W,N].

    C = sum of gamma_i row_i and gamma_i = 1 + sum over j < i of <row_i, row_j> gamma_j, so only
    the H x H inner products are needed, and H - 1 rounds solve the triangular system exactly.
    """
    picked = b.op("Gather", rows, b.i64(*visited), axis=2)  # [E, R, H, N]
    gram = b.op("MatMul", picked, b.op("Transpose", picked, perm=[0, 1, 3, 2]))
    steps = len(visited)
    gram = b.op("Mul", gram, b.const(np.tri(steps, k=-1), np.float32))
    gamma = b.const(np.ones((steps, 1)), np.float32)
    one = b.f32(1.0)
    for _ in visited[1:]:
        gamma = b.op("Add", b.op("MatMul", gram, gamma), one)
    total = b.reduce("Sum", b.op("Mul", picked, gamma), 2)
    # All rows empty gives 0 / floor = 0, never 0 / 0.
    return b.op("Div", total, b.op("Max", b.reduce("Sum", total, 2, keep=True), b.f32(1e-30)))


def ramp(b: Body, ids: ir.Value) -> ir.Value:
    """Return r [E,R,N]: 0 at the lowest id of a row, 1 at the highest, 0 if there is one unit."""
    pad = b.op("Less", ids, b.i32(0))
    high = b.reduce("Max", ids, 2, keep=True)
    low = b.reduce("Min", b.op("Where", pad, b.i32(FAR), ids), 2, keep=True)
    span = b.op("Max", b.op("Sub", high, low), b.i32(1))
    return b.op("Div", b.cast(b.op("Sub", ids, low), FLOAT), b.cast(span, FLOAT))
