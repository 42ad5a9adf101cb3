"""Needles: one planted fact in about 1024 tokens of prose, asked for at the end of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvsift.builder.errors import UsageError
from kvsift.runtime.chat import ChatTemplate, encode_chat
from kvsift.runtime.evaluation import greedy
from kvsift.runtime.evaluation.fidelity import eviction_seed
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.texts import PLACES, Sample, place
from kvsift.runtime.evaluation.variants import Variant

#: The needle goes to one of this many depths, evenly spread over the document.
DEPTHS = 8
CITIES = ("Lisbon", "Tromsø", "Quito", "Nairobi", "Kyoto", "Dunedin", "Halifax", "Samarkand")
WORDS = ("walrus", "copper", "violin", "glacier", "saffron", "lantern", "thistle", "harbour")
PLANT = "Remember this: the secret {kind} of {city} is {answer}."
ASK = "{document}\n\nWhat is the secret {kind} of {city}?"


@dataclass(frozen=True)
class Needle:
    """A chat prompt with a planted secret: a 5-digit number in even samples, a word in odd ones."""

    index: int
    source: str
    depth: float
    answer: str
    text: str


def make_needle(
    tokenizer: Tokenizer, template: ChatTemplate, haystack: Sample, size: int
) -> Needle:
    """Return the needle prompt of about `size` tokens whose document is cut from `haystack`."""
    rng = random.Random(haystack.index)
    city = CITIES[rng.randrange(len(CITIES))]
    number = haystack.index % 2 == 0
    answer = str(rng.randrange(10_000, 100_000)) if number else WORDS[rng.randrange(len(WORDS))]
    kind = "number" if number else "word"
    planted = PLANT.format(kind=kind, city=city, answer=answer)

    def render(document: str) -> str:
        content = ASK.format(document=document, kind=kind, city=city)
        return template.render([{"role": "user", "content": content}])

    room = size - len(encode_chat(tokenizer, render(planted + " ")))
    if room < DEPTHS:
        raise UsageError(f"prompt of {size} tokens is too short for a needle; use 256 or more")
    depth = (place(haystack.index) * DEPTHS // PLACES + 0.5) / DEPTHS
    document = tokenizer.decode(list(haystack.tokens[:room]))
    at = _sentence_end(document, int(depth * len(document)))
    document = f"{document[:at]} {planted} {document[at:].lstrip()}"
    return Needle(haystack.index, haystack.source, depth, answer, render(document))


def _sentence_end(text: str, near: int) -> int:
    """Return where the first sentence that ends after `near` ends, else the next space."""
    for mark in (". ", "? ", "! "):
        found = text.find(mark, near)
        if found >= 0 and found - near < 400:
            return found + 1
    return max(near, text.find(" ", near))


def measure(
    lab: Lab,
    needle: Needle,
    variants: Sequence[Variant],
    densities: Sequence[float],
    seeds: int,
    max_tokens: int = 24,
) -> list[dict[str, Any]]:
    """Return one record per variant, density and seed: the greedy answer, and if it is right."""
    first = lab.read(encode_chat(lab.tokenizer, needle.text))
    records = []
    for variant in variants:
        draws = seeds if variant.is_sampled(False) else 1
        for density in densities if variant.policy.evicts else (1.0,):
            for draw in range(draws):
                seed = eviction_seed(needle.index, draw)
                slot = lab.evict(variant, lab.budget(variant.policy, density), seed)
                kept = round(slot.rows_held)
                begun = greedy.begin(variant, slot, first)
                answer = greedy.decode(lab, [begun], max_tokens)[0]
                right = needle.answer.lower() in answer.lower()
                record = {"variant": variant.name, "density": density, "seed": seed, "kept": kept}
                records.append(record | {"correct": right, "answer": answer})
    return records


def load_template(directory: Path) -> ChatTemplate:
    """Return the chat template of an engine."""
    return ChatTemplate.load(directory)
