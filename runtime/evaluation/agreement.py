"""Agreement with kvpress: both sides measured on the same samples, differences in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsift.runtime.evaluation import greedy, report
from kvsift.runtime.evaluation.fidelity import Reference
from kvsift.runtime.evaluation.kvpress_peer import KvpressPeer
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.ruler import Question, Task, score
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
    first, other_first = lab.read(prompt), peer.read(prompt)
    ends = set(lab.manifest.model.eos_token_ids)
    records = []
    for variant in variants:
        for density in densities:
            slot = lab.evict(variant, lab.budget(variant.policy, density), 0)
            kept = round(slot.rows_held)
            begun = greedy.begin(variant, slot, first)
            mine = greedy.decode(lab, [begun], max_tokens)[0]
            rest = peer.evict(variant.name, kept)
            made = rest.greedy(int(other_first.argmax()), ends, max_tokens)
            other = str(lab.tokenizer.decode(made))
            values = (score(task, text, sample.answers) for text in (mine, other))
            record = _record(variant, density, kept, "score", *values)
            records.append(record | {"answer": mine, "answer_kvpress": other})
    return records


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
