"""What the model reports on Triton's metrics port.

The server crashes when two threads touch its metrics, so one thread creates and updates them all;
others leave it notes.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvsift.runtime.results import GenerationResult
from kvsift.runtime.stats import LATENCY_BOUNDS, SchedulerStats

#: Seconds between two looks at the scheduler's numbers.
_PERIOD_S = 0.25
_SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
OUTCOMES = ("stop", "length", "cancelled", "refused", "failed")


@dataclass(frozen=True)
class Family:
    """One metric: its Prometheus name, kind, meaning and histogram buckets.

    `stat` is the number of `SchedulerStats` that it shows; without one it is counted here.
    """

    name: str
    kind: Literal["COUNTER", "GAUGE", "HISTOGRAM"]
    meaning: str
    stat: str = ""
    buckets: tuple[float, ...] = ()


REQUESTS = Family("kvsift_requests_total", "COUNTER", f"Requests by outcome: {', '.join(OUTCOMES)}")
TTFT = Family(
    "kvsift_time_to_first_token_seconds",
    "HISTOGRAM",
    "From arrival to the first token, waiting included; counted when the request ends",
    buckets=LATENCY_BOUNDS,
)
ITL = Family(
    "kvsift_inter_token_latency_seconds",
    "HISTOGRAM",
    "Between two tokens; counted when the request ends",
    buckets=LATENCY_BOUNDS,
)
COVERAGE = Family(
    "kvsift_coverage",
    "HISTOGRAM",
    "Share of the score that a request's last eviction kept, where that is defined",
    buckets=_SHARE,
)
FAMILIES = (
    REQUESTS,
    TTFT,
    ITL,
    COVERAGE,
    Family("kvsift_prompt_tokens_total", "COUNTER", "Prompt tokens read", "prompt_tokens"),
    Family("kvsift_generated_tokens_total", "COUNTER", "Tokens generated", "generated_tokens"),
    Family("kvsift_evictions_total", "COUNTER", "Eviction steps", "evictions"),
    Family(
        "kvsift_evicted_tokens_total",
        "COUNTER",
        "Tokens dropped from the cache, the mean over layers and heads",
        "evicted_tokens",
    ),
    Family("kvsift_queued_requests", "GAUGE", "Requests waiting for a slot", "queued"),
    Family("kvsift_slots_in_use", "GAUGE", "Requests that hold a slot", "running"),
    Family("kvsift_slots", "GAUGE", "Requests that run at a time", "slots"),
    Family("kvsift_kv_used_bytes", "GAUGE", "Keys and values held", "kv_bytes_used"),
    Family("kvsift_kv_capacity_bytes", "GAUGE", "Size of all slots", "kv_bytes_capacity"),
    Family(
        "kvsift_scratch_bytes", "GAUGE", "Size of the cache prompts are read in", "scratch_bytes"
    ),
)


class HasStats(Protocol):
    """What the numbers are read from."""

    def stats(self) -> SchedulerStats:
        """Return the numbers of this moment."""


class Metrics:
    """Creates the families of one model and keeps them up to date on a thread of its own.

    `backend` is Triton's python module.
    """

    def __init__(self, backend: Any, model: str, source: HasStats) -> None:
        self._backend = backend
        self._model = model
        self._source = source
        self._notes: queue.SimpleQueue[tuple[Family, str, float] | None] = queue.SimpleQueue()
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
        self._notes.put((REQUESTS, "refused", 1))

    def failed(self) -> None:
        """Count a request that ended in an error."""
        self._notes.put((REQUESTS, "failed", 1))

    def finished(self, result: GenerationResult) -> None:
        """Count a request that has an answer, or part of one."""
        self._notes.put((REQUESTS, result.finish_reason, 1))
        if result.token_ids:
            self._notes.put((TTFT, "", result.timings.ttft_s))
        for seconds in result.timings.itl_s:
            self._notes.put((ITL, "", seconds))
        if result.coverage is not None:
            self._notes.put((COVERAGE, "", result.coverage))

    def _run(self) -> None:
        metrics = self._create()
        shown = {family.stat: 0.0 for family in FAMILIES if family.stat}
        going, due = True, 0.0
        while going:
            note = None
            with contextlib.suppress(queue.Empty):
                note = self._notes.get(timeout=max(0.0, due - time.monotonic()))
                going = note is not None
            if note is not None:
                family, outcome, value = note
                metric = metrics[family.name, outcome]
                (metric.observe if family.buckets else metric.increment)(value)
            if not going or time.monotonic() >= due:
                self._show(metrics, shown)
                due = time.monotonic() + _PERIOD_S

    def _create(self) -> dict[tuple[str, str], Any]:
        """Return each metric by its name and outcome.

        They are never destroyed: that would withdraw the families under the metrics of the same
        model loaded anew, and crash the server.
        """
        made = {}
        for family in FAMILIES:
            parent = self._backend.MetricFamily(
                name=family.name,
                description=family.meaning,
                kind=getattr(self._backend.MetricFamily, family.kind),
            )
            _keep(parent)
            options = {"buckets": list(family.buckets)} if family.buckets else {}
            for outcome in OUTCOMES if family is REQUESTS else ("",):
                labels = {"model": self._model} | ({"outcome": outcome} if outcome else {})
                made[family.name, outcome] = parent.Metric(labels=labels, **options)
                _keep(made[family.name, outcome])
        return made

    def _show(self, metrics: dict[tuple[str, str], Any], shown: dict[str, float]) -> None:
        """Bring counters and gauges to the scheduler's numbers."""
        stats = self._source.stats()
        for family in FAMILIES:
            if not family.stat:
                continue
            value = float(getattr(stats, family.stat))
            more = value - shown[family.stat]
            metric = metrics[family.name, ""]
            if family.kind == "GAUGE":
                metric.set(value)  # always: the same model, unloading, may have set it too
            elif more:
                shown[family.stat] = value
                metric.increment(more)


def _keep(thing: object) -> None:
    """Take a reference that is never given back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
