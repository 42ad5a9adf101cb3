"""How the layers of a model share a budget: uniform, pyramid, or by weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import UsageError
from kvsift.builder.package import Policy

Ints = NDArray[np.int32]


def layer_budgets(
    policy: Policy,
    units: int,
    prompt_units: int,
    num_layers: int,
    forced: int,
    share: str | Sequence[float] | None = None,
) -> Ints:
    """Return one budget in units per layer, int32 [L]; they sum to num_layers * units exactly.

    `share` is a rule in the place of the policy's own. No layer falls below `forced` + 1 units (or
    `units`, if that is less).
    """
    rule = policy.layer_budgets if share is None else share
    if rule == "uniform":
        return np.full(num_layers, units, np.int32)
    if rule == "pyramid":
        window = -(-policy.window // policy.block_size)
        shares = pyramid(units, prompt_units, num_layers, window, policy.pyramid_beta)
    else:
        assert not isinstance(rule, str)
        shares = weighted(rule, units, num_layers)
    return exact_shares(shares, num_layers * units, min(units, forced + 1))


def pyramid(
    units: int, prompt_units: int, num_layers: int, window: int, beta: float
) -> NDArray[np.float64]:
    """Return PyramidKV's shares [L]: falling in equal steps from the first layer to the last.

    From 2 * units - units / beta down to units / beta, cut so that no layer exceeds the prompt
    without its window; uniform where the last layer would fall below the window.
    """
    low = units / beta
    high = 2 * units - low
    if high >= prompt_units - window:
        high = prompt_units - window
        low = 2 * units - high
    if not prompt_units >= high >= low >= window:
        return np.full(num_layers, float(units))
    return np.linspace(high, low, num_layers)


def weighted(weights: Sequence[float], units: int, num_layers: int) -> NDArray[np.float64]:
    """Return shares [L] proportional to one weight per layer; UsageError if they do not fit."""
    values = np.array(weights, np.float64)
    if len(values) != num_layers or not (np.isfinite(values) & (values > 0)).all():
        raise UsageError(
            f"layer_budgets must be one positive weight for each of the {num_layers} layers, "
            f"got {len(values)}: {', '.join(f'{w:g}' for w in weights)[:60]}"
        )
    shares: NDArray[np.float64] = values / values.sum() * (num_layers * units)
    return shares


def exact_shares(shares: NDArray[np.float64], total: int, least: int) -> Ints:
    """Round the shares to integers >= least with the given sum, each as near as that allows."""
    rounded = np.maximum(np.rint(shares), least).astype(np.int64)
    while (off := int(total - rounded.sum())) != 0:
        error = np.where((off < 0) & (rounded <= least), -np.inf, (shares - rounded) * np.sign(off))
        rounded[int(error.argmax())] += int(np.sign(off))
    return rounded.astype(np.int32)
