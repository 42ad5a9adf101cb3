"""RULER's generators from outside: a stand-in package of the same shape, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from typer.testing import CliRunner

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime.evaluation import ruler, ruler_run
from kvsift.runtime.evaluation.__main__ import app

#: A generator as RULER's are: options from the command line, a tokenizer that it imports.
GENERATOR = """
import argparse, json, pathlib
from tokenizer import select_tokenizer
parser = argparse.ArgumentParser()
for name in ("save_dir", "save_name", "tokenizer_path", "tokenizer_type", "template"):
    parser.add_argument("--" + name)
for name in ("max_seq_length", "tokens_to_generate", "num_samples", "random_seed", "needles"):
    parser.add_argument("--" + name, type=int)
args = parser.parse_args()
tokens = select_tokenizer(args.tokenizer_type, args.tokenizer_path).text_to_tokens
made = pathlib.Path(args.save_dir) / args.save_name / "validation.jsonl"
made.parent.mkdir(parents=True)
lines = []
for index in range(args.num_samples):
    needle = f"The magic number of key{index} is: {1000 + index}."
    context = needle
    def text():
        return args.template.format(context=context, query=f"key{index}", type_needle_v="number")
    while len(tokens(text())) + args.tokens_to_generate < args.max_seq_length - 20:
        context += " The grass is green."
    lines.append({"index": index, "input": text(), "outputs": [str(1000 + index)]})
made.write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""
CONSTANTS = """
TASKS = {"niah": {"tokens_to_generate": 8, "template": "Read this.\\n{context}\\nWhat is the magic "
         "{type_needle_v} of {query}?", "answer_prefix": " The special magic {type_needle_v} is"}}
"""
METRICS = """
def part(preds, refs):
    return [sum(r in p for r in ref) / len(ref) * 100 for p, ref in zip(preds, refs)]
TASKS = {"niah": {"metric_fn_per_sample": part}}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "site" / ruler.PACKAGE
    for file, text in {
        "__init__.py": "",
        "synthetic.yaml": "one:\n  task: niah\n  args:\n    needles: 1\n",
        "data/__init__.py": "",
        "data/synthetic/__init__.py": "",
        "data/synthetic/constants.py": CONSTANTS,
        "data/synthetic/niah.py": GENERATOR,
        "eval/__init__.py": "",
        "eval/synthetic/__init__.py": "",
        "eval/synthetic/constants.py": METRICS,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    monkeypatch.syspath_prepend(str(root.parent))
    for name in [n for n in __import__("sys").modules if n.startswith(ruler.PACKAGE)]:
        monkeypatch.delitem(__import__("sys").modules, name)
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_hf(tmp_path_factory.mktemp("ruler") / "model", max_position_embeddings=2048)


def test_samples_are_cut_at_the_question_and_made_once(
    package: Path, model: Path, tmp_path: Path
) -> None:
    (task,) = ruler.tasks()
    made = ruler.questions(task, model, 1024, 3, tmp_path / "made")
    assert [q.answers for q in made] == [("1000",), ("1001",), ("1002",)]
    for question in made:
        assert 900 < len(question.context) + len(question.question) + task.answer_tokens <= 1024
        assert len(question.question) < 80
    assert len({q.digest for q in made}) == 3
    (package / "data/synthetic/niah.py").write_text("raise SystemExit('not again')")
    assert ruler.questions(task, model, 1024, 3, tmp_path / "made") == made
    with pytest.raises(EngineError, match="generator of 'one' failed: not again"):
        ruler.questions(task, model, 1024, 4, tmp_path / "made")
    with pytest.raises(UsageError, match="length must be in"):
        ruler.questions(task, model, 100, 1, tmp_path / "made")
    with pytest.raises(UsageError, match="unknown task 'two'"):
        ruler.tasks(["two"])


def test_a_generator_that_never_ends_is_named(
    package: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "data/synthetic/niah.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(ruler, "GENERATOR_SECONDS", 1)
    with pytest.raises(UsageError, match="task 'one' finds no sample of"):
        ruler.questions(ruler.tasks()[0], model, 1024, 1, tmp_path)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler, "PACKAGE", "no_such_package_here")
    with pytest.raises(UsageError, match=r"pip install 'kvsift\[ruler\]'"):
        ruler.tasks()


def test_tasks_are_counted_together_by_their_samples() -> None:
    samples = [
        {"kind": kind, "index": i, "runs": [run("a", float(i)), run("full", 1.0)]}
        for kind in ("x", "y")
        for i in range(2)
    ]
    text = ruler_run.markdown(samples, [0.5], 1024, False, "a")
    assert "query_aware off" in text
    assert "| `a` | 0.500 ± 0.500 | 0.500 ± 0.500 | 0.500 ± 0.289 |" in text
    assert "all tasks (n=4)" in text
    assert "Kept of each text: 500 tokens.\n" in text
    assert "| `a` | -0.500 ± 0.500 | -0.500 ± 0.500 | -0.500 ± 0.289 |" in text


def run(variant: str, score: float) -> dict[str, Any]:
    density = 1.0 if variant == "full" else 0.5
    return {"variant": variant, "density": density, "score": score, "kept": 500}


@pytest.mark.parametrize("aware", ["--query-aware", "--no-query-aware"])
def test_the_command_runs_and_resumes(
    package: Path, model: Path, tmp_path: Path, aware: str
) -> None:
    arguments = ["ruler", "--out", str(tmp_path), "--model", str(model), "--samples", "2", aware]
    arguments += ["--density", "0.5", "--threads", "1", "--slots", "2", "--max-new", "6"]
    for name in ("full", "nexus", "snapkv", "nestedkv", "random-blocks"):
        arguments += ["--variant", name]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    state = {"--query-aware": ("aware", "on"), "--no-query-aware": ("unaware", "off")}[aware]
    assert f"query_aware {state[1]}" in done.output
    content = json.loads((tmp_path / f"ruler-1024-{state[0]}.json").read_text())
    for sample in content["samples"]:
        runs = {r["variant"]: r for r in sample["runs"]}
        assert list(runs) == ["full", "nexus", "nestedkv", "snapkv", "random-blocks"]
        assert sample["tokens"] >= runs["full"]["kept"] > sample["tokens"] - 80
        assert 0.45 < runs["snapkv"]["kept"] / runs["full"]["kept"] <= 0.55
        assert len({runs[n]["kept"] for n in list(runs)[1:]}) == 1
        assert all(0 <= r["score"] <= 1 for r in sample["runs"])
    before = (tmp_path / f"ruler-1024-{state[0]}.jsonl").read_text()
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert (tmp_path / f"ruler-1024-{state[0]}.jsonl").read_text() == before
    assert (tmp_path / f"ruler-1024-{state[0]}-0.5.png").stat().st_size > 5000
