"""The decode benchmark: dense, evicted and transformers in one interleaved run."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvsift.runtime.bench import steps
from kvsift.runtime.bench.bandwidth import Bandwidth
from kvsift.runtime.bench.timing import Series, interleave
from kvsift.runtime.bench.transformers_peer import CACHES, Peer, PeerSteps, fastest
from kvsift.runtime.bench.weights import weight_bytes
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.engine import Engine
from kvsift.runtime.sequence import Sequence

#: Steps of a block where every step is the same.
BLOCK_STEPS = 8
PEER_STEPS = 4


@dataclass
class Pair:
    """The dense and the evicted engine of one weight precision."""

    quantize: str
    dense: Engine
    evicted: Engine
    weight_bytes: int
    #: The sequence that the evicted engine has read into slot 0.
    first: Sequence = field(init=False)

    def read(self, prompt: list[int]) -> None:
        """Read the prompt with the evicted engine and give the dense one the same rows."""
        self.first = steps.prefill(self.evicted, prompt)
        steps.fill_dense(self.dense, self.evicted, len(prompt))


@dataclass
class Settings:
    """What to measure; `rounds` of A B C ..., `threads` for every engine."""

    batches: Seq[int]
    rounds: int
    threads: int
    on_block: Callable[[str], None] = field(default=lambda name: None)


def load_pair(dense: Path, evicted: Path, settings: Settings) -> Pair:
    """Load the packages of both engines, which must be of equal precision."""
    loaded, evicting = (
        Engine(path, max_batch=max(settings.batches), threads=settings.threads)
        for path in (dense, evicted)
    )
    return Pair(loaded.manifest.quantize, loaded, evicting, weight_bytes(loaded))


def measure(
    pairs: Seq[Pair],
    peer: Peer | None,
    bandwidth: Bandwidth,
    prompt: list[int],
    settings: Settings,
) -> list[dict[str, Any]]:
    """Return one row per batch and precision; all of a batch come from one interleaved run."""
    for pair in pairs:
        pair.read(prompt)
    return [
        row
        for batch in settings.batches
        for row in _measure_batch(pairs, peer, bandwidth, prompt, batch, settings)
    ]


@dataclass
class _Timed:
    """The series of one pair at one batch."""

    pair: Pair
    dense: Series
    evicted: Series
    short: Series
    steps: steps.EvictedSteps

    def counted(self, values: list[int]) -> list[int]:
        """Return the per-step values of the counted steps: no stagger, no warm-up."""
        warm, size = self.evicted.warmup, self.evicted.steps
        return [v for i, v in enumerate(values) if i % (warm + size) >= warm]


def _measure_batch(
    pairs: Seq[Pair],
    peer: Peer | None,
    bandwidth: Bandwidth,
    prompt: list[int],
    batch: int,
    settings: Settings,
) -> list[dict[str, Any]]:
    timed, series = [], list(bandwidth.series)
    for pair in pairs:
        one = _series(pair, prompt, batch)
        timed.append(one)
        series += [one.dense, one.evicted, one.short]
    theirs, cache, difference = _peer_series(pairs[0], peer, prompt, batch)
    if theirs:
        series.append(theirs)
    for one_series in series:
        one_series.blocks.clear()
    interleave(series, settings.rounds, settings.on_block)
    gb_s, how = bandwidth.gb_s()
    shared = {
        "transformers_ms": theirs.median_ms if theirs else None,
        "transformers_cache": cache,
        "transformers_logit_difference": difference,
        "transformers_spread": theirs.spread if theirs else None,
        "bandwidth_gb_s": gb_s,
        "bandwidth_how": how,
    }
    return [_row(one, batch, len(prompt), gb_s) | shared for one in timed]


def _series(pair: Pair, prompt: list[int], batch: int) -> _Timed:
    # A later batch starts again from the prompt's end: slot 0 has moved on since.
    if pair.first.slot.seen != len(prompt):
        pair.first = steps.prefill(pair.evicted, prompt)
    evicted = steps.EvictedSteps(pair.evicted, pair.first, batch)
    interval, name = evicted.interval, pair.quantize
    rows = pair.first.slot.length + interval // 2
    dense = steps.DenseSteps(pair.dense, prompt, len(prompt), batch)
    short = steps.DenseSteps(pair.dense, prompt, min(rows, len(prompt)), batch)
    return _Timed(
        pair,
        Series(f"dense {name}", dense.step, BLOCK_STEPS),
        Series(f"evicted {name}", evicted.step, interval),
        Series(f"dense at evicted length {name}", short.step, BLOCK_STEPS),
        evicted,
    )


def _peer_series(
    pair: Pair, peer: Peer | None, prompt: list[int], batch: int
) -> tuple[Series | None, str | None, float | None]:
    """Return transformers' series with the faster cache, its name, and the largest difference of
    its logits from the dense engine's.
    """
    if peer is None:
        return None, None, None
    held = pair.dense.cache
    keys, values = (
        [
            np.stack([held.read(slot, layer)[name] for slot in range(batch)])
            for layer in range(len(held.capacities))
        ]
        for name in (KEY, VALUE)
    )
    runs: dict[str, PeerSteps] = {}
    for kind in CACHES:
        runs[kind] = peer.steps(keys, values, len(prompt), kind)
        runs[kind].set_tokens([prompt[-1]] * batch)

    def timer(run: PeerSteps) -> Callable[[], float]:
        def seconds() -> float:
            run.step()
            start = time.perf_counter()
            for _ in range(PEER_STEPS):
                run.step()
            return time.perf_counter() - start

        return seconds

    kind = fastest({name: timer(run) for name, run in runs.items()})
    run = runs.pop(kind)
    runs.clear()
    ours = steps.DenseSteps(pair.dense, prompt, len(prompt), batch).logits()
    difference = float(np.abs(ours - run.logits()).max())
    return Series("transformers", run.step, PEER_STEPS), kind, difference


def _row(timed: _Timed, batch: int, context: int, gb_s: float) -> dict[str, Any]:
    pair = timed.pair
    ms = 1e3 * np.array(timed.evicted.times)
    evicting = np.array(timed.counted(timed.steps.evictions)) > 0
    plain = float(np.median(ms[~evicting]))
    extra = float(np.median(ms[evicting])) - plain
    # Medians on both sides: a plain mean would set stalls of the machine down to eviction.
    amortised = plain + extra * float(np.mean(evicting))
    per_token = pair.dense.kv_bytes_per_token
    kv_dense = batch * context * per_token
    kv_evicted = int(np.mean(timed.counted(timed.steps.rows)) * per_token)

    def floor(kv: int) -> float:
        return (pair.weight_bytes + kv) / gb_s / 1e6

    return {
        "batch": batch,
        "quantize": pair.quantize,
        "dense_ms": timed.dense.median_ms,
        "evicted_ms": plain,
        "evicted_amortised_ms": amortised,
        "dense_at_evicted_length_ms": timed.short.median_ms,
        "means_ms": {
            "dense": timed.dense.mean_ms,
            "evicted": timed.evicted.mean_ms,
            "dense_at_evicted_length": timed.short.mean_ms,
        },
        "weight_bytes": pair.weight_bytes,
        "kv_bytes_dense": kv_dense,
        "kv_bytes_evicted": kv_evicted,
        "floor_dense_ms": floor(kv_dense),
        "floor_evicted_ms": floor(kv_evicted),
        "eviction_ms": extra,
        "eviction_share_decode": extra * float(np.mean(evicting)) / amortised,
        "eviction_steps": int(evicting.sum()),
        "steps": len(ms),
        "spread": {
            "dense": timed.dense.spread,
            "evicted": timed.evicted.spread,
            "dense_at_evicted_length": timed.short.spread,
        },
    }
