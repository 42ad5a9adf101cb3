"""A numeric self-test of ONNX Runtime: causal attention over a partly filled cache.

Some versions compute it wrongly without a word, so both forms that an engine may use are compared
with numpy: GroupQueryAttention on a shared buffer, and TensorScatter with Attention of opset 24.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

Floats = NDArray[np.float32]
HEADS, KV_HEADS, DIM, CAPACITY = 4, 2, 8, 12
#: Steps as (new tokens, tokens already cached per sequence): a first chunk, a later one, decode.
STEPS = ((5, (0,)), (4, (5,)), (1, (3, 9)))
FORMS = ("gqa", "portable")


@cache
def attention_error(form: str) -> float:
    """Return the largest difference from numpy over `STEPS`, near 1e-7 where all is well.

    Computed once per process.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(
        _model(form).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(0)
    worst = 0.0
    for new, past in STEPS:
        batch = len(past)
        q, k, v = (
            rng.standard_normal((batch, heads, new, DIM), dtype=np.float32)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        shape = (batch, KV_HEADS, CAPACITY, DIM)
        # Large stale rows: an engine that reads one is far off.
        keys, values = (100 * rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        for b, length in enumerate(past):
            keys[b, :, :length] /= 100
            values[b, :, :length] /= 100
        expected = _expected(q, k, v, keys, values, past)
        found = _run(ort, session, form, (q, k, v), (keys, values), past)
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst


def _run(
    ort: Any,
    session: Any,
    form: str,
    new: tuple[Floats, Floats, Floats],
    cache: tuple[Floats, Floats],
    past: tuple[int, ...],
) -> Floats:
    """Run a step as sessions do, with each cache bound as input and as output."""
    total = np.array(past, np.int64) + new[0].shape[2]
    feeds: dict[str, NDArray[Any]]
    if form == "gqa":
        feeds = {"last": (total - 1).astype(np.int32), "longest": np.array(total.max(), np.int32)}
        flat = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in new]
        feeds |= {n: x.reshape(*x.shape[:2], -1) for n, x in zip("qkv", flat, strict=True)}
    else:
        feeds = {"start": np.array(past, np.int64), "total": total}
        feeds |= dict(zip("qkv", new, strict=True))
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for name, array in zip(("keys", "values"), cache, strict=True):
        shared = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, shared)
        binding.bind_ortvalue_output(f"new_{name}", shared)
    rows = feeds["q"].shape
    out = np.empty(rows, np.float32)
    binding.bind_ortvalue_output("out", ort.OrtValue.ortvalue_from_numpy(out))
    session.run_with_iobinding(binding)
    if form == "gqa":
        out = out.reshape(*rows[:2], HEADS, DIM).transpose(0, 2, 1, 3)
    return out


def _expected(
    q: Floats, k: Floats, v: Floats, keys: Floats, values: Floats, past: tuple[int, ...]
) -> Floats:
    """Return attention [B, Hq, S, D] by numpy, in float64."""
    out = np.zeros(q.shape)
    for b, length in enumerate(past):
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            every_k = np.concatenate([keys[b, g, :length], k[b, g]]).astype(np.float64)
            every_v = np.concatenate([values[b, g, :length], v[b, g]])
            for s in range(q.shape[2]):
                seen = length + s + 1
                logits = every_k[:seen] @ q[b, h, s] / np.sqrt(DIM)
                weights = np.exp(logits - logits.max())
                out[b, h, s] = weights @ every_v[:seen] / weights.sum()
    return out.astype(np.float32)


def _model(form: str) -> onnx.ModelProto:
    """Return a model of one attention over inputs q, k, v and the cache."""
    f32, i32, i64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
    cache = [("keys", f32, 4), ("values", f32, 4)]
    if form == "gqa":
        extra = [("last", i32, 1), ("longest", i32, 0)]
        nodes = [
            helper.make_node(
                "GroupQueryAttention",
                ["q", "k", "v", "keys", "values", "last", "longest"],
                ["out", "new_keys", "new_values"],
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
            )
        ]
    else:
        extra = [("start", i64, 1), ("total", i64, 1)]
        nodes = [
            helper.make_node("TensorScatter", [name, x, "start"], [f"new_{name}"], axis=2)
            for name, x in (("keys", "k"), ("values", "v"))
        ]
        names = ["q", "new_keys", "new_values", "", "", "", "total"]
        nodes.append(helper.make_node("Attention", names, ["out"], is_causal=1))
    rank = 3 if form == "gqa" else 4
    rows = [(name, f32, rank) for name in "qkv"]
    outputs = [("out", f32, rank), ("new_keys", f32, 4), ("new_values", f32, 4)]
    graph = helper.make_graph(
        nodes,
        "selftest",
        [_info(*x) for x in (*rows, *cache, *extra)],
        [_info(*x) for x in outputs],
    )
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def _info(name: str, dtype: int, rank: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, [f"{name}_{i}" for i in range(rank)])
