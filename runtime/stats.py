"""What a scheduler counts: plain numbers for logs, metrics and benchmarks."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

from kvsift.runtime.results import GenerationResult
from kvsift.runtime.sequence import Sequence

#: Upper bounds of the buckets of latencies, seconds; a last bucket has none.
LATENCY_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0
)  # fmt: skip


@dataclass
class Histogram:
    """Observations in seconds, counted in buckets as Prometheus does.

    `counts` has one entry per bound of LATENCY_BOUNDS (observations up to it and above the bound
    before) and a last one for what is above all of them; `total` is their sum in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    total: float = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Observations up to each bound, the last one up to infinity."""
        return list(accumulate(self.counts))

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass
class SchedulerStats:
    """A scheduler's numbers since it started, and what it holds now.

    Requests: `submitted` = `finished` + `cancelled` + `failed` + `queued` + `running`, the last
    with the one whose prompt is being read; `refused` ones were never submitted. `prompt_tokens`
    and `generated_tokens` count what steps have processed, `evictions` eviction steps,
    `evicted_tokens` what they dropped (mean over layers and heads). `kv_bytes_used` is what running
    requests hold of `kv_bytes_capacity`, the slots' keys and values; the scratch's `scratch_bytes`
    are beside it. `prefill_s` and `decode_s` are seconds spent in `prefill_chunks` and
    `decode_steps`, sampling left out. `coverage` is the sum over the `covered` evictions of ended
    requests whose coverage is defined; `raised` of these requests got a larger budget from their
    guardrail. `ttft` has one observation per first token, from its
    submission on, `itl` one per further token.
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    queued: int = 0
    running: int = 0
    slots: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0
    evictions: int = 0
    evicted_tokens: float = 0.0
    kv_bytes_used: int = 0
    kv_bytes_capacity: int = 0
    scratch_bytes: int = 0
    prefill_chunks: int = 0
    prefill_s: float = 0.0
    decode_steps: int = 0
    decode_s: float = 0.0
    engine_failures: int = 0
    covered: int = 0
    coverage: float = 0.0
    raised: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)

    def copy(self) -> SchedulerStats:
        """Return a copy that later counts do not change."""
        ttft = Histogram(list(self.ttft.counts), self.ttft.total)
        itl = Histogram(list(self.itl.counts), self.itl.total)
        return dataclasses.replace(self, ttft=ttft, itl=itl)

    def count_tokens(self, sequence: Sequence, new: int) -> None:
        """Count the `new` tokens, one or none, that a sequence has just got."""
        self.generated_tokens += new
        if new:
            (self.itl if len(sequence.tokens) > 1 else self.ttft).observe(sequence.latency_s)

    def count_end(self, result: GenerationResult) -> None:
        """Count a request that ended with a result."""
        if result.finish_reason == "cancelled":
            self.cancelled += 1
        else:
            self.finished += 1
        finite = [share for share in result.coverages if math.isfinite(share)]
        self.covered += len(finite)
        self.coverage += sum(finite)
        self.raised += result.budget_raised_tokens > 0
