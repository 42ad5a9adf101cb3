"""Tables of a run: means, paired differences and their standard errors over samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Record = dict[str, Any]
#: (kind of text, variant, density) -> {sample index: one value per seed}.
Cells = dict[tuple[str, str, float], dict[int, list[float]]]


@dataclass(frozen=True)
class Stat:
    """A mean over n samples with its standard error (NaN for n = 1)."""

    mean: float
    error: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.error):
            return _number(self.mean)
        return f"{_number(self.mean)} ± {_number(self.error)}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def stat(values: Sequence[float] | NDArray[np.float64]) -> Stat:
    """Return mean and standard error (sample standard deviation / sqrt(n))."""
    x = np.asarray(values, np.float64)
    error = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return Stat(float(x.mean()), error, len(x))


def cells(samples: Sequence[Record], metric: str, part: int | None = None) -> Cells:
    """Collect a metric of all runs; `part` picks one bin, None the mean of all."""
    found: Cells = {}
    for sample in samples:
        for run in sample["runs"]:
            value = run[metric]
            if isinstance(value, list):
                value = value[part] if part is not None else float(np.mean(value))
            key = (sample["kind"], run["variant"], float(run["density"]))
            found.setdefault(key, {}).setdefault(sample["index"], []).append(float(value))
    return found


def per_sample(cell: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the mean over seeds of each sample."""
    return {index: float(np.mean(values)) for index, values in cell.items()}


def paired(a: Mapping[int, Sequence[float]], b: Mapping[int, Sequence[float]]) -> Stat:
    """Return the mean of a - b over the samples that both have, with its standard error."""
    left, right = per_sample(a), per_sample(b)
    return stat([left[i] - right[i] for i in sorted(left.keys() & right.keys())])


def seed_deviation(cell: Mapping[int, Sequence[float]]) -> float:
    """Return the standard deviation over seeds, pooled over samples; NaN with one seed."""
    variances = [np.var(values, ddof=1) for values in cell.values() if len(values) > 1]
    return float(np.sqrt(np.mean(variances))) if variances else math.nan


def run_means(cell: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the mean over samples for each draw: what runs with one seed each would report."""
    draws = min(len(values) for values in cell.values())
    return [float(np.mean([values[d] for values in cell.values()])) for d in range(draws)]


def kept_line(samples: Sequence[Record], kind: str, density: float) -> str:
    """Say how many tokens the variants kept at a density, in the mean, and which kept others."""
    found = {
        name: stat(list(per_sample(cell).values())).mean
        for (k, name, d), cell in cells(samples, "kept").items()
        if k == kind and d == density
    }
    if not found:
        return ""
    most = float(np.median(list(found.values())))
    others = [f"`{n}` {x:.0f}" for n, x in found.items() if abs(x - most) > max(1, 0.005 * most)]
    also = f"; not comparable: {', '.join(others)}" if others else ""
    return f"Kept of each text: {most:.0f} tokens{also}.\n"


def seed_table(columns: Sequence[Column]) -> str:
    """Return the Markdown table of spreads over seeds: of a sample, and of the mean of a run."""
    lines = [
        "| variant | text | mean | SD over seeds, one sample | SD over seeds, mean of the run "
        "| lowest to highest run |",
        "|---|---|---|---|---|---|",
    ]
    for column in columns:
        for name in column.variants():
            cell = column.cell(name)
            if cell is None or len(next(iter(cell.values()))) < 2:
                continue
            means = run_means(cell)
            lines.append(
                f"| `{name}` | {column.label} | {stat(list(per_sample(cell).values()))} | "
                f"{_number(seed_deviation(cell))} | {np.std(means, ddof=1):.4f} | "
                f"{min(means):.3f} to {max(means):.3f} |"
            )
    return "\n".join(lines)


def main_table(found: Cells, kind: str, density: float, reference: str, metric: str) -> str:
    """Return the Markdown table of one kind of text at one density."""
    base = found.get((kind, reference, density))
    lines = [
        f"| variant | {metric} | SD over seeds | difference to `{reference}` |",
        "|---|---|---|---|",
    ]
    for name in _variants(found, kind):
        cell = found.get((kind, name, density)) or found.get((kind, name, 1.0))
        if cell is None:
            continue
        deviation = seed_deviation(cell)
        spread = "-" if math.isnan(deviation) else _number(deviation)
        gap = str(paired(cell, base)) if base and name != reference else "-"
        lines.append(f"| `{name}` | {stat(list(per_sample(cell).values()))} | {spread} | {gap} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Column:
    """A column of a table: one measurement on one kind of text at one density."""

    label: str
    found: Cells
    kind: str
    density: float

    def cell(self, variant: str) -> dict[int, list[float]] | None:
        """Return the variant's values; what evicts nothing is the same at every density."""
        same = self.found.get((self.kind, variant, 1.0))
        return self.found.get((self.kind, variant, self.density), same)

    def variants(self) -> list[str]:
        """Return the variants of the column in the order in which they ran."""
        return _variants(self.found, self.kind)


def overview(columns: Sequence[Column]) -> str:
    """Return the Markdown table of means, a row per variant."""
    names = dict.fromkeys(name for c in columns for name in _variants(c.found, c.kind))
    lines = _head("variant", columns)
    for name in names:
        values = (c.cell(name) for c in columns)
        shown = [str(stat(list(per_sample(v).values()))) if v else "-" for v in values]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def differences(columns: Sequence[Column], reference: str) -> str:
    """Return the Markdown table of paired differences of every variant to `reference`."""
    names = dict.fromkeys(name for c in columns for name in _variants(c.found, c.kind))
    lines = _head(f"difference to `{reference}`", columns)
    for name in names:
        pairs = [(c.cell(name), c.cell(reference)) for c in columns]
        if name != reference:
            shown = [str(paired(x, y)) if x and y else "-" for x, y in pairs]
            lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def contrast_table(columns: Sequence[Column], contrasts: Sequence[tuple[str, str]]) -> str:
    """Return the Markdown table of paired differences a - b, empty if none was measured."""
    lines = _head("a - b", columns)
    for a, b in contrasts:
        pairs = [(c.cell(a), c.cell(b)) for c in columns]
        values = [str(paired(x, y)) if x and y else "-" for x, y in pairs]
        if any(v != "-" for v in values):
            lines.append(f"| `{a}` - `{b}` | {' | '.join(values)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _head(first: str, columns: Sequence[Column]) -> list[str]:
    labels = " | ".join(c.label for c in columns)
    return [f"| {first} | {labels} |", "|---|" + "---|" * len(columns)]


def bin_table(samples: Sequence[Record], kind: str, density: float, metric: str) -> str:
    """Return the Markdown table of a metric by part of the followed text."""
    parts = len(samples[0]["runs"][0][metric])
    by_part = [cells(samples, metric, part) for part in range(parts)]
    heads = " | ".join(f"part {p + 1}" for p in range(parts))
    lines = [f"| variant | {heads} | mean |", "|---|" + "---|" * (parts + 1)]
    whole = cells(samples, metric)
    for name in _variants(whole, kind):
        key = (kind, name, density)
        if key in whole:
            row = [stat(list(per_sample(c[key]).values())) for c in (*by_part, whole)]
            lines.append(f"| `{name}` | {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def _variants(found: Cells, kind: str) -> list[str]:
    """Return the variants of a kind in the order in which they ran."""
    return list(dict.fromkeys(name for k, name, _ in found if k == kind))
