"""Random inputs of ops, shaped by the symbolic shapes of the op table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder import ops

if TYPE_CHECKING:
    from kvsift.builder.bodies import Dims

Array = NDArray[Any]

SIZES = {"B": 4, "E": 3, "L": 2, "Hq": 4, "Hkv": 2, "D": 8, "W": 6, "N": 7, "n": 5, "P": 2, "S": 9}
#: Rows of a cache where nothing else is said.
TOKENS = 28
#: Attributes small enough for the sizes above to meet every part of a rule.
SMALL = {"block_size": 4, "window": 5, "block_div": 6, "block_min": 3, "block_max": 4}
#: Ops of which each KV head has a row of its own.
ROW_SCORERS = (
    "ExpectedAttentionScore",
    "HeadTopKSelect",
    "KNormScore",
    "KeyDiffScore",
    "NestedKVScore",
    "WindowScore",
)


@dataclass(frozen=True)
class Case:
    """One op with attributes, sizes and the oddities that the inputs shall have."""

    op: str
    name: str
    attrs: Mapping[str, ops.Value]
    sizes: Mapping[str, int] = field(default_factory=dict)
    half: bool = False
    #: Tokens of the first slots, then random ones; a length above what was seen is cut to it.
    lens: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    #: Slots given first; -1 is skipped.
    slots: tuple[int, ...] = ()
    #: Real tokens of a step in the first slots.
    new: tuple[int, ...] = ()
    #: Budgets: None is random, else the same everywhere.
    budget: int | None = None
    #: Values put at random places of the score.
    spoil: tuple[float, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"

    def but(self, **changes: Any) -> Case:
        """The same case with other fields."""
        return replace(self, **changes)


def numbers(tensor: ops.Tensor, size: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's symbolic shape in numbers."""
    return tuple(
        int(np.prod([int(s) if s.isdigit() else size[s] for s in dim.split("*")]))
        for dim in tensor.shape
    )


