"""Agreement with kvpress: both sides measured on the same samples, differences in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsift.runtime.evaluation import greedy, report
from kvsift.runtime.evaluation.fidelity import Reference
from kvsift.runtime.evaluation.kvpress_peer import Continuation, KvpressPeer
from kvsift.runtime.evaluation.kvpress_peer import greedy as kvpress_greedy
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.ruler import Question, Task, score
from kvsift.runtime.evaluation.ruler_run import Job, batches
from kvsift.runtime.evaluation.texts import Sample
from kvsift.runtime.evaluation.variants import Variant

Record = dict[str, Any]
#: What each measure may differ by, in the mean over samples of the absolute difference.
LIMITS = {"kl": 0.005, "score": 0.03}


def fidelity(
    lab: Lab,
    peer: KvpressPeer,
    sample: Sample,
    variants: Sequence[Variant],
    densities: Sequence[float],
    prompt: int,
) -> list[Record]:
    """Return mean KL to each side's own full cache: `kl`, and `kl_kvpress`."""
    text, follow = sample.tokens[:prompt], sample.tokens[prompt:]
    lab.read(text)
    ours = Reference(lab.continue_dense(follow, len(follow)))
    peer.read(text)
    theirs = Reference([peer.evict(None, prompt).force(follow)])
    records = []
    for variant in variants:
        for density in densities:
            slot = lab.evict(variant, lab.budget(variant.policy, density), 0)
            kept = round(slot.rows_held)
            mine = ours.compare(0, lab.force(variant, slot, follow))[0]
            other = theirs.compare(0, peer.evict(variant.name, kept).force(follow))[0]
            records.append(
                _record(variant, density, kept, "kl", float(mine.mean()), float(other.mean()))
            )
    return records


def ruler(
    lab: Lab,
    peer: KvpressPeer,
    task: Task,
    sample: Question,
    variants: Sequence[Variant],
    densities: Sequence[float],
    max_tokens: int,
) -> list[Record]:
    """Return RULER's score of both sides' answers, `score` and `score_kvpress`."""
    prompt = (*sample.context, *sample.question)
    first, other_first = lab.read(prompt), int(peer.read(prompt).argmax())
    ends = set(lab.manifest.model.eos_token_ids)
    jobs = [Job(variant, density, 0) for variant in variants for density in densities]
    records: dict[tuple[str, float], Record] = {}
    for batch in batches(lab, jobs):
        slots = [
            lab.evict(job.variant, lab.budget(job.variant.policy, job.density), 0, index)
            for index, job in enumerate(batch)
        ]
        kept = [round(slot.rows_held) for slot in slots]
        begun = [greedy.begin(j.variant, s, first) for j, s in zip(batch, slots, strict=True)]
        texts = greedy.decode(lab, begun, max_tokens)
        theirs = _others(lab, peer, batch, kept, other_first, ends, max_tokens)
        for job, rows, mine, other in zip(batch, kept, texts, theirs, strict=True):
            values = (score(task, text, sample.answers) for text in (mine, other))
            record = _record(job.variant, job.density, rows, "score", *values)
            records[job.key] = record | {"answer": mine, "answer_kvpress": other}
    return [records[job.key] for job in jobs]


def _others(
    lab: Lab,
    peer: KvpressPeer,
    jobs: Sequence[Job],
    kept: Sequence[int],
    first: int,
    ends: set[int],
    max_tokens: int,
) -> list[str]:
    """Return kvpress' answers; a press that masks holds its mask in the model, so it goes alone."""
    made: dict[tuple[str, float], list[int]] = {}
    waiting: dict[tuple[str, float], Continuation] = {}
    for job, rows in zip(jobs, kept, strict=True):
        rest = peer.evict(job.variant.name, rows)
        if rest.single:
            made[job.key] = rest.greedy(first, ends, max_tokens)[0]
        else:
            waiting[job.key] = rest
    peer.unmask()
    answers = kvpress_greedy(list(waiting.values()), first, ends, max_tokens)
    made |= dict(zip(waiting, answers, strict=True))
    return [str(lab.tokenizer.decode(made[job.key])) for job in jobs]


def _record(
    variant: Variant, density: float, kept: int, metric: str, mine: float, other: float
) -> Record:
    return {
        "variant": variant.name,
        "density": density,
        "seed": 0,
        "kept": kept,
        metric: round(mine, 9),
        f"{metric}_kvpress": round(other, 9),
        f"{metric}_gap": round(abs(mine - other), 9),
    }


def markdown(samples: Sequence[Record], densities: Sequence[float], metric: str) -> str:
    """Return the table of both sides, their paired difference, and the mean absolute one."""
    names = (metric, f"{metric}_kvpress", f"{metric}_gap")
    found = [report.cells(samples, name) for name in names]
    kind = samples[0]["kind"]
    lines = [
        f"## agreement with kvpress: {metric}, {kind}, n = {len(samples)}",
        "",
        "| policy | density | ours | kvpress | paired difference | mean absolute difference |",
        "|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for name in dict.fromkeys(v for _, v, _ in found[0]):
        for density in densities:
            mine, other, gap = (cells[kind, name, density] for cells in found)
            means = [report.stat(list(report.per_sample(c).values())) for c in (mine, other)]
            away = float(np.mean(list(report.per_sample(gap).values())))
            worst = max(worst, away)
            lines.append(
                f"| `{name}` | {density:g} | {means[0]} | {means[1]} | "
                f"{report.paired(mine, other)} | {away:.4f} |"
            )
    within = "within" if worst <= LIMITS[metric] else "BEYOND"
    lines.append(f"\nLargest mean absolute difference {worst:.4f}: {within} {LIMITS[metric]:g}.\n")
    return "\n".join(lines)
