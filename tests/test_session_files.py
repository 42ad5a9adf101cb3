"""Files of sessions that are damaged or cannot be written, and limits that make no sense."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import is_error, kvsift
from engines import Engines, prompt, request
from kept import engine_of
from safetensors import safe_open
from safetensors.numpy import save_file

from kvsift.builder.errors import SessionError, UsageError
from kvsift.runtime.conversation_file import checksum
from kvsift.runtime.conversations import Conversations
from kvsift.runtime.engine import Engine
from kvsift.runtime.llm import LLM
from kvsift.runtime.scheduler import Scheduler

HEAD = "kvsift_session"
Parts = tuple[dict[str, Any], dict[str, Any]]


def talked(engines: Engines, name: str, path: Path) -> tuple[Engine, Path]:
    """Return an engine with a session "s", which is in a file as well."""
    engine = engine_of(engines, name)
    engine.conversations = Conversations()
    engine.generate([replace(request(150, 20, density=0.3), session_id="s")])
    engine.save_session("s", path / "s.session")
    return engine, path / "s.session"


def parts(path: Path) -> Parts:
    with safe_open(path, framework="numpy") as file:
        head = json.loads(file.metadata()[HEAD])
        return head, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write(path: Path, head: Any, tensors: dict[str, Any]) -> None:
    """Write a session; its checksum is right, so that the other checks are needed."""
    if isinstance(head, dict):
        head = {**head, "crc32": checksum(head, tensors)}
    text = head if isinstance(head, str) else json.dumps(head)
    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, path, {HEAD: text})


HEADS: list[tuple[str, Any]] = [
    *(("seen", value) for value in (0, -1, 5, 10**30, 3.7, "x")),
    *(("steps", value) for value in (-1, 2**40, None)),
    *(("turns", value) for value in (0, -1, 2**70)),
    *(("seeds", value) for value in ([1], [2**64, 0], [-1, 1], 5)),
    *(("pins", value) for value in ([[5, 1]], [[-5, 5]], [[0, 10**6]], [[0, 1, 2]], "ab")),
]


def test_a_damaged_head_is_refused(engines: Engines, tmp_path: Path) -> None:
    engine, path = talked(engines, "nexus", tmp_path)
    head, tensors = parts(path)
    damaged: list[Any] = ["[]", "null", "5", '"x"', "{", json.dumps(head).replace('"seen": ', "")]
    damaged += [{**head, name: value} for name, value in HEADS]
    damaged += [json.dumps(head).replace(f'"turns": {head["turns"]}', '"turns": 1e400')]
    for wrong in damaged:
        write(path, wrong, tensors)
        with pytest.raises(SessionError, match=r"damaged|no session|another engine"):
            engine.load_session(path, "t")
    assert engine.conversations.ids() == ["s"]


def test_one_flipped_bit_is_noticed(engines: Engines, tmp_path: Path) -> None:
    engine, path = talked(engines, "nexus", tmp_path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in np.linspace(start, len(whole) - 1, 40).astype(int):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(SessionError, match="is damaged"):
            engine.load_session(path, "t")
    path.write_bytes(whole)
    head, tensors = parts(path)
    save_file(tensors, path, {HEAD: json.dumps({**head, "steps": head["steps"] + 1})})
    with pytest.raises(SessionError, match="values are not those that were saved"):
        engine.load_session(path, "t")


@pytest.mark.parametrize("name", ["nexus", "adakv-both", "h2o", "expected_attention"])
def test_damaged_tensors_are_refused(engines: Engines, tmp_path: Path, name: str) -> None:
    engine, path = talked(engines, name, tmp_path)
    head, tensors = parts(path)
    for tensor, array in tensors.items():
        fourth = array.ravel()[:4]
        # Tokens less one are those of a turn without an answer.
        cut = 2 if tensor == "tokens" else 1
        spoiled = [array[:-cut], array[..., :-cut], array.ravel()[None, None], array[:0], fourth]
        spoiled += [array.astype(np.float64), array.astype(np.int16), -1 - abs(array)]
        if array.dtype.kind == "f":
            spoiled = [*spoiled[:-1], array * np.nan]
        else:
            spoiled += [array + 10**6]
        if tensor == "ids":
            spoiled += [array[..., ::-1], array * 0]
        for wrong in spoiled:
            if wrong.shape == array.shape and (wrong == array).all() and wrong.dtype == array.dtype:
                continue
            write(path, head, tensors | {tensor: wrong})
            with pytest.raises(SessionError, match="is damaged"):
                engine.load_session(path, "t")
        write(path, head, {n: a for n, a in tensors.items() if n != tensor})
        with pytest.raises(SessionError, match="is damaged"):
            engine.load_session(path, "t")
    write(path, head, tensors)
    engine.load_session(path, "t")
    asked = replace(request(20, 5, density=0.3), session_id="t")
    assert engine.generate([asked])[0].session_turn == 2


@pytest.mark.parametrize("path", [None, 5, b"x", "", "a\0b", "~nobody-of-that-name/x"])
def test_what_is_no_path_is_refused(engines: Engines, tmp_path: Path, path: Any) -> None:
    engine, _ = talked(engines, "nexus", tmp_path)
    with pytest.raises(UsageError, match="the session file"):
        engine.save_session("s", path)
    with pytest.raises(UsageError, match="the session file"):
        engine.load_session(path, "t")


def test_only_files_are_replaced(engines: Engines, tmp_path: Path) -> None:
    engine, path = talked(engines, "nexus", tmp_path)
    pipe, link, long = tmp_path / "pipe", tmp_path / "link", tmp_path / ("x" * 250)
    os.mkfifo(pipe)
    for wrong in (pipe, tmp_path, tmp_path / "absent" / "s"):
        with pytest.raises(UsageError, match="cannot write the session"):
            engine.save_session("s", wrong)
        is_error(
            kvsift("chat", engine.directory, "--session", wrong, input="hi\n"),
            2,
            "cannot write the session",
        )
    assert pipe.is_fifo()
    link.symlink_to(path)
    path.unlink()
    for right in (link, long):
        engine.save_session("s", right)
        engine.load_session(right, "t")
    assert link.is_symlink()
    assert path.is_file()


def test_a_session_that_was_dropped_may_be_loaded_again(engines: Engines, tmp_path: Path) -> None:
    engine, path = talked(engines, "nexus", tmp_path)
    engine.conversations.max_bytes = 0
    assert engine.conversations.ids() == []
    engine.conversations.max_bytes = 1 << 30
    with pytest.raises(SessionError, match="is gone"):
        engine.generate([replace(request(5, 1), session_id="s")])
    engine.load_session(path, "s")
    assert engine.generate([replace(request(5, 1), session_id="s")])[0].session_turn == 2


@pytest.mark.parametrize("limit", ["max_bytes", "ttl_s"])
@pytest.mark.parametrize("value", ["5", -1, float("nan"), True])
def test_limits_are_checked_when_they_are_set(engines: Engines, limit: str, value: Any) -> None:
    """The engine's thread uses them, where an error would end everything."""
    engine = engine_of(engines, "nexus")
    engine.conversations = Conversations()
    with Scheduler(engine) as scheduler:
        with pytest.raises(UsageError, match=f"{limit} must be"):
            setattr(engine.conversations, limit, value)
        with pytest.raises(UsageError, match=f"{limit} must be"):
            Conversations(**{limit: value})
        ticket = scheduler.submit(replace(request(5, 1), session_id="s"))
        assert ticket.result(60).session_turn == 1


def test_a_request_for_another_turn_is_refused(engines: Engines) -> None:
    """Its text and its pins stand where that turn was to be."""
    with LLM(engine_of(engines, "nexus").directory, threads=1) as llm:
        told = [{"role": "user", "content": "hello"}]
        first, stale = (llm.chat_request(told, session_id="s") for _ in range(2))
        assert llm.scheduler.submit(first).result(60).session_turn == 1
        with pytest.raises(SessionError, match=r"session 's' has 1 turns here, so turn 1 is not"):
            llm.scheduler.submit(stale)
        assert llm.chat(told, session_id="s")[0].session_turn == 2
        assert llm.generate(prompt(5), session_id="s")[0].session_turn == 3
