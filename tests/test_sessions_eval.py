"""Sessions of the evaluation: what a turn adds, what stays, and that asking leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from engines import Engines, prompt
from typer.testing import CliRunner

from kvsift.builder.errors import UsageError
from kvsift.runtime.chat import ChatTemplate, encode_chat
from kvsift.runtime.evaluation import builds, sessions, texts
from kvsift.runtime.evaluation.__main__ import app
from kvsift.runtime.evaluation.lab import Lab, token_budget
from kvsift.runtime.evaluation.ruler_run import Job
from kvsift.runtime.evaluation.variants import Spec, Variant
from kvsift.runtime.layer_budgets import layer_budgets

NAMES = ("nexus", "snapkv", "nestedkv", "h2o", "expected_attention")


@pytest.fixture(scope="module")
def lab(engines: Engines) -> tuple[Lab, list[Variant]]:
    specs = [Spec(name, name) for name in NAMES]
    return builds.prepare(engines.root / "sessions", engines.model("tiny"), 700, specs, 1)


def text(index: int, size: int) -> texts.Sample:
    words = " ".join(f"Sentence {i} of text {index}." for i in range(600))
    return texts.prose_samples(tiny.tokenizer(), words, "numbers", index + 1, size)[index]


def test_turns_make_up_the_whole_conversation() -> None:
    tokenizer, template = tiny.tokenizer(), ChatTemplate(tiny.CHAT_TEMPLATE)
    for index in range(4):
        talk = sessions.conversation(tokenizer, template, text(index, 120), 3, 40)
        whole = tokenizer.decode([t for turn in talk.turns for t in turn])
        assert whole.count(talk.answer) == 1
        assert talk.answer in tokenizer.decode(list(talk.turns[0]))
        assert whole.count(sessions.REPLY) == 3
        asked = tokenizer.decode(list(talk.question))
        assert "What is the secret" in asked
        assert talk.answer not in asked
        assert len(encode_chat(tokenizer, whole)) == pytest.approx(
            sum(map(len, talk.turns)), abs=12
        )
    with pytest.raises(UsageError, match="turns must be at least 2"):
        sessions.conversation(tokenizer, template, text(0, 120), 1, 40)


@pytest.mark.parametrize("name", NAMES)
def test_a_question_on_the_side_leaves_no_trace(lab: tuple[Lab, list[Variant]], name: str) -> None:
    bench, variants = lab
    variant = next(v for v in variants if v.name == name)
    stage = bench.stage(variant.policy)
    followed = []
    for asks in (False, True):
        bench.read(prompt(200))
        slot = bench.evict(variant, token_budget(variant.policy, 200, 96), 3)
        if asks:
            saved = stage.save(slot)
            bench.force(variant, slot, prompt(20, seed=8))
            for token in prompt(9, seed=9):
                stage.step([slot], [[token]])
            slot = stage.restore(saved)
        bench.force(variant, slot, prompt(60, seed=5))
        assert bench.evict_turn(variant, slot, token_budget(variant.policy, slot.seen, 96))
        followed.append(bench.force(variant, slot, prompt(12, seed=6)))
        assert slot.rows_held == (96 if variant.policy.block_size == 1 else 100) + 12
    np.testing.assert_allclose(followed[0], followed[1], atol=1e-5)


def test_a_fact_that_was_evicted_is_gone_and_one_that_stays_is_not(
    lab: tuple[Lab, list[Variant]],
) -> None:
    bench, variants = lab
    tokenizer, template = tiny.tokenizer(), ChatTemplate(tiny.CHAT_TEMPLATE)
    talk = sessions.conversation(tokenizer, template, text(0, 160), 4, 40)
    runs = sessions.measure(bench, talk, [Job(v, 1.0, 0) for v in variants], 96, [1, 2, 4])
    assert [r["variant"] for r in runs] == list(NAMES)
    for run in runs:
        assert len(run["found"]) == len(run["answers"]) == 3
        assert all(96 <= rows <= 128 for rows in run["kept"][1:])
    assert len({tuple(r["kept"]) for r in runs}) == 1, "policies held different numbers of tokens"


def test_layers_share_a_turn_as_an_engine_would_at_its_length(
    lab: tuple[Lab, list[Variant]],
) -> None:
    bench, _ = lab
    spec = Spec("pyramidkv", "pyramidkv", options={"window": 4, "pyramid_beta": 4.0})
    variant = builds.make_variant(bench.manifest.model, spec)
    bench.read(prompt(110))
    slot = bench.evict(variant, 96, 0)
    bench.force(variant, slot, prompt(150, seed=2))
    assert bench.evict_turn(variant, slot, 96)
    expected = layer_budgets(variant.policy, 96, 260, 2, 4)
    assert expected[0] > expected[1]
    np.testing.assert_array_equal(slot.units[:, 0], expected)


def test_the_command_runs_and_resumes(tmp_path: Path) -> None:
    model = tiny.write_hf(tmp_path / "model", max_position_embeddings=1024)
    prose = tmp_path / "prose.txt"
    prose.write_text(" ".join(f"Sentence {i} says {i * i}." for i in range(3000)))
    arguments = ["sessions", "--out", str(tmp_path), "--model", str(model), "--samples", "2"]
    arguments += ["--turns", "3", "--turn-tokens", "64", "--budget", "64", "--threads", "1"]
    arguments += ["--prose", str(prose), "--variant", "full", "--variant", "nexus"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "| variant | after turn 1 | after turn 2 | after turn 3 |" in done.output
    content = json.loads((tmp_path / "sessions.json").read_text())
    kept = [{r["variant"]: r["kept"] for r in s["runs"]} for s in content["samples"]]
    assert all(k["full"][-1] > 200 and k["nexus"][-1] < 128 for k in kept)
    before = (tmp_path / "sessions.jsonl").read_text()
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert (tmp_path / "sessions.jsonl").read_text() == before
