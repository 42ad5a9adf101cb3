"""Plots of the evaluation's results, one PNG beside each table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsift.runtime import plotting
from kvsift.runtime.evaluation.report import Column, paired, per_sample, run_means, stat
from kvsift.runtime.evaluation.suites import Pairs

ROW = 0.24


def dots(
    path: Path, groups: Mapping[str, Sequence[Column]], label: str, title: str, log: bool = False
) -> None:
    """Plot means with standard errors: a panel per group, a row per variant, a colour per column.

    Rows are ordered by the last column of the first group. With `log` what lies at 0 everywhere,
    as the full cache does, has no row; without any other there is no plot.
    """
    from matplotlib.ticker import LogLocator

    first = next(iter(groups.values()))
    every = [column for columns in groups.values() for column in columns]
    names = [n for n in _names(groups) if first[-1].cell(n) and not (log and n == "full")]
    if log and not any(_mean(column, n) > 0 for column in every for n in names):
        plotting.say(f"no plot {path}: nothing differs from the full cache")
        return
    names.sort(key=lambda n: _mean(first[-1], n), reverse=True)
    height = 1.6 + ROW * len(names)
    figure, axes = plotting.panels(len(groups), 1.6 + 3.6 * len(groups), height, title)
    for axis, (group, columns) in zip(axes, groups.items(), strict=True):
        for number, column in enumerate(columns):
            rows = [i for i, n in enumerate(names) if column.cell(n)]
            stats = [stat(list(per_sample(column.cell(names[i]) or {}).values())) for i in rows]
            axis.errorbar(
                [s.mean for s in stats],
                [i + 0.16 * (number - (len(columns) - 1) / 2) for i in rows],
                xerr=[0.0 if math.isnan(s.error) else s.error for s in stats],
                label=column.label,
                linestyle="none",
                elinewidth=1,
                **{k: v for k, v in plotting.style(number).items() if k != "linewidth"},
            )
        axis.set_title(group, fontsize=10)
        axis.set_xlabel(label)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axis.set_ylim(-0.7, len(names) - 0.3)
        if log:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plotting.save(figure, path)


def forest(
    path: Path, columns: Sequence[Column], questions: Mapping[str, Pairs], label: str, title: str
) -> None:
    """Plot paired differences a - b with standard errors, grouped by question."""
    rows: list[tuple[str, list[Any]]] = []
    for question, pairs in questions.items():
        found = []
        for a, b in pairs:
            cells = [(c.cell(a), c.cell(b)) for c in columns]
            if any(x and y for x, y in cells):
                values = [paired(x, y) if x and y else None for x, y in cells]
                found.append((f"{a}  −  {b}", values))
        if found:
            rows += [(question, []), *found]
    rows.reverse()
    figure, (axis,) = plotting.panels(1, 10.5, 1.4 + 0.21 * len(rows), title)
    for number, column in enumerate(columns):
        at = [i for i, (_, v) in enumerate(rows) if v and v[number] is not None]
        stats = [rows[i][1][number] for i in at]
        axis.errorbar(
            [s.mean for s in stats],
            [i + 0.18 * (number - (len(columns) - 1) / 2) for i in at],
            xerr=[0.0 if math.isnan(s.error) else s.error for s in stats],
            label=column.label,
            linestyle="none",
            elinewidth=1,
            **{k: v for k, v in plotting.style(number).items() if k != "linewidth"},
        )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    for tick, (_, values) in zip(axis.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if values else "bold")
    axis.set_ylim(-0.8, len(rows) - 0.2)
    axis.set_xlabel(label)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plotting.save(figure, path)


def grid(path: Path, columns: Sequence[Column], label: str, title: str) -> None:
    """Plot means as a grid of numbers, a row per variant; darker is lower."""
    names = [n for n in _names({"": columns}) if columns[-1].cell(n)]
    names.sort(key=lambda n: _mean(columns[-1], n), reverse=True)
    values = np.array([[_mean(c, n) for c in columns] for n in names])
    figure, (axis,) = plotting.panels(
        1, 3.2 + 0.95 * len(columns), 1.5 + 0.26 * len(names), title
    )  # fmt: skip
    axis.grid(False)
    shown = axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value < 0.5 else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xticks(range(len(columns)), [c.label for c in columns], fontsize=8, rotation=20)
    figure.colorbar(shown, ax=axis, label=label)
    plotting.save(figure, path)


def seeds(path: Path, groups: Mapping[str, Sequence[Column]], label: str, title: str) -> None:
    """Plot, for each variant and seed, the mean over all samples: what a run would report."""
    names = _names(groups)[::-1]
    figure, axes = plotting.panels(
        len(groups), 1.6 + 3.6 * len(groups), 1.8 + 0.5 * len(names), title
    )  # fmt: skip
    for axis, (group, columns) in zip(axes, groups.items(), strict=True):
        for number, column in enumerate(columns):
            for row, name in enumerate(names):
                cell = column.cell(name)
                if cell:
                    means = run_means(cell)
                    look = plotting.style(number) | {"linestyle": "none", "alpha": 0.7}
                    height = row + 0.2 * (number - (len(columns) - 1) / 2)
                    axis.plot(
                        means,
                        [height] * len(means),
                        label=column.label if row == 0 else None,
                        **look,
                    )
        axis.set_title(group, fontsize=10)
        axis.set_xlabel(label)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plotting.save(figure, path)


def maybe(make: Callable[[], None]) -> None:
    """Make a plot if matplotlib is there, else say how to get it."""
    if absent := plotting.why_absent():
        plotting.say(absent)
    else:
        make()


def _names(groups: Mapping[str, Sequence[Column]]) -> list[str]:
    every = (column for columns in groups.values() for column in columns)
    return list(dict.fromkeys(name for column in every for name in column.variants()))


def _mean(column: Column, name: str) -> float:
    cell = column.cell(name)
    return float(np.mean(list(per_sample(cell).values()))) if cell else math.nan
