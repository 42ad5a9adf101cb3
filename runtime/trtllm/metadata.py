"""Reads what the adapter needs of TensorRT-LLM's attention metadata and of q and k."""

from __future__ import annotations

from typing import Any

from kvsift.builder.errors import UsageError
from kvsift.runtime.kernels import FLOAT_TYPES


def integers(name: str, values: Any, count: int) -> list[int]:
    """Return the first `count` of a host array or list as integers; UsageError if it is shorter."""
    found = [int(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
    if len(found) < count:
        raise UsageError(
            f"metadata.{name} has {len(found)} values and there are {count} context sequences; "
            "it must have one for each sequence, context sequences first"
        )
    return found[:count]


def context_lens(metadata: Any) -> list[int]:
    """Return the prompt lengths of the context sequences, which come first in the batch.

    Reads `num_contexts`, `seq_lens` [num_seqs] and, if it is there, `kv_lens` [num_seqs]. Raises
    UsageError for a prompt of which an earlier part lies in the cache.
    """
    try:
        count, seq_lens = int(metadata.num_contexts), metadata.seq_lens
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"this is no attention metadata of TensorRT-LLM: {error}; "
            "it must have num_contexts and seq_lens"
        ) from None
    if count <= 0:
        return []
    lens = integers("seq_lens", seq_lens, count)
    for i, n in enumerate(lens):
        if n < 1:
            raise UsageError(
                f"metadata.seq_lens[{i}] is {n}; a context sequence has 1 token or more"
            )
    kv_lens = getattr(metadata, "kv_lens", None)
    if kv_lens is not None:
        for i, (n, total) in enumerate(zip(lens, integers("kv_lens", kv_lens, count), strict=True)):
            if n != total:
                raise UsageError(
                    f"context sequence {i} brings {n} of its {total} tokens; prompts must come "
                    "whole: set enable_chunked_prefill=False and "
                    "KvCacheConfig(enable_block_reuse=False)"
                )
    return lens


def split_qk(q: Any, k: Any, tokens: int, q_size: int, kv_size: int) -> tuple[Any, Any, str]:
    """Return the context tokens' queries and keys, views, and their float type.

    `q` [num_tokens, q_size] with `k` [num_tokens, kv_size], or packed QKV [num_tokens, q_size +
    2 kv_size] with k None. Raises UsageError for other shapes or types.
    """
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in FLOAT_TYPES:
        raise UsageError(f"q has the type {dtype}; it must be one of: {', '.join(FLOAT_TYPES)}")
    widths = {"q": q_size, "k": kv_size} if k is not None else {"q": q_size + 2 * kv_size}
    for name, array in (("q", q), ("k", k)):
        if name not in widths:
            continue
        shape = tuple(array.shape)
        if len(shape) != 2 or shape[1] != widths[name] or shape[0] < tokens:
            packed = " (packed QKV, as k is None)" if k is None else ""
            raise UsageError(
                f"{name}{packed} has the shape {list(shape)}; it must be [num_tokens, "
                f"{widths[name]}] with num_tokens >= {tokens}, the context tokens"
            )
    if k is None:
        return q[:tokens, :q_size], q[:tokens, q_size : q_size + kv_size], dtype
    if k.dtype != q.dtype:
        raise UsageError(f"k has the type {k.dtype} and q {q.dtype}; both must have one type")
    return q[:tokens], k[:tokens], dtype