class Scene:
    """The tokens of the evicting slots: what lens, ids, positions and slots must agree on."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        # Ops without block_size take tokens as units.
        self.block = int(case.attrs.get("block_size", 1))
        units = {"N": TOKENS} if "block_size" not in case.attrs else {}
        self.size = dict(SIZES) | units | dict(case.sizes)
        per_head = case.attrs.get("head_reduce") == ops.HEAD_REDUCE.index("per_head")
        per_head |= case.op in ROW_SCORERS and not case.attrs.get("shared")
        self.size.setdefault("R", self.size["Hkv"] if per_head else 1)
        self.size.setdefault("Dh", self.size["D"] // 2)
        self.size.setdefault("C", self.size["N"] * self.block)
        for attr in ops.TABLE[case.op].attrs:
            if attr.symbol:
                self.size[attr.symbol] = int(case.attrs[attr.name])
        slots, most = self.size["E"], min(self.size["C"], self.size["N"] * self.block)
        lens = [int(v) for v in self.rng.integers(1, most + 1, slots)]
        self.lens = (list(case.lens) + lens[len(case.lens) :])[:slots]
        # More tokens seen than are held: blocks were evicted before, the partial one stays last.
        more = [int(v) * self.block for v in self.rng.integers(0, 9, slots)]
        seen = [a + b for a, b in zip(self.lens, more, strict=True)]
        self.seen = (list(case.seen) + seen[len(case.seen) :])[:slots]
        self.slots = [int(s) for s in self.rng.permutation(self.size["B"])[:slots]]
        self.slots = (list(case.slots) + self.slots[len(case.slots) :])[:slots]

    def shape(self, tensor: ops.Tensor) -> tuple[int, ...]:
        """The tensor's shape in numbers."""
        return numbers(tensor, self.size)

    def unit_ids(self, shape: tuple[int, ...]) -> Array:
        """Distinct ids with the newest block last (it is partial) and the others in any order."""
        ids = np.full(shape, -1, np.int32)
        slot_axis = len(shape) - 3
        for row in np.ndindex(shape[:-1]):
            e = row[slot_axis]
            count, total = -(-self.lens[e] // self.block), -(-self.seen[e] // self.block)
            if count:
                older = self.rng.permutation(total - 1)[: count - 1]
                ids[row][:count] = [*older, total - 1]
        return ids

    def keys(self, shape: tuple[int, ...]) -> Array:
        """Random keys; NaN wherever an op must not look."""
        keys = np.full(shape, np.nan, np.float32)
        for slot, length in zip(self.slots, self.lens, strict=True):
            keys[slot, :, :length] = self.rng.standard_normal((shape[1], length, shape[3]))
        return keys

    def score(self, shape: tuple[int, ...]) -> Array:
        """Heavy-tailed positive weights of about a sum of 1, with the odd values of the case."""
        score = np.exp(2.0 * self.rng.standard_normal(shape)).astype(np.float32)
        score /= score.sum(axis=-1, keepdims=True)
        for value in self.case.spoil:
            score[self.rng.random(shape) < 0.25] = value
        return score

    def mass(self, shape: tuple[int, ...]) -> Array:
        """Random distributions over the units in use; NaN in rows of queries before the start."""
        mass = np.exp(2.0 * self.rng.standard_normal(shape)).astype(np.float32)
        window = shape[3]
        for e, (length, seen) in enumerate(zip(self.lens, self.seen, strict=True)):
            mass[:, e, :, :, -(-length // self.block) :] = 0.0
            mass[:, e, :, : max(0, window - seen)] = np.nan
        return mass / np.maximum(mass.sum(axis=-1, keepdims=True), 1e-30)

    def statistics(self, shape: tuple[int, ...]) -> Array:
        """Means of queries, or sums of squares over the tokens seen; NaN in slots that stay."""
        out = np.full(shape, np.nan, np.float32)
        for slot, seen in zip(self.slots, self.seen, strict=True):
            out[slot] = self.rng.standard_normal(shape[1:])
            if len(shape) == 4:
                out[slot] = seen / shape[-1] * out[slot] @ np.swapaxes(out[slot], -1, -2)
        return out

    def make(self, tensor: ops.Tensor) -> Array:
        """Make one input."""
        shape, rng = self.shape(tensor), self.rng
        per_slot = {"tokens_seen": self.seen, "evict_slots": self.slots}
        if tensor.name in per_slot:
            return np.array(per_slot[tensor.name], np.int32).reshape(shape)
        if tensor.name == "unit_ids":
            return self.unit_ids(shape)
        if tensor.name in ("keys", "values"):
            return self.keys(shape).astype(np.float16 if self.case.half else np.float32)
        if tensor.name == "q_window":
            window = 2.0 * rng.standard_normal(shape)
            return window.astype(np.float16 if self.case.half else np.float32)
        if tensor.name in ("mean", "moment"):
            return self.statistics(shape)
        if tensor.name == "inv_freq":
            return (1e4 ** (-np.arange(shape[0]) / shape[0])).astype(np.float32)
        if tensor.name == "mass":
            return self.mass(shape)
        if tensor.name == "score":
            return self.score(shape)
        if tensor.name == "u":
            return ((rng.integers(0, 2**23, shape) + 0.5) * 2.0**-23).astype(np.float32)
        if tensor.name == "budget":
            fixed = self.case.budget
            drawn = rng.integers(0, self.size["N"] + 3, shape)
            return np.where(fixed is None, drawn, fixed or 0).astype(np.int32)
        if tensor.name == "pin_spans":
            start = rng.integers(0, 20 * self.block, shape[:2])
            length = rng.integers(0, 2 * self.block, shape[:2])
            return np.stack([start, start + length], axis=-1).astype(np.int32)
        if tensor.name in ("seed", "step"):
            low = -(2**31) if tensor.name == "seed" else 0
            return rng.integers(low, 2**31, shape).astype(np.int32)
        raise KeyError(f"no generator for the input {tensor.name!r}; add one to tests/cases.py")

    def inputs(self) -> dict[str, Array]:
        """Every input of the op."""
        return {t.name: self.make(t) for t in ops.TABLE[self.case.op].inputs}

    def dims(self) -> Dims:
        """What a body must know."""
        from kvsift.builder.bodies import Dims  # the GPU check has no onnx_ir

        size = self.size
        return Dims(size["Hq"], size["Hkv"], size["D"], size["W"])


def attribute_choices(op: ops.Op) -> Iterator[dict[str, ops.Value]]:
    """The defaults, then each attribute at its ends and choices (kept small), one at a time."""
    base = op.defaults() | {k: v for k, v in SMALL.items() if k in op.defaults()}
    yield base
    for attr in op.attrs:
        small = {1, 3, 7} if attr.is_int else {attr.low, 0.25}
        values = set(range(len(attr.choices))) or small | {attr.low, min(attr.high, 9)}
        for value in sorted(v for v in values if attr.low <= v <= attr.high):
            yield base | {attr.name: value}


def edge_cases(op: ops.Op) -> Iterator[Case]:
    """Shapes and values at the edges of what an op must take."""
    base = next(attribute_choices(op))
    plain = Case(op.name, "typical", base)
    yield plain
    yield replace(plain, name="no-slot", sizes={"E": 0})
    yield replace(plain, name="one-unit", sizes={"N": 1})
    yield replace(plain, name="one-slot", sizes={"E": 1, "B": 1, "L": 1})
    yield replace(plain, name="whole-cache", sizes={"E": 1, "B": 1}, lens=(28,), seen=(28,))
    if not {"head_reduce", "shared"} & set(base):
        yield replace(plain, name="rows", sizes={"R": 2})
    yield replace(plain, name="empty-slot", lens=(0,), seen=(0,))
    yield replace(plain, name="first-tokens", lens=(1, 2, 5), seen=(1, 2, 5))
    ragged = 26 if "block_size" in base else 33
    yield replace(plain, name="ragged-capacity", sizes={"C": ragged}, lens=(26, 25))
    yield replace(plain, name="full", lens=(28, 28, 28))
    yield replace(plain, name="skipped-slot", slots=(-1,))
    if any(t.dtype == "T" for t in op.inputs):
        yield replace(plain, name="half", half=True)
    if any(t.name == "budget" for t in op.inputs):
        for value in (0, 1, 7, 99):
            yield replace(plain, name=f"budget-{value}", budget=value)
        for spoil in ((np.nan,), (np.inf,), (-np.inf,), (np.nan, np.inf, -np.inf), (0.0,)):
            yield replace(plain, name=f"spoilt-{spoil}", spoil=spoil)
        yield replace(plain, name="no-pins", sizes={"P": 0})
        yield replace(plain, name="many-units", sizes={"N": 200, "R": 2})


def all_cases(op: ops.Op) -> list[Case]:
    """Every case of an op: attribute choices at typical sizes, then the edges."""
    names = itertools.count()
    cases = [
        Case(op.name, f"attrs{next(names)}", a, seed=i) for i, a in enumerate(attribute_choices(op))
    ]
    if "head_reduce" in op.defaults():  # the modes have forms of their own: each at every edge
        for mode, edge in itertools.product(range(3), edge_cases(op)):
            attrs = dict(edge.attrs) | {"head_reduce": mode}
            cases.append(replace(edge, name=f"{edge.name}-{ops.HEAD_REDUCE[mode]}", attrs=attrs))
        averaged = dict(cases[0].attrs) | {"head_reduce": 0}
        cases.append(Case(op.name, "averaged-window", averaged, {"Hq": 1}))
        return cases
    if "shared" in op.defaults():
        for shared, edge in itertools.product(range(2), edge_cases(op)):
            attrs = dict(edge.attrs) | {"shared": shared, "pool_size": 5}
            cases.append(replace(edge, name=f"{edge.name}-shared{shared}", attrs=attrs))
        return cases
    return cases + list(edge_cases(op))
