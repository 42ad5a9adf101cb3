"""Sessions, streams, prefixes and the guardrail on a device's cache, against the host's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_engines import on_cpu, package
from engines import Engines, prompt, request

from kvsift.runtime.conversations import Conversations
from kvsift.runtime.engine import Engine
from kvsift.runtime.prefixes import Prefixes
from kvsift.runtime.results import GenerationResult

BLOCKS = {"options": {"block_size": 8}}
#: A query ring; sums that follow rows; moments that do not; heads that differ in length.
POLICIES: dict[str, dict[str, Any]] = {
    "nexus": BLOCKS,
    "h2o": {},
    "expected_attention": {},
    "nestedkv": {},
}
LIMITS = {"max_scratch": 256}


def tell(engine: Engine, evict_mass: bool, file: Path) -> list[GenerationResult]:
    """Run three turns, the second in a stream, then save, load and go on; then a shared prefix."""
    engine.conversations = Conversations()
    engine.prefixes = Prefixes(engine.prefixes.longest, engine.prefixes.token_bytes)
    results = []
    for number, length in enumerate((150, 300, 40)):
        ask = request(prompt(length, seed=number), 20, budget_tokens=96)
        results += engine.generate([replace(ask, session_id="s")])
    engine.save_session("s", file)
    engine.load_session(file, "again")
    results += engine.generate([replace(request(60, 20, budget_tokens=96), session_id="again")])
    engine.prefixes.add(prompt(100, seed=9))
    for seed in (1, 2):
        results += engine.generate([request([*prompt(100, seed=9), *prompt(50, seed)], 10)])
    if evict_mass:
        results += engine.generate([request(200, 20, budget_tokens=64, min_coverage=0.9)])
    return results


@pytest.mark.parametrize("name", POLICIES)
def test_a_device_holds_what_the_host_holds(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = POLICIES[name]
    host = engines(name, limits=LIMITS, **options)
    mass = host.manifest.policy.score_is_mass
    want = tell(host, mass, tmp_path / "host")
    directory = package(engines, tmp_path / "engine", name, limits=LIMITS, **options)
    with on_cpu(directory, monkeypatch) as (engine, _):
        got = tell(engine, mass, tmp_path / "device")
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    assert [r.kept_tokens for r in got] == [r.kept_tokens for r in want]
    assert [r.cached_tokens for r in got] == [r.cached_tokens for r in want]
    assert [r.guardrail for r in got] == [r.guardrail for r in want]
