"""A session in a safetensors file: the same package may go on with it, in another process."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvsift.builder.errors import SessionError, UsageError
from kvsift.builder.package import Manifest, package_hash, window_features
from kvsift.builder.states import STATES
from kvsift.runtime.cache import KEY, VALUE, Array
from kvsift.runtime.conversations import Conversation
from kvsift.runtime.devices.tensors import numpy_type
from kvsift.runtime.held import HeldRows
from kvsift.runtime.params import INT32_MAX, EvictionParams, check_integer
from kvsift.runtime.paths import replacing, user_path
from kvsift.runtime.seeds import Seeds, check_seed

#: Raised whenever an older reader could misread a file.
FORMAT = 2
_HEAD = "kvsift_session"


def save_conversation(path: str | Path, conversation: Conversation, manifest: Manifest) -> None:
    """Write a session to a file; an existing one is replaced only when the new one is whole.

    Tensors: `tokens` int64 [T], `ids`, `lens`, `queries`, and `{key,value,state}.{layer}` as in
    `HeldRows`; the rest is JSON in the metadata. UsageError if the file cannot be written.
    """
    path, rows = check_writable(path), conversation.rows
    tensors: dict[str, Any] = {
        "tokens": np.array(conversation.tokens, np.int64),
        "ids": np.ascontiguousarray(rows.ids),
        "lens": np.ascontiguousarray(rows.lens),
    }
    if rows.queries is not None:
        tensors["queries"] = rows.queries
    for layer, arrays in enumerate(rows.layers):
        tensors |= {f"{name}.{layer}": array for name, array in arrays.items()}
    head = {
        "format": FORMAT,
        "package": package_hash(manifest),
        "policy": manifest.policy.name,
        "kvsift_version": manifest.kvsift_version,
        "seen": rows.seen,
        "steps": rows.steps,
        "pins": conversation.pins,
        "seeds": [conversation.seeds.sampling, conversation.seeds.eviction],
        "turns": conversation.turns,
    }
    head["crc32"] = checksum(head, tensors)
    try:
        with replacing(path) as made:
            save_file(tensors, made, {_HEAD: json.dumps(head)})
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot write the session {path}: {why}; choose another file") from None


def checksum(head: Mapping[str, Any], tensors: Mapping[str, Array]) -> int:
    """Return the CRC-32 of a session's tensors, and of its head without the sum itself."""
    said = {name: value for name, value in head.items() if name != "crc32"}
    found = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        found = zlib.crc32(np.ascontiguousarray(tensors[name]).data, found)
    return found


def check_writable(path: str | Path) -> Path:
    """Return the file that a session would be written to; UsageError if it could not be.

    A link stays one: what it points to is replaced. A device or a pipe is no file.
    """
    path = user_path("the session file", path).resolve()
    why = None
    if path.exists() and not path.is_file():
        why = "it is no file"
    elif not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif not os.access(path.parent, os.W_OK):
        why = f"its directory {path.parent} may not be written to"
    if why is not None:
        raise UsageError(f"cannot write the session {path}: {why}; choose another file")
    return path


