"""The picture of a trace: which positions stay, over the evictions and over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import UsageError
from kvsift.runtime.trace import Eviction, Trace

#: More columns than the picture has dots to show them: positions are then drawn in bins.
MAX_COLUMNS = 900
Floats = NDArray[np.float64]


def kept_shares(events: Sequence[Eviction], block_size: int) -> tuple[Floats, Floats]:
    """Return the shares of rows that keep each unit: [evictions, units] and [layers, units].

    The first is over all layers and heads of one eviction, the second over the heads of a layer at
    the last eviction. NaN where the unit did not exist yet.
    """
    units = max(-(-e.tokens_seen // block_size) for e in events)
    layers = len(events[-1].kept)
    over_steps = np.full((len(events), units), np.nan)
    over_layers = np.zeros((layers, units))
    for i, event in enumerate(events):
        there = -(-event.tokens_seen // block_size)
        over_steps[i, :there] = 0.0
        rows = [row for layer in event.kept for row in layer]
        for row in rows:
            over_steps[i, row] += 1 / len(rows)
    for layer, kept in enumerate(events[-1].kept):
        for row in kept:
            over_layers[layer, row] += 1 / len(kept)
    return over_steps, over_layers


def plot_trace(trace: Trace, request: int, path: Path) -> None:
    """Draw the evictions of one request as a PNG.

    Above, one line per eviction; below, one line per layer after the last one. UsageError if
    matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("drawing needs matplotlib; pip install 'kvsift[plot]'") from None
    head, events = trace.header, trace.of(request)
    over_steps, over_layers = kept_shares(events, head.block_size)
    heights = [_height(len(over_steps)), _height(len(over_layers))]
    figure = Figure(figsize=(10, sum(heights) + 1.9), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    image = _panel(upper, over_steps, head.block_size)
    _panel(lower, over_layers, head.block_size)
    upper.set_ylabel("eviction")
    lower.set_ylabel("layer")
    lower.set_xlabel("position of the token")
    policy = f"{head.policy}, budget {_mean(events[-1].budget) * head.block_size:.0f} tokens"
    upper.set_title(f"Request {request}, {policy}: every eviction", loc="left")
    last = events[-1]
    lower.set_title(
        f"After the last one (eviction {last.step}, {last.tokens_seen} tokens seen), by layer",
        loc="left",
    )
    bar = figure.colorbar(image, ax=[upper, lower], fraction=0.04, pad=0.02)
    bar.set_label("share of layers and heads that keep the position")
    figure.text(0.005, 0.005, "white: not seen yet", fontsize=8, color="0.35")
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise UsageError(
            f"cannot write the picture {path}: {error.strerror}; choose another -o"
        ) from None


def _panel(axes: Any, shares: Floats, block_size: int) -> Any:
    """Draw one heat map with positions along x; return the image."""
    binned, width = _binned(shares)
    size = block_size * width
    axes.set_facecolor("white")
    image = axes.imshow(
        np.ma.masked_invalid(binned),
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0.0,
        vmax=1.0,
        extent=(0, binned.shape[1] * size, len(shares) - 0.5, -0.5),
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    return image


def _binned(shares: Floats) -> tuple[Floats, int]:
    """Return the shares [n, bins] and the units per bin; a bin is the mean of what is there."""
    width = -(-shares.shape[1] // MAX_COLUMNS)
    pads = -shares.shape[1] % width
    padded = np.pad(shares, ((0, 0), (0, pads)), constant_values=np.nan)
    grouped = padded.reshape(len(shares), -1, width)
    there = ~np.isnan(grouped)
    total = np.where(there, grouped, 0.0).sum(axis=2)
    count = there.sum(axis=2)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), width


def _height(lines: int) -> float:
    """Return the inches for a panel of so many lines."""
    return float(np.clip(0.12 * lines, 1.2, 5.0))


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
