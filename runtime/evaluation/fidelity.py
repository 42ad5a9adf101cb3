"""Fidelity: how far the next-token distributions move from those of the full cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.stage import Floats
from kvsift.runtime.evaluation.texts import Sample
from kvsift.runtime.evaluation.variants import Variant

#: KL(full || full through a copy of the cache) beyond this means that the measurement is broken.
FULL_KL_LIMIT = 1e-6


@dataclass(frozen=True)
class Settings:
    """What a fidelity run measures; tokens unless said otherwise.

    `split`: tokens per step, after each of which a full row evicts; `split` = `follow` evicts at
    the prompt's end only. `bins`: parts of the followed text that are reported apart.
    """

    prompt: int
    follow: int
    split: int
    bins: int
    densities: tuple[float, ...]
    seeds: int

    @property
    def in_decode(self) -> bool:
        """Whether decode evictions are part of the measurement."""
        return self.split < self.follow


class Reference:
    """Log probabilities of the full cache for one continuation."""

    def __init__(self, logits: Sequence[Floats]) -> None:
        self.logp = [log_softmax(part) for part in logits]
        self.p = [np.exp(part) for part in self.logp]
        self.top = [part.argmax(axis=-1) for part in self.logp]

    def compare(
        self, part: int, logits: Floats, targets: Sequence[int] = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
        """Return KL(full || given) in nats, whether the likeliest tokens agree, and the negative
        log probability of `targets`, the tokens that came next (NaN where none is given); all [S].
        """
        logp = log_softmax(logits)
        kl = np.einsum("sv,sv->s", self.p[part], self.logp[part] - logp).astype(np.float64)
        nll = np.full(len(logp), np.nan)
        nll[: len(targets)] = -logp[np.arange(len(targets)), list(targets)]
        return kl, logits.argmax(axis=-1) == self.top[part], nll


def log_softmax(logits: Floats) -> Floats:
    """Return log probabilities float32 [S, V]."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64))
    return shifted


def eviction_seed(sample: int, draw: int) -> int:
    """Return the eviction seed of a sample's draw: distinct, and the same for every variant."""
    return sample * 1000 + draw


def measure(
    lab: Lab, sample: Sample, variants: Sequence[Variant], settings: Settings
) -> list[dict[str, Any]]:
    """Return one record per variant, density and seed: by bin: KL in nats, agreement, and
    the mean negative log probability of the text, whose exponential is the perplexity.
    """
    prompt = sample.tokens[: settings.prompt]
    follow = sample.tokens[settings.prompt : settings.prompt + settings.follow]
    lab.read(prompt)
    reference = Reference(lab.continue_dense(follow, settings.split))
    records = []
    for variant in variants:
        draws = settings.seeds if variant.is_sampled(settings.in_decode) else 1
        densities = settings.densities if variant.policy.evicts else (1.0,)
        for density in densities:
            for draw in range(draws):
                seed = eviction_seed(sample.index, draw)
                records.append(_one(lab, variant, density, seed, follow, reference, settings))
    return records


def _one(
    lab: Lab,
    variant: Variant,
    density: float,
    seed: int,
    follow: Sequence[int],
    reference: Reference,
    settings: Settings,
) -> dict[str, Any]:
    slot = lab.evict(variant, lab.budget(variant.policy, density), seed)
    kept = round(slot.rows_held)
    found = []
    for part, at in enumerate(range(0, len(follow), settings.split)):
        logits = lab.force(variant, slot, follow[at : at + settings.split])
        targets = follow[at + 1 : at + settings.split + 1]
        found.append(reference.compare(part, logits, targets))
        if settings.in_decode:
            lab.evict_full(variant, slot)
    kl, agreed, nll = (
        np.array_split(np.concatenate(values), settings.bins) for values in zip(*found, strict=True)
    )
    finite = [c for c in slot.coverages if math.isfinite(c)]
    return {
        "variant": variant.name,
        "density": density,
        "seed": seed,
        "kept": kept,
        "kl": [round(float(b.mean()), 9) for b in kl],
        "agreement": [round(float(b.mean()), 6) for b in agreed],
        "nll": [round(float(np.nanmean(b)), 6) for b in nll],
        "coverage": round(finite[0], 6) if finite else None,
    }


def check_full(records: Sequence[dict[str, Any]]) -> float | None:
    """Return the largest |KL| of the variant `full`, None if it was not run."""
    values = [abs(kl) for r in records if r["variant"] == "full" for kl in r["kl"]]
    return max(values, default=None)
