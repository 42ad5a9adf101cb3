"""What stands on top of a session, on the device that is the host: turns, prefixes, streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_engines import on_cpu, package
from engines import Engines, prompt, request
from kept import POLICIES

from kvsift.runtime.conversations import Conversations
from kvsift.runtime.engine import Engine
from kvsift.runtime.prefixes import Prefixes
from kvsift.runtime.results import GenerationResult

#: One set for all heads in blocks; heads of their own lengths with sums of rows; moments.
NAMES = ["nexus", "nestedkv-both", "h2o", "expected_attention"]


def turns(engine: Engine) -> list[GenerationResult]:
    """Three turns of a conversation, each of which evicts."""
    engine.conversations = Conversations()
    asked = [(150, 30), (1, 20), (200, 33)]
    made = [
        request(prompt(length, seed=n), answer, seed=7, density=0.3)
        for n, (length, answer) in enumerate(asked)
    ]
    return [engine.generate([replace(one, session_id="s")])[0] for one in made]


def prefixed(engine: Engine) -> list[GenerationResult]:
    """Two requests that share a prefix; the second one does not read it."""
    engine.prefixes = Prefixes(engine.prefixes.longest, engine.prefixes.token_bytes)
    shared = prompt(150, seed=9)
    engine.prefixes.add(shared)
    made = [engine.generate([request([*shared, *prompt(n, n)], 40)])[0] for n in (200, 90)]
    assert made[1].cached_tokens == 150
    return made


def streamed(engine: Engine) -> list[GenerationResult]:
    """A prompt longer than the scratch."""
    return engine.generate([request(600, 40, budget_tokens=96)])


def guarded(engine: Engine) -> list[GenerationResult]:
    """A budget that is raised until it holds enough of the attention."""
    return engine.generate([request(300, 20, density=0.1, min_coverage=0.8)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("run", "limits"),
    [(turns, {}), (prefixed, {}), (streamed, {"max_scratch": 256}), (guarded, {})],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_equals_onnx_runtime(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    run: Callable[[Engine], list[GenerationResult]],
    limits: dict[str, Any],
) -> None:
    policy, options = name.split("-")[0], POLICIES[name] | {"limits": limits}
    if run is guarded and name in ("nestedkv-both", "expected_attention"):
        options |= {"scorer": "snapkv"}
    want = run(Engine(engines.package(policy, **options), threads=1))
    with on_cpu(package(engines, tmp_path / "e", policy, **options), monkeypatch) as (engine, _):
        got = run(engine)
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    assert [r.kept_tokens for r in got] == [r.kept_tokens for r in want]
    assert [r.evictions for r in got] == [r.evictions for r in want]
    assert sum(r.evictions for r in want) >= 1
