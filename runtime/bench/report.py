"""What a benchmark run prints: a table, Markdown, and the JSON record."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvsift.runtime.bench import transformers_peer
from kvsift.runtime.bench.profile import TOP, Profile

#: A step slower than this many times its byte floor is worth a profile.
FLOOR_LIMIT = 1.5
COLUMNS = (
    "batch", "weights", "engine", "ms/step", "spread", "floor ms", "x floor", "vs transformers",
)  # fmt: skip


def machine(threads: int) -> dict[str, Any]:
    """Return what the numbers depend on: CPU, cores, memory, threads used, load at the start."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "threads": threads,
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of everything that was timed."""
    ours = {name: metadata.version(name) for name in ("kvsift", "onnxruntime", "numpy")}
    return {"python": platform.python_version()} | ours | transformers_peer.versions()


def document(
    rows: list[dict[str, Any]],
    prefill: dict[str, Any],
    settings: dict[str, Any],
    threads: int,
    load: float | None,
) -> dict[str, Any]:
    """Return the JSON record of a run; `load` is the 1-minute load before it began."""
    return {
        "rows": rows,
        "prefill": prefill,
        "settings": settings,
        "machine": machine(threads) | {"load_1min": load},
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def decode_lines(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line per batch, precision and engine, as strings in the order of COLUMNS."""
    lines = []
    for row in rows:
        theirs, spread = row["transformers_ms"], row["spread"]
        engines = (
            ("dense", "dense_ms", "floor_dense_ms", spread["dense"]),
            ("evicted", "evicted_ms", "floor_evicted_ms", spread["evicted"]),
            ("evicted, with its evictions", "evicted_amortised_ms", "floor_evicted_ms",
             spread["evicted"]),
        )  # fmt: skip
        for name, key, floor_key, width in engines:
            ms, floor = row[key], row[floor_key]
            lines.append((
                str(row["batch"]), row["quantize"], name, f"{ms:.1f}", f"{width:.0%}",
                f"{floor:.1f}", f"{ms / floor:.2f}", f"{theirs / ms:.2f}x" if theirs else "-",
            ))  # fmt: skip
    for batch, ms, width, cache in {
        (r["batch"], r["transformers_ms"], r["transformers_spread"], r["transformers_cache"])
        for r in rows
        if r["transformers_ms"]
    }:
        line = (str(batch), "none", f"transformers, dense, {cache}", f"{ms:.1f}", f"{width:.0%}")
        lines.append((*line, "-", "-", "1.00x"))
    return sorted(lines, key=lambda line: int(line[0]))


def notes(record: dict[str, Any]) -> list[str]:
    """Return what the tables leave out, one sentence each."""
    rows, prefill = record["rows"], record["prefill"]
    said = [f"Read bandwidth {rows[0]['bandwidth_gb_s']:.1f} GB/s ({rows[0]['bandwidth_how']})."]
    for row in rows:
        same, whole = row["dense_at_evicted_length_ms"], row["evicted_amortised_ms"]
        means = row["means_ms"]
        said.append(
            f"Batch {row['batch']}, {row['quantize']}: an eviction step costs "
            f"{row['eviction_ms']:+.1f} ms more, {row['eviction_share_decode']:.1%} of decode; the "
            f"dense engine at the evicted length takes {same:.1f} ms, so all that eviction adds is "
            f"{(whole - same) / whole:+.1%}; evicted is {row['dense_ms'] / whole:.2f}x its dense. "
            f"Means, stalls included: dense {means['dense']:.1f} ms, evicted "
            f"{means['evicted']:.1f} ms, dense at the evicted length "
            f"{means['dense_at_evicted_length']:.1f} ms."
        )
    for row in prefill["rows"]:
        rate, theirs = row["tok_s"], prefill["transformers_tok_s"]
        beside = (
            f", transformers {theirs:.0f} ({prefill['transformers_calls']}): {rate / theirs:.2f}x"
            if theirs
            else ""
        )
        said.append(
            f"Prefill of {prefill['tokens']} tokens, {row['quantize']}: {rate:.0f} tok/s{beside}; "
            f"its eviction {row['eviction_ms']:.1f} ms + gather {row['gather_ms']:.1f} ms = "
            f"{row['eviction_share']:.2%}."
        )
    if slow := [f"{r['batch']}/{r['quantize']}" for r in rows if _slow(r)]:
        said.append(
            f"Above {FLOOR_LIMIT:g}x the floor (batch/weights {', '.join(slow)}): run "
            "`python -m kvsift.runtime.bench profile`."
        )
    if why := record["settings"]["transformers_absent"]:
        said.append(f"transformers took no part: {why}.")
    return said


def show(record: dict[str, Any], console: Console) -> None:
    """Print the decode table and the notes."""
    table = Table(title=f"decode at {record['prefill']['tokens']} tokens of context")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[1:3] else "right")
    for line in decode_lines(record["rows"]):
        table.add_row(*line)
    console.print(table)
    for note in notes(record):
        console.print(note, highlight=False)


def markdown(record: dict[str, Any]) -> str:
    """Return the same as a Markdown table with a list of notes."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *decode_lines(record["rows"])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {note}" for note in notes(record)) + "\n"


def profile_lines(found: Profile) -> list[tuple[str, ...]]:
    """Return (op, nodes, ms per step, share) of the most expensive ops and of the rest."""
    top, rest = found.ops[:TOP], found.ops[TOP:]
    if rest:
        top = (*top, ("other ops", sum(o[1] for o in rest), sum(o[2] for o in rest)))
    between = found.run_ms - sum(op[2] for op in found.ops)
    outside = found.step_ms - found.run_ms
    top = (*top, ("between nodes", 0, between), ("outside ONNX Runtime", 0, outside))
    return [
        (op, f"{nodes:.0f}" if nodes else "-", f"{ms:.2f}", f"{ms / found.step_ms:.1%}")
        for op, nodes, ms in top
    ]


def _slow(row: dict[str, Any]) -> bool:
    return any(row[f"{k}_ms"] > FLOOR_LIMIT * row[f"floor_{k}_ms"] for k in ("dense", "evicted"))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf"):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
