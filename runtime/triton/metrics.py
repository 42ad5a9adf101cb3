"""What the model reports on Triton's metrics port.

The server crashes when two threads touch its metrics, so one thread creates and updates them all;
others leave it notes.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvsift.runtime.results import GenerationResult

#: Seconds between two updates of the gauges.
_PERIOD_S = 0.25
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
OUTCOMES = ("stop", "length", "cancelled", "refused", "failed")


@dataclass(frozen=True)
class Family:
    """One metric: its Prometheus name, kind, meaning and histogram buckets.

    A gauge also names the number in `Scheduler.stats` that it shows.
    """

    name: str
    kind: Literal["COUNTER", "GAUGE", "HISTOGRAM"]
    meaning: str
    buckets: tuple[float, ...] = ()
    stat: str = ""


FAMILIES = (
    Family("kvsift_requests_total", "COUNTER", f"Requests by outcome: {', '.join(OUTCOMES)}"),
    Family("kvsift_prompt_tokens_total", "COUNTER", "Tokens of prompts that were answered"),
    Family("kvsift_generated_tokens_total", "COUNTER", "Tokens generated"),
    Family("kvsift_evictions_total", "COUNTER", "Eviction steps"),
    Family("kvsift_evicted_tokens_total", "COUNTER", "Tokens dropped from the caches"),
    Family(
        "kvsift_time_to_first_token_seconds",
        "HISTOGRAM",
        "From a request's arrival to its first token, waiting included",
        _LATENCY,
    ),
    Family(
        "kvsift_inter_token_latency_seconds",
        "HISTOGRAM",
        "Between two tokens of a request",
        _LATENCY,
    ),
    Family(
        "kvsift_coverage",
        "HISTOGRAM",
        "Share of the score kept at a request's last eviction, where it is defined",
        _SHARE,
    ),
    Family("kvsift_queued_requests", "GAUGE", "Requests waiting for a slot", stat="queued"),
    Family("kvsift_slots_in_use", "GAUGE", "Sequences being answered", stat="slots_in_use"),
    Family("kvsift_slots", "GAUGE", "Sequences that fit at a time", stat="slots"),
    Family(
        "kvsift_kv_bytes_in_use", "GAUGE", "Bytes of keys and values held", stat="kv_bytes_used"
    ),
    Family("kvsift_kv_bytes", "GAUGE", "Bytes of all slots", stat="kv_bytes_capacity"),
)


class HasStats(Protocol):
    """What the gauges are read from."""

    def stats(self) -> dict[str, float]:
        """Return plain numbers by name."""


class Metrics:
    """Creates the families of one model and keeps them up to date on a thread of its own.

    `backend` is Triton's python module, `token_bytes` the cache's bytes per token.
    """

    def __init__(self, backend: Any, model: str, source: HasStats, token_bytes: int) -> None:
        self._backend = backend
        self._model = model
        self._source = source
        self._token_bytes = token_bytes
        self._notes: queue.SimpleQueue[tuple[str, str, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvsift-metrics", daemon=True)

    def start(self) -> None:
        """Create the metrics; the server shows them from then on."""
        self._thread.start()

    def stop(self) -> None:
        """Write what has been noted and end the thread."""
        self._notes.put(None)
        self._thread.join()

    def refused(self) -> None:
        """Count a request that was not let in."""
        self._count("kvsift_requests_total", 1, "refused")

    def failed(self) -> None:
        """Count a request that ended in an error."""
        self._count("kvsift_requests_total", 1, "failed")

    def finished(self, result: GenerationResult) -> None:
        """Count a request that has an answer, or part of one."""
        self._count("kvsift_requests_total", 1, result.finish_reason)
        self._count("kvsift_prompt_tokens_total", result.prompt_tokens)
        self._count("kvsift_generated_tokens_total", len(result.token_ids))
        self._count("kvsift_evictions_total", result.evictions)
        evicted = round((result.kv_bytes_dense - result.kv_bytes) / self._token_bytes)
        self._count("kvsift_evicted_tokens_total", evicted)
        if result.token_ids:
            self._count("kvsift_time_to_first_token_seconds", result.timings.ttft_s)
        for seconds in result.timings.itl_s:
            self._count("kvsift_inter_token_latency_seconds", seconds)
        if result.coverage is not None:
            self._count("kvsift_coverage", result.coverage)

    def _count(self, name: str, value: float, outcome: str = "") -> None:
        self._notes.put((name, outcome, value))

    def _run(self) -> None:
        metrics = self._create()
        shown: dict[str, float] = {}
        going = True
        while going:
            try:
                note = self._notes.get(timeout=_PERIOD_S)
                if note is None:
                    going = False
                else:
                    name, outcome, value = note
                    metric, histogram = metrics[name, outcome]
                    metric.observe(value) if histogram else metric.increment(value)
                    continue
            except queue.Empty:
                pass
            stats = self._source.stats()
            for family in FAMILIES:
                if family.stat and shown.get(family.name) != stats[family.stat]:
                    shown[family.name] = stats[family.stat]
                    metrics[family.name, ""][0].set(stats[family.stat])

    def _create(self) -> dict[tuple[str, str], tuple[Any, bool]]:
        """Return each metric by name and outcome, with whether it is a histogram."""
        made = {}
        self._families = []  # a family that nothing holds is withdrawn
        for family in FAMILIES:
            kind = getattr(self._backend.MetricFamily, family.kind)
            parent = self._backend.MetricFamily(
                name=family.name, description=family.meaning, kind=kind
            )
            self._families.append(parent)
            outcomes = OUTCOMES if family.name == "kvsift_requests_total" else ("",)
            for outcome in outcomes:
                labels = {"model": self._model} | ({"outcome": outcome} if outcome else {})
                options = {"buckets": list(family.buckets)} if family.buckets else {}
                metric = parent.Metric(labels=labels, **options)
                made[family.name, outcome] = (metric, family.kind == "HISTOGRAM")
        return made
