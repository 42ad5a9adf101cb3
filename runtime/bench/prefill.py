"""The prefill benchmark: reading a prompt, and what the eviction at its end costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsift.runtime.bench import steps
from kvsift.runtime.bench.decode import Pair
from kvsift.runtime.bench.timing import Series, interleave, spread_of
from kvsift.runtime.bench.transformers_peer import Peer
from kvsift.runtime.budgets import units_of
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions import Step
from kvsift.runtime.slots import evictions, kept_units, move_to

#: Pairs of steps with and without the prompt's eviction.
EVICTION_ROUNDS = 9


def measure(
    pairs: Sequence[Pair],
    peer: Peer | None,
    prompt: list[int],
    rounds: int,
    on_block: Callable[[str], None],
) -> dict[str, Any]:
    """Return tokens/s of every evicted engine and of transformers, from one interleaved run.

    transformers reads the prompt in one call or in our chunks, whichever is faster.
    """
    tokens = len(prompt)
    ours = [Series(f"prefill {p.quantize}", _reader(p, prompt), warmup=0) for p in pairs]
    series, calls = list(ours), None
    if peer:
        chunk = pairs[0].evicted.manifest.limits.chunk
        found = {"one call": tokens, f"chunks of {chunk}": chunk}
        seconds = {name: peer.prefill(prompt, size)[0] for name, size in found.items()}
        calls = min(seconds, key=seconds.__getitem__)
        size = found[calls]
        theirs = Series("prefill transformers", lambda: peer.prefill(prompt, size), warmup=0)
        series.append(theirs)
    interleave(series, rounds, on_block)

    def rate(one: Series) -> float:
        return tokens / one.median_ms * 1e3

    rows = []
    for pair, one in zip(pairs, ours, strict=True):
        cost = eviction_cost(pair.evicted, prompt)
        share = (cost["eviction_ms"] + cost["gather_ms"]) / one.median_ms
        rows.append(
            {
                "quantize": pair.quantize,
                "tok_s": rate(one),
                "spread": spread_of(one.times),
                **cost,
                "eviction_share": share,
            }
        )
    return {
        "tokens": tokens,
        "chunk": pairs[0].evicted.manifest.limits.chunk,
        "rounds": rounds,
        "rows": rows,
        "transformers_tok_s": rate(series[-1]) if peer else None,
        "transformers_spread": spread_of(series[-1].times) if peer else None,
        "transformers_calls": calls,
    }


def _reader(pair: Pair, prompt: list[int]) -> Callable[[], Any]:
    def read() -> None:
        pair.first = steps.prefill(pair.evicted, prompt)

    return read


def eviction_cost(
    engine: Engine, prompt: list[int], density: float | None = None
) -> dict[str, float]:
    """Return ms of the eviction nodes and of the gather at the end of a prompt just read.

    The nodes read the cache and the window, not the chunk, so they are timed in a step of one
    token over all rows of the scratch, with and without eviction by turns; the difference would
    drown in the seconds of a whole chunk.
    """
    tokens = len(prompt)
    sequence = steps.prepare(engine, prompt, density)
    source = engine.new_slot(sequence, 0, units_of(tokens, engine.manifest.policy.block_size))
    source.append(tokens)
    step = Step(
        input_ids=np.array([prompt[-1:]], np.int64),
        position_ids=np.array([[tokens - 1]], np.int64),
        n_new=np.ones(1, np.int32),
        past_lens=np.array([[tokens - 1]], np.int32),
    )
    evicting = Step(
        step.input_ids,
        step.position_ids,
        step.n_new,
        step.past_lens,
        evictions([source], engine.manifest, True),
    )
    plain = Series("plain", lambda: engine.session.run(engine.scratch, step), steps=3)
    evicts = Series("evicts", lambda: engine.session.run(engine.scratch, evicting), steps=3)
    interleave([plain, evicts], EVICTION_ROUNDS)
    kept = engine.session.run(engine.scratch, evicting).kept
    assert kept is not None
    slot = engine.new_slot(sequence, 0, engine.cache.capacity // source.block_size)
    gathers = []
    for _ in range(EVICTION_ROUNDS):
        start = time.perf_counter()
        move_to(engine.cache, engine.scratch, source, slot, kept_units(kept, 0))
        gathers.append(1e3 * (time.perf_counter() - start))
    return {
        "eviction_ms": evicts.median_ms - plain.median_ms,
        "gather_ms": float(np.median(gathers)),
    }