def load_conversation(path: str | Path, manifest: Manifest) -> Conversation:
    """Return the session in a file.

    SessionError if it was saved by another package or is damaged, UsageError if there is none.
    """
    path = user_path("the session file", path)
    if not path.is_file():
        raise UsageError(f"there is no session {path}; save one first")
    try:
        with safe_open(path, framework="numpy") as file:
            head = dict(json.loads((file.metadata() or {})[_HEAD]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise SessionError(
            f"{path} is no session, or a damaged one ({str(error)!s:.80}); save it anew"
        ) from None
    ours = package_hash(manifest)
    if head.get("format") != FORMAT or head.get("package") != ours:
        raise SessionError(
            f"{path} was saved by another engine (policy {head.get('policy')}, package "
            f"{str(head.get('package'))[:12]}, session format {head.get('format')}), and this one "
            f"is {ours[:12]}, format {FORMAT}; load it with the engine that saved it"
        )
    try:
        made = _conversation(head, tensors, manifest)
        if head["crc32"] != checksum(head, tensors):
            raise ValueError("its values are not those that were saved")
        return made
    except (KeyError, TypeError, ValueError) as error:  # a UsageError is a ValueError
        raise SessionError(f"{path} is damaged ({error!s:.80}); save it anew") from None


def _conversation(
    head: dict[str, Any], tensors: dict[str, Any], manifest: Manifest
) -> Conversation:
    """Return the session that the parts of a file make; any error means that it is damaged."""
    model, policy = manifest.model, manifest.policy
    layers = tuple(
        {name: tensors[f"{name}.{i}"] for name in (KEY, VALUE, *policy.states)}
        for i in range(model.num_layers)
    )
    rows = HeldRows(
        ids=tensors["ids"],
        lens=tensors["lens"],
        seen=check_integer("seen", head["seen"], 1, ""),
        steps=check_integer("steps", head["steps"], 0, "", INT32_MAX),
        layers=layers,
        queries=tensors["queries"] if policy.window else None,
    )
    check_rows(rows, manifest)
    _check_array("tokens", tensors["tokens"], np.dtype(np.int64), (None,))
    tokens = tuple(tensors["tokens"].tolist())
    # An answer's last token has been chosen and not read, unless there was no answer.
    if not rows.seen <= len(tokens) <= min(rows.seen + 1, model.max_positions):
        raise ValueError(f"{rows.seen} of {len(tokens)} tokens were read")
    if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise ValueError("a token is outside the vocabulary")
    pins = EvictionParams(pin=head["pins"]).pin
    if any(end > len(tokens) for _, end in pins):
        raise ValueError("a pin ends beyond the tokens")
    return Conversation(
        tokens=tokens,
        rows=rows,
        pins=tuple(pins),
        seeds=Seeds(*(check_seed("seeds", seed) for seed in head["seeds"])),
        turns=check_integer("turns", head["turns"], 1, "", INT32_MAX),
    )


def check_rows(rows: HeldRows, manifest: Manifest) -> None:
    """Raise ValueError if rows could not come from a slot of an engine."""
    model, policy = manifest.model, manifest.policy
    heads, size = model.num_kv_heads, policy.block_size
    layers, int32 = model.num_layers, np.dtype(np.int32)
    sets = heads if policy.per_head else 1
    _check_array("ids", rows.ids, int32, (layers, sets, None))
    _check_array("lens", rows.lens, int32, (layers, heads if policy.layout == "head" else 1))
    if rows.lens.min() < 1 or rows.lens.max() > rows.seen:
        raise ValueError(f"lens are not in [1, {rows.seen}]")
    units = np.broadcast_to(-(-rows.lens // size), rows.ids.shape[:2])
    there = np.arange(rows.ids.shape[2]) < units[..., None]
    rising = (np.diff(rows.ids, axis=2) > 0) | ~there[:, :, 1:]
    if units.max() != rows.ids.shape[2] or not (rising.all() and (there == (rows.ids >= 0)).all()):
        raise ValueError("ids do not rise, or are not as many as lens say")
    last = np.take_along_axis(rows.ids, units[..., None].astype(np.int64) - 1, axis=2)[..., 0]
    partial = (rows.lens % size != 0) & (last != (rows.seen - 1) // size)
    if last.max() > (rows.seen - 1) // size or partial.any():
        raise ValueError("ids go beyond what was seen")
    floats, single = numpy_type(manifest.dtype), np.dtype(np.float32)
    for i, arrays in enumerate(rows.layers):
        longest = int(rows.lens[i].max())
        for name, array in arrays.items():
            if name in (KEY, VALUE):
                _check_array(f"{name}.{i}", array, floats, (heads, longest, model.head_dim))
            else:
                dims = (longest if d == "C" else int(d) for d in STATES[name].dims(model))
                _check_array(f"{name}.{i}", array, single, tuple(dims))
    if rows.queries is not None:
        features = layers * window_features(model, policy)
        _check_array("queries", rows.queries, floats, (policy.window + 1, features))


def _check_array(
    name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int | None, ...]
) -> None:
    """Raise ValueError if an array is of another type or shape (None: any size), or not finite."""
    fits = array.ndim == len(shape) and all(
        n in (None, m) for n, m in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits or array.size == 0:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not {dtype} {shape}")
    if array.dtype.kind not in "iu" and not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"{name} holds NaN or infinity")
