"""State tensors that the graph carries from step to step beside keys and values.

Each is an input and an output of every layer, bound to the same memory. A state with an axis C
holds one number per cached row and moves with its row; the others belong to the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.builder.families import ModelConfig


@dataclass(frozen=True)
class State:
    """Name and shape of a state after the slot axis; symbols Hq, Hkv, D and C."""

    name: str
    shape: tuple[str, ...]

    @property
    def follows_rows(self) -> bool:
        """Whether the state moves with the rows of the cache (its axes are Hkv, C)."""
        return "C" in self.shape

    def dims(self, config: ModelConfig) -> tuple[int | str, ...]:
        """Return the shape after the slot axis, C left symbolic."""
        sizes = {"Hq": config.num_heads, "Hkv": config.num_kv_heads, "D": config.head_dim}
        return tuple(sizes.get(axis, axis) for axis in self.shape)


STATES = {
    s.name: s
    for s in (
        State("accum", ("Hkv", "C")),
        State("query_mean", ("Hq", "D")),
        State("query_moment", ("Hq", "D", "D")),
    )
}
