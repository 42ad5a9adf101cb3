"""The demo's document and its verdict; `make demo` runs the rest on the default model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvsift import GenerationResult
from kvsift.runtime.results import Timings

SCRIPT = Path(__file__).parent.parent / "scripts" / "demo.py"
TOKEN = 100


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def test_document_states_the_fact_in_its_middle_only(demo: ModuleType) -> None:
    before, after = demo.document().split(demo.FACT)
    assert demo.SECRET not in before + after
    assert 0.9 < len(before) / len(after) < 1.1
    lines = (before + after).split("\n")
    assert len(set(lines) - {""}) == demo.LINES


def answer(demo: ModuleType, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "text": f"It is {demo.SECRET}.",
        "token_ids": (1, 2),
        "finish_reason": "stop",
        "logprobs": None,
        "prompt_tokens": 2080,
        "seed": 0,
        "eviction_seed": 0,
        "budget_tokens": 416,
        "kept_tokens": 420,
        "coverage": None,
        "coverages": (),
        "guardrail": None,
        "budget_raised_tokens": 0,
        "cached_tokens": 0,
        "session_turn": None,
        "kv_bytes": 420 * TOKEN,
        "kv_bytes_allocated": 512 * TOKEN,
        "kv_bytes_dense": 2084 * TOKEN,
        "evictions": 1,
        "timings": Timings(1.0, (0.1,), 1.1),
    }
    return demo.Answer(GenerationResult(**values | changes), 32 * TOKEN, 0)


def test_verdict_tells_right_from_wrong(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = answer(demo, budget_tokens=None, kept_tokens=2084, kv_bytes=2084 * TOKEN, evictions=0)
    good = answer(demo)
    assert demo.problems(dense, good) == []
    demo.show(dense, good)
    assert "0.215" in capsys.readouterr().out
    for fault, words in (
        ({"text": "It is 1234."}, "does not contain"),
        ({"budget_tokens": 448}, "within 5 %"),
        ({"budget_tokens": 384, "kept_tokens": 400, "kv_bytes": 400 * TOKEN}, "within 5 %"),
        ({"kept_tokens": 450, "kv_bytes": 450 * TOKEN}, "more than"),
    ):
        (problem,) = demo.problems(dense, answer(demo, **fault))
        assert words in problem
    assert demo.problems(answer(demo, text="", budget_tokens=None), good)
