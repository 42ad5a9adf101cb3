"""Sessions: a fact told in the first turn and asked for turns later, while what is evicted is gone.

Each turn's text is appended to the same cache, which is then evicted down to its budget: nothing
comes back. Questions are asked on the side and taken back, so that they do not help to remember.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from kvsift.builder.errors import UsageError
from kvsift.builder.package import Policy
from kvsift.runtime.chat import ChatTemplate, Message, encode_chat
from kvsift.runtime.evaluation import greedy, report
from kvsift.runtime.evaluation.lab import BLOCK, Lab, held_tokens, token_budget
from kvsift.runtime.evaluation.needles import CITIES, PLANT, WORDS
from kvsift.runtime.evaluation.ruler_run import Job
from kvsift.runtime.evaluation.texts import Sample

REPLY = "Noted."
TELL = "Here is a note.\n\n{text}"
ASK = "What is the secret {kind} of {city}?"
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Conversation:
    """Turns as token ids, each with its reply, and the question that may follow any of them."""

    index: int
    source: str
    turns: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answer: str
    digest: str
    kind: str = "prose"

    @cached_property
    def tokens(self) -> int:
        """Tokens of the longest sequence."""
        return sum(map(len, self.turns)) + len(self.question) + ANSWER_TOKENS


def conversation(
    tokenizer: Tokenizer, template: ChatTemplate, text: Sample, turns: int, size: int
) -> Conversation:
    """Return `turns` turns of about `size` tokens; the fact stands in the middle of the first."""
    if turns < 2:
        raise UsageError(f"turns must be at least 2, so that one comes after the fact; got {turns}")
    rng = random.Random(text.index)
    city = CITIES[rng.randrange(len(CITIES))]
    number = text.index % 2 == 0
    answer = str(rng.randrange(10_000, 100_000)) if number else WORDS[rng.randrange(len(WORDS))]
    kind = "number" if number else "word"
    fact = PLANT.format(kind=kind, city=city, answer=answer)
    notes = []
    for turn in range(turns):
        words = tokenizer.decode(list(text.tokens[turn * size : (turn + 1) * size])).split(" ")
        if turn == 0:
            words.insert(len(words) // 2, fact)
        notes.append(" ".join(words))
    messages: list[Message] = []
    parts: list[tuple[int, ...]] = []
    done = ""
    for note in notes:
        messages += [
            {"role": "user", "content": TELL.format(text=note)},
            {"role": "assistant", "content": REPLY},
        ]
        whole = template.render(messages, add_generation_prompt=False)
        parts.append(_ids(tokenizer, whole, done))
        done = whole
    asked = [*messages, {"role": "user", "content": ASK.format(kind=kind, city=city)}]
    # Any turn may be the last: the question's own text does not depend on what came before.
    question = _ids(tokenizer, template.render(asked), done)
    return Conversation(
        text.index, text.source, tuple(parts), question, answer, text.digest
    )  # fmt: skip


def _ids(tokenizer: Tokenizer, whole: str, before: str) -> tuple[int, ...]:
    """Return the ids of what `whole` adds to `before`."""
    if not whole.startswith(before):
        raise UsageError("the chat template rewrites earlier turns: no cache can be kept over it")
    added = whole[len(before) :]
    if not before:
        return tuple(encode_chat(tokenizer, added))
    return tuple(tokenizer.encode(added, add_special_tokens=False).ids)


def measure(
    lab: Lab, talk: Conversation, every: Sequence[Job], budget_tokens: int, asked: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one record per job: whether the fact was found after each number of turns `asked`.

    `budget_tokens` in whole blocks are held after every turn, whatever the conversation's length,
    by every policy as many: the newest block may be partial.
    """
    lab.read(talk.turns[0])
    records = []
    for job in every:
        variant, stage = job.variant, lab.stage(job.variant.policy)
        budget = _budget(variant.policy, budget_tokens, len(talk.turns[0]))
        slot = lab.evict(variant, budget, job.seed)
        found, answers, kept = [], [], []
        for turn, part in enumerate(talk.turns, start=1):
            if turn > 1:
                lab.force(variant, slot, part)
                budget = _budget(variant.policy, budget_tokens, slot.seen)
                lab.evict_turn(variant, slot, budget)
            if turn in asked:
                saved = stage.save(slot)
                kept.append(round(slot.rows_held))
                logits = lab.force(variant, slot, talk.question)[-1]
                begun = [greedy.begin(variant, slot, logits)]
                # No eviction on the side, which `restore` could not take back.
                answers += greedy.decode(
                    lab, begun, ANSWER_TOKENS, lambda t: talk.answer in t, evicts=False
                )
                found.append(float(talk.answer.lower() in answers[-1].lower()))
                slot = stage.restore(saved)
        records.append(
            {
                "variant": variant.name,
                "density": 1.0,
                "seed": job.seed,
                "kept": kept,
                "found": found,
                "answers": answers,
            }
        )
    return records


def _budget(policy: Policy, tokens: int, seen: int) -> int | None:
    return token_budget(policy, seen, held_tokens(tokens // BLOCK, seen))


def markdown(
    samples: Sequence[dict[str, Any]], asked: Sequence[int], budget: int, reference: str
) -> str:
    """Return the table of recall by turn and that of paired differences."""
    columns = [
        report.Column(f"after turn {turn}", report.cells(samples, "found", i), "prose", 1.0)
        for i, turn in enumerate(asked)
    ]
    title = f"## Sessions: the fact of turn 1, {budget} tokens held, n = {len(samples)}\n"
    return "\n".join(
        [title, report.overview(columns), "", report.differences(columns, reference), ""]
    )
