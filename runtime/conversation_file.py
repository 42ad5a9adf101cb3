"""A session in a safetensors file: the same package may go on with it, in another process."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvsift.builder.errors import SessionError, UsageError
from kvsift.builder.package import Manifest, package_hash
from kvsift.builder.states import STATES
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.conversations import Conversation
from kvsift.runtime.held import HeldRows
from kvsift.runtime.seeds import Seeds

#: Raised whenever an older reader could misread a file.
FORMAT = 1
_HEAD = "kvsift_session"


def save_conversation(path: str | Path, conversation: Conversation, manifest: Manifest) -> None:
    """Write a session to a file; an existing one is replaced only when the new one is whole.

    Tensors: `tokens` int64 [T], `ids`, `lens`, `queries`, and `{key,value,state}.{layer}` as in
    `HeldRows`; the rest is JSON in the metadata. UsageError if the file cannot be written.
    """
    path, rows = Path(path).expanduser(), conversation.rows
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
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        save_file(tensors, temporary, {_HEAD: json.dumps(head)})
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot write the session {path}: {why}; choose another file") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def load_conversation(path: str | Path, manifest: Manifest) -> Conversation:
    """Return the session in a file.

    SessionError if it was saved by another package or is damaged, UsageError if there is none.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"there is no session {path}; save one first")
    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads((file.metadata() or {})[_HEAD])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
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
        return _conversation(head, tensors, manifest)
    except (KeyError, IndexError, TypeError, ValueError) as error:
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
        seen=int(head["seen"]),
        steps=int(head["steps"]),
        layers=layers,
        queries=tensors["queries"] if policy.window else None,
    )
    heads = model.num_kv_heads
    for i, arrays in enumerate(layers):
        longest = int(rows.lens[i].max())
        for name, array in arrays.items():
            by_row = name in (KEY, VALUE) or STATES[name].follows_rows
            if by_row and array.shape[:2] != (heads, longest):
                raise ValueError(f"{name}.{i} has the shape {array.shape}")
    tokens = tuple(int(i) for i in tensors["tokens"])
    if not 0 < rows.seen <= len(tokens):
        raise ValueError(f"{rows.seen} of {len(tokens)} tokens were read")
    return Conversation(
        tokens=tokens,
        rows=rows,
        pins=tuple((int(a), int(b)) for a, b in head["pins"]),
        seeds=Seeds(*(int(seed) for seed in head["seeds"])),
        turns=int(head["turns"]),
    )
