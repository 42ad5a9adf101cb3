"""Greedy answers of evicted caches, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.stage import Floats
from kvsift.runtime.evaluation.variants import Variant
from kvsift.runtime.slots import Slot


@dataclass
class Answer:
    """An answer in the making: `tokens` begin with the first one, which the prompt gave."""

    variant: Variant
    slot: Slot
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    done: bool = False


def begin(variant: Variant, slot: Slot, logits: Floats) -> Answer:
    """Return an answer that starts with the likeliest token of `logits` [V]."""
    return Answer(variant, slot, [int(logits.argmax())])


def decode(
    lab: Lab,
    answers: Sequence[Answer],
    max_tokens: int,
    enough: Callable[[str], bool] = lambda text: False,
    *,
    evicts: bool = True,
) -> list[str]:
    """Continue answers, all of slots of one stage, to the end of each; return their texts.

    An answer ends with an end token, at `max_tokens`, or when `enough` of its text is there.
    `evicts`: whether full rows evict on the way, as the variant's engine would.
    """
    ends = set(lab.manifest.model.eos_token_ids)
    while True:
        for answer in answers:
            if not answer.done:
                answer.text = str(lab.tokenizer.decode(answer.tokens))
                last = answer.tokens[-1] in ends or len(answer.tokens) >= max_tokens
                answer.done = last or enough(answer.text)
        running = [a for a in answers if not a.done]
        if not running:
            return [a.text for a in answers]
        stage = lab.stage(running[0].variant.policy)
        logits = stage.step([a.slot for a in running], [a.tokens[-1:] for a in running])
        for answer in running:
            if evicts:
                lab.evict_full(answer.variant, answer.slot)
            answer.tokens.append(int(logits[answer.slot.index, -1].argmax()))
