"""Oracle of PhiloxUniform, in Python integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.ops import Value

WORD = 2**32


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 (Salmon et al. 2011): ten rounds of two 32 x 32 -> 64 bit products."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


def philox_uniform(attrs: Mapping[str, Value], x: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """u = ((word >> 9) + 0.5) 2^-23 of word i % 4 at (id, i // 4, layer Hkv + row, step)."""
    ids, draws = x["unit_ids"], int(attrs["draws"])
    layers, slots, rows, units = ids.shape
    u = np.zeros((layers, slots, rows, draws, units))
    for layer, e, row, j in np.ndindex(ids.shape):
        low, high = (int(v) % WORD for v in x["seed"][e])
        stream = layer * int(attrs["heads_per_layer"]) + row
        for i in range(draws):
            at = (int(ids[layer, e, row, j]) % WORD, i // 4, stream, int(x["step"][e]) % WORD)
            u[layer, e, row, i, j] = ((philox4x32(at, (low, high))[i % 4] >> 9) + 0.5) * 2.0**-23
    return [u]
