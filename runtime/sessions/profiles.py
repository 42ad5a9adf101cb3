"""Which profile of a TensorRT engine takes a step, and the sizes that the step is padded to.

A decode step is padded to few sizes, so that each is recorded once and replayed: slots and evicting
slots to powers of two, units to all that a slot has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsift.builder.errors import CapacityError
from kvsift.builder.package import Manifest, Profile
from kvsift.runtime.sessions import Step

#: Sizes by the symbols of the manifest's shapes.
Sizes = dict[str, int]
#: How to build an engine that takes more of a symbol.
_FIXES = {
    "B": "--max-batch",
    "R": "--max-batch",
    "E": "--max-batch",
    "C": "--max-input, --max-output or --max-density",
    "N": "--max-input, --max-output or --max-density",
}


@dataclass(frozen=True)
class Fit:
    """A step's profile, by its index in the engine and its name, and the padded sizes."""

    index: int
    name: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def is_generation(self) -> bool:
        """Whether steps of these sizes come again and again."""
        return self.name == "generation"


def power_of_two(number: int, most: int) -> int:
    """Return the least power of two that is not below `number`, or `most`; 0 for 0."""
    return min(most, 1 << (number - 1).bit_length()) if number else 0


def step_sizes(manifest: Manifest, capacities: Sequence[int], step: Step) -> Sizes:
    """Return the sizes of a step over a cache, by symbol."""
    batch, tokens = step.input_ids.shape
    x = step.evictions
    sizes = {
        "B": batch,
        "S": tokens,
        "R": batch * manifest.model.num_kv_heads,
        "C": max(capacities),
        "E": 0 if x is None else len(x.slots),
        "N": 1 if x is None else x.unit_ids.shape[-1],
        "P": 1 if x is None else x.pin_spans.shape[1],
    }
    return sizes | {f"C{layer}": size for layer, size in enumerate(capacities)}


def check_slots(manifest: Manifest, slots: int) -> None:
    """Raise CapacityError for a cache of more slots than the engine takes in a step."""
    assert manifest.tensorrt is not None
    most = max(p.sizes["B"][2] for p in manifest.tensorrt.profiles)
    if slots > most:
        raise CapacityError(
            f"max_batch is {slots} and the engine was built with --max-batch {most}; lower it or "
            "rebuild"
        )


def fit(manifest: Manifest, capacities: Sequence[int], slots: int, step: Step) -> Fit:
    """Return the profile that takes a step over a cache of `slots`, and the padded sizes.

    Raises CapacityError when none does: which size, what is allowed, how to get more.
    """
    assert manifest.tensorrt is not None
    sizes = step_sizes(manifest, capacities, step)
    known = [
        (i, p)
        for i, p in enumerate(manifest.tensorrt.profiles)
        if sizes["S"] == 1 or p.name != "generation"
    ]
    known.sort(key=lambda item: item[1].name != "generation")  # a decode step's own first
    wrong = ""
    for index, profile in known:
        padded = _padded(manifest, profile, sizes, slots)
        bad = [n for n, (low, _, high) in profile.sizes.items() if not low <= padded[n] <= high]
        if not bad:
            return Fit(index, profile.name, tuple(padded.items()))
        low, _, high = profile.sizes[bad[0]]
        wrong = wrong or (
            f"a step needs {bad[0]} = {padded[bad[0]]}, and the engine's profile {profile.name!r} "
            f"takes {low} to {high}; rebuild it with another {_FIXES.get(bad[0][0], 'limit')}"
        )
    raise CapacityError(wrong)


def _padded(manifest: Manifest, profile: Profile, sizes: Sizes, slots: int) -> Sizes:
    padded = dict(sizes)
    if profile.name == "generation":
        padded["B"] = power_of_two(sizes["B"], slots)
        padded["R"] = padded["B"] * manifest.model.num_kv_heads
        padded["E"] = power_of_two(sizes["E"], padded["B"])
        most = profile.sizes.get("N", (0, 0, sizes["N"]))[2]
        units = -(-sizes["C"] // manifest.policy.block_size)
        padded["N"] = max(sizes["N"], min(most, units))
        padded["P"] = power_of_two(sizes["P"], 1 << 30)
    for symbol in ("N", "P"):
        padded[symbol] = max(padded[symbol], profile.sizes.get(symbol, (0,))[0])
    return padded
