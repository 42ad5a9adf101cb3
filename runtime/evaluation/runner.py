"""Runs samples that are not finished yet, with progress on a terminal, and writes the tables."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvsift.builder.errors import UsageError, unknown_name
from kvsift.runtime import result_files
from kvsift.runtime.evaluation import report
from kvsift.runtime.evaluation.store import Record, Store
from kvsift.runtime.evaluation.suites import CONTRASTS

#: Seconds between two lines of progress where there is no terminal.
SAY_SECONDS = 30
#: What fidelity runs measure beside KL.
OTHERS = {
    "agreement": "top-1 agreement with the full cache",
    "nll": "mean negative log probability of the text (perplexity is its exponential)",
}


class Named(Protocol):
    """What every sample says of itself."""

    @property
    def kind(self) -> str:
        """The kind of text or task."""

    @property
    def index(self) -> int:
        """The number within its kind."""

    @property
    def source(self) -> str:
        """Where it comes from."""

    @property
    def digest(self) -> str:
        """A hash of its content."""


S = TypeVar("S", bound=Named)
Measured = tuple[list[dict[str, Any]], dict[str, Any]]


def run(store: Store, samples: Sequence[S], measure: Callable[[S], Measured]) -> None:
    """Measure every sample that `store` lacks; `measure` returns runs and more fields to keep.

    Samples come in the given order; progress and the time left go to stderr. UsageError if a
    sample was measured on another text.
    """
    for sample in samples:
        store.check(sample.kind, sample.index, sample.digest)
    left = [s for s in samples if not store.has(s.kind, s.index)]
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    terminal = sys.stderr.isatty()
    with closing(store), Progress(*columns, console=console, disable=not terminal) as progress:
        task = progress.add_task("samples", total=len(samples), completed=len(samples) - len(left))
        start = said = time.monotonic()
        for done, sample in enumerate(left):
            if not terminal and done and time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                rest = (said - start) / done * (len(left) - done)
                print(
                    f"{len(samples) - len(left) + done} of {len(samples)} samples, about "
                    f"{rest / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
            begin = time.perf_counter()
            runs, more = measure(sample)
            store.add(
                {
                    "kind": sample.kind,
                    "index": sample.index,
                    "source": sample.source,
                    "digest": sample.digest,
                    "seconds": round(time.perf_counter() - begin, 2),
                    **more,
                    "runs": runs,
                }
            )
            progress.advance(task)


def alternate(*kinds: Sequence[S]) -> list[S]:
    """Return the samples of all kinds in turn, so that a stopped run has some of each."""
    longest = max(len(kind) for kind in kinds)
    return [kind[i] for i in range(longest) for kind in kinds if i < len(kind)]


def write_reports(
    out: Path,
    title: str,
    store: Store,
    settings: Record,
    metric: str,
    label: str,
    reference: str,
) -> str:
    """Write `<title>.json` (everything) and `<title>.md` (tables); return the Markdown."""
    samples = store.sorted()
    text = markdown(title, samples, settings, metric, label, reference)
    write(out, title, {"settings": settings, "samples": samples}, text)
    return text


def write(out: Path, title: str, content: Record, text: str) -> None:
    """Write `<title>.json`, with the date, and `<title>.md`."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {**content, "date": now}
    result_files.write(out / f"{title}.json", json.dumps(content, indent=1) + "\n")
    result_files.write(out / f"{title}.md", text)


def markdown(
    title: str,
    samples: Sequence[Record],
    settings: Record,
    metric: str,
    label: str,
    reference: str,
) -> str:
    """Return the tables of a run: one per kind of text and density, then the paired contrasts."""
    found = report.cells(samples, metric)
    kinds = sorted({s["kind"] for s in samples}, reverse=True)
    densities = [float(d) for d in settings["densities"]]
    parts = [f"## {title}\n"]
    if title == "seeds":
        columns = [report.Column(f"{k} {d:g}", found, k, d) for d in densities for k in kinds]
        parts.append(report.seed_table(columns) + "\n")
    for kind in kinds:
        count = sum(s["kind"] == kind for s in samples)
        for density in densities:
            parts.append(f"### {kind}, density {density:g}, n = {count}\n")
            parts.append(report.kept_line(samples, kind, density))
            parts.append(report.main_table(found, kind, density, reference, label) + "\n")
            if settings.get("bins", 1) > 1:
                parts.append(report.bin_table(samples, kind, density, metric) + "\n")
    columns = [report.Column(f"{k} {d:g}", found, k, d) for k in kinds for d in densities]
    for key, what in OTHERS.items():
        if samples and key in samples[0]["runs"][0]:
            more = report.cells(samples, key)
            shown = [report.Column(c.label, more, c.kind, c.density) for c in columns]
            parts.append(f"### {what}\n\n{report.overview(shown)}\n")
    for name, contrasts in CONTRASTS.items():
        table = report.contrast_table(columns, contrasts)
        if table:
            parts.append(f"### {name}: paired differences of {label}\n\n{table}\n")
    return "\n".join(parts)


#: Runs that share a row per variant in `summary`: title, metric, what its columns are called.
SUMMARY = (("fidelity", "kl", "KL"), ("needles", "correct", "needles"))


def summary(out: Path, reference: str | None) -> str:
    """Return the tables over the finished fidelity and needle runs in `out`, side by side.

    What prefill_selector changes shows in `stream` only, so its contrasts are left out here.
    Raises UsageError if there is neither run.
    """
    columns = []
    for title, metric, label in SUMMARY:
        path = out / f"{title}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            found = report.cells(content["samples"], metric)
            for kind in sorted({s["kind"] for s in content["samples"]}, reverse=True):
                name = label if title == "needles" else f"{label} {kind}"
                for d in content["settings"]["densities"]:
                    columns.append(report.Column(f"{name} {d:g}", found, kind, float(d)))
    if not columns:
        raise UsageError(f"{out} has no finished run; run fidelity or needles with --out first")
    known = list(dict.fromkeys(name for column in columns for name in column.variants()))
    if reference is not None and reference not in known:
        raise unknown_name("reference", reference, known)
    chosen = reference or known[0]
    tables = [report.overview(columns), report.differences(columns, chosen)]
    for question, pairs in CONTRASTS.items():
        if question != "prefill_selector":
            tables.append(report.contrast_table(columns, pairs))
    return "\n\n".join(table for table in tables if table) + "\n"
