"""What all plots share: colours that colour-blind people tell apart, sizes, and how to save one.

matplotlib comes with the extra `plot` and is imported when a plot is made.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

#: The palette of Okabe and Ito, without yellow, which is too light for points on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DPI = 110


def why_absent() -> str | None:
    """Return why no plot can be made, None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'kvsift[plot]')"
    return None


def panels(columns: int, width: float, height: float, title: str) -> tuple[Any, list[Any]]:
    """Return a figure and its axes side by side, `width` and `height` inches in all."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    figure.suptitle(title, fontsize=11)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, axis="x", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, list(axes)


def style(number: int) -> dict[str, Any]:
    """Return colour and marker of series `number`: each tells series apart without the other.

    From the eighth on colours come again, with another marker that is hollow.
    """
    again, at = divmod(number, len(COLOURS))
    return {
        "color": COLOURS[at],
        "marker": MARKERS[(at + again) % len(MARKERS)],
        "fillstyle": "none" if again else "full",
        "markersize": 5,
        "linewidth": 1.2,
    }


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and say where."""
    figure.savefig(path)
    say(f"plot: {path}")


def say(text: str) -> None:
    """Print a line for the user, apart from results."""
    print(text, file=sys.stderr)
