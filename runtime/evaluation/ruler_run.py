"""RULER under eviction: one prefill, every policy and density, answers in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvsift.runtime.evaluation import greedy, report
from kvsift.runtime.evaluation.fidelity import eviction_seed
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.ruler import Question, Task, score
from kvsift.runtime.evaluation.stage import Floats
from kvsift.runtime.evaluation.variants import Variant
from kvsift.runtime.slots import Slot

#: Numbers the samples of each task apart where tasks are taken together.
MANY = 1_000_000
ALL = "all tasks"


@dataclass(frozen=True)
class Job:
    """One eviction to answer after."""

    variant: Variant
    density: float
    seed: int

    @property
    def key(self) -> tuple[str, float]:
        """The variant's name and the density."""
        return self.variant.name, self.density


def jobs(
    variants: Sequence[Variant], densities: Sequence[float], seeds: int, index: int
) -> list[Job]:
    """Return every variant at every density with every seed that makes a difference."""
    return [
        Job(variant, density, eviction_seed(index, draw))
        for variant in variants
        for density in (densities if variant.policy.evicts else (1.0,))
        for draw in range(seeds if variant.is_sampled(False) else 1)
    ]


def measure(
    lab: Lab,
    task: Task,
    sample: Question,
    every: Sequence[Job],
    query_aware: bool,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """Return one record per job: RULER's score of the greedy answer, and the answer.

    `query_aware`: the question is in the prompt when it is evicted; else it comes afterwards.
    """
    prompt = (*sample.context, *sample.question) if query_aware else sample.context
    first = lab.read(prompt)
    records = []
    for batch in batches(lab, every):
        slots = [
            lab.evict(job.variant, lab.budget(job.variant.policy, job.density), job.seed, index)
            for index, job in enumerate(batch)
        ]
        kept = [round(slot.rows_held) for slot in slots]
        answers = _begin(lab, batch, slots, first, () if query_aware else sample.question)
        texts = greedy.decode(
            lab, answers, max_tokens, lambda text: score(task, text, sample.answers) == 1.0
        )
        for job, rows, text in zip(batch, kept, texts, strict=True):
            records.append(
                {
                    "variant": job.variant.name,
                    "density": job.density,
                    "seed": job.seed,
                    "kept": rows,
                    "score": round(score(task, text, sample.answers), 6),
                    "answer": text,
                }
            )
    order = {job: i for i, job in enumerate((j.variant.name, j.density, j.seed) for j in every)}
    return sorted(records, key=lambda r: order[r["variant"], r["density"], r["seed"]])


def batches(lab: Lab, every: Sequence[Job]) -> Iterator[list[Job]]:
    """Yield as many jobs of one stage as there are slots."""
    stages = {id(lab.stage(j.variant.policy)) for j in every}
    for stage in stages:
        mine = [j for j in every if id(lab.stage(j.variant.policy)) == stage]
        for at in range(0, len(mine), lab.slots):
            yield mine[at : at + lab.slots]


def _begin(
    lab: Lab,
    batch: Sequence[Job],
    slots: Sequence[Slot],
    first: Floats,
    question: Sequence[int],
) -> list[greedy.Answer]:
    """Return answers that begin after the question, which is read token by token by all slots."""
    rows = [first] * len(slots)
    stage = lab.stage(batch[0].variant.policy)
    for token in question:
        logits = stage.step(slots, [[token]] * len(slots))
        rows = [logits[slot.index, -1] for slot in slots]
        for job, slot in zip(batch, slots, strict=True):
            lab.evict_full(job.variant, slot)
    return [greedy.begin(j.variant, s, r) for j, s, r in zip(batch, slots, rows, strict=True)]


def together(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples of all tasks as those of one kind."""
    names = sorted({s["kind"] for s in samples})
    return [
        {**s, "kind": ALL, "index": s["index"] + MANY * names.index(s["kind"])} for s in samples
    ]


def markdown(
    samples: Sequence[dict[str, Any]],
    densities: Sequence[float],
    length: int,
    query_aware: bool,
    reference: str,
) -> str:
    """Return the tables of a run, a column per task, and the paired differences."""
    aware = "on: evicted with the question" if query_aware else "off: the question comes later"
    parts = [f"## RULER, {length} tokens, query_aware {aware}\n"]
    every = [*samples, *together(samples)]
    found = report.cells(every, "score")
    kinds = [*dict.fromkeys(s["kind"] for s in samples), ALL]
    counts = {kind: len({s["index"] for s in every if s["kind"] == kind}) for kind in kinds}
    for density in densities:
        columns = [
            report.Column(f"{kind} (n={counts[kind]})", found, kind, density) for kind in kinds
        ]
        kept = report.kept_line(every, ALL, density)
        parts.append(f"### accuracy at density {density:g}\n\n{kept}\n{report.overview(columns)}\n")
        for against in dict.fromkeys(("full", reference)):
            if (kinds[0], against, density) in found or (kinds[0], against, 1.0) in found:
                table = report.differences(columns, against)
                parts.append(f"### paired differences at density {density:g}\n\n{table}\n")
    return "\n".join(parts)
