"""What `kvsift bench run` and `kvsift bench paper` say: Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsift.runtime import plotting
from kvsift.runtime.bench.paper import PAPER
from kvsift.runtime.console import size_text

Row = dict[str, Any]
SPEED = (
    "engine", "weights", "density", "context", "output", "batch", "TTFT ms", "ITL ms", "spread",
    "ITL p95", "tokens/s", "eviction, prompt", "eviction, decode", "floor ms", "x floor",
    "KV share",
)  # fmt: skip
MEMORY = (
    "engine", "weights", "density", "context", "batch", "KV used", "KV allocated", "scratch",
    "peak RSS", "sequences that fit",
)  # fmt: skip


def table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    columns = list(columns)
    rows = [columns, ["---"] * len(columns), *(list(line) for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def speed(rows: list[Row]) -> str:
    """Return the speed table: medians, spread over rounds, and how far from the byte floor."""
    lines = []
    for r in rows:
        floor = r.get("floor_ms")
        lines.append((
            r["engine"], r["weights"], f"{r['density']:g}", str(r["context"]), str(r["output"]),
            str(r["batch"]), f"{r['ttft_ms']:.0f}", f"{r['itl_ms']:.1f}", f"{r['itl_spread']:.0%}",
            f"{r['itl_p95_ms']:.1f}", f"{r['tokens_s']:.1f}",
            _cost(r, "prompt_eviction"), _cost(r, "eviction"),
            f"{floor:.1f}" if floor else "-", f"{r['itl_ms'] / floor:.2f}" if floor else "-",
            f"{r['kv_share']:.0%}" if floor else "-",
        ))  # fmt: skip
    return table(SPEED, lines)


def _cost(row: Row, name: str) -> str:
    """Return what an eviction adds, in ms and as a share of reading or of decoding."""
    if f"{name}_ms" not in row:
        return "-"
    return f"{row[f'{name}_ms']:+.1f} ms, {row[f'{name}_share']:.2%}"


def memory(rows: list[Row]) -> str:
    """Return the memory table of our engines, bytes per sequence."""
    lines = [
        (
            r["engine"], r["weights"], f"{r['density']:g}", str(r["context"]), str(r["batch"]),
            size_text(r["kv_bytes_used"]), size_text(r["kv_bytes_allocated"]),
            size_text(r["scratch_bytes"]),
            size_text(r["peak_rss_bytes"]) if r.get("peak_rss_bytes") else "-",
            str(r["sequences_that_fit"]),
        )
        for r in rows
        if "kv_bytes_used" in r
    ]  # fmt: skip
    return table(MEMORY, dict.fromkeys(lines))


def paper(found: Row) -> str:
    """Return the paper's two tables with ours, and what the paper reports beside them."""
    lines = []
    for r in found["throughput"]:
        rate, ms = r["tokens_s"], r["ms"]
        lines.append((
            str(r["answer"]),
            *(f"{rate[n]:.1f} ({ms[n]:.1f} ms)" for n in ("dense", "prefill-only", "nexus")),
            f"{r['speedup']:.2f}", f"{100 * (1 - ms['nexus'] / ms['dense']):.0f} %",
        ))  # fmt: skip
    columns = ("answer", "dense", "prefill-only eviction", "nexus", "speedup", "latency saved")
    first = table(columns, lines)
    held = [
        (
            str(r["answer"]), size_text(r["dense"]), size_text(r["prefill-only"]),
            size_text(r["nexus"]), size_text(r["nexus allocated"]), f"{r['saving']:.1f}",
        )
        for r in found["memory"]
    ]  # fmt: skip
    columns = ("answer", "dense", "prefill-only eviction", "nexus, used", "nexus, slot", "saving")
    second = table(columns, held)
    return (
        f"Decode after {found['prompt']} tokens, batch 1, {found['kept']} kept: tokens/s (ms per "
        f"step), the mean over the answer. The paper (another model on a GPU, not comparable): "
        f"{PAPER['throughput']} times the throughput, latency {PAPER['latency']}.\n\n{first}\n\n"
        f"KV memory of a sequence at the end of the answer. The paper: {PAPER['memory']} times "
        f"less.\n\n{second}\n"
    )


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Plot rows of one context, output and batch: over density, or as bars where there is one."""
    shares = {r["density"] for r in rows if r["density"] < 1}
    (_plot_density if len(shares) > 1 else _plot_bars)(rows, path, title)


def _plot_bars(rows: list[Row], path: Path, title: str) -> None:
    """Plot tokens/s and the time to the first token, a bar per engine, the fastest on top."""
    rows = sorted(rows, key=lambda r: float(r["tokens_s"]))
    labels = [f"{r['engine']}, {r['weights']}, density {r['density']:g}" for r in rows]
    title = f"{title} (blue: kvsift, orange: others)"
    figure, axes = plotting.panels(2, 10, 1.6 + 0.28 * len(rows), title)
    wanted = (
        ("tokens_s", 1.0, "tokens/s (decode, mean)"),
        ("ttft_ms", 1e-3, "time to the first token (s)"),
    )
    for axis, (name, scale, label) in zip(axes, wanted, strict=True):
        values = [scale * r[name] for r in rows]
        colours = [plotting.COLOURS["kv_bytes_used" not in r] for r in rows]
        axis.bar_label(axis.barh(labels, values, color=colours), fmt="%.1f", padding=3, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.12)
    axes[1].set_yticks(range(len(rows)), [""] * len(rows))
    plotting.save(figure, path)


def _plot_density(rows: list[Row], path: Path, title: str) -> None:
    """Plot tokens/s and KV memory over density."""
    figure, axes = plotting.panels(2, 10, 4.2, title)
    names = list(dict.fromkeys((r["engine"], r["weights"]) for r in rows))
    for number, (engine, weights) in enumerate(names):
        mine = [r for r in rows if (r["engine"], r["weights"]) == (engine, weights)]
        mine.sort(key=lambda r: float(r["density"]))
        look, label = plotting.style(number), f"{engine}, {weights}"
        density = [r["density"] for r in mine]
        axes[0].plot(density, [r["tokens_s"] for r in mine], label=label, **look)
        held = [(r["density"], r["kv_bytes_allocated"] / 2**20) for r in mine
                if "kv_bytes_allocated" in r]  # fmt: skip
        if held:
            axes[1].plot(*zip(*held, strict=True), label=label, **look)
    axes[0].set_ylabel("tokens/s (decode, mean)")
    axes[1].set_ylabel("KV of a sequence (MiB, allocated)")
    for axis in axes:
        axis.set_xlabel("density (share of the prompt that is kept)")
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, 1.05)
        axis.grid(True, color="#dddddd", linewidth=0.6)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plotting.save(figure, path)


def plot_paper(found: Row, path: Path) -> None:
    """Plot throughput and memory over the answer's length."""
    heading = f"Prompt of {found['prompt']} tokens, {found['kept']} kept, batch 1"
    figure, axes = plotting.panels(2, 10, 4.2, heading)
    for number, name in enumerate(("dense", "prefill-only", "nexus")):
        look = plotting.style(number)
        label = {"prefill-only": "prefill-only eviction"}.get(name, name)
        answers = [r["answer"] / 1024 for r in found["throughput"]]
        rates = [r["tokens_s"][name] for r in found["throughput"]]
        axes[0].plot(answers, rates, label=label, **look)
        answers = [r["answer"] / 1024 for r in found["memory"]]
        axes[1].plot(answers, [r[name] / 2**20 for r in found["memory"]], label=label, **look)
    axes[0].set_ylabel("tokens/s, mean over the answer")
    axes[1].set_ylabel("KV of a sequence (MiB, used)")
    for axis in axes:
        axis.set_xlabel("tokens of the answer (thousands)")
        axis.set_ylim(bottom=0)
        axis.grid(True, color="#dddddd", linewidth=0.6)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plotting.save(figure, path)
