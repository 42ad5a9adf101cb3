"""Random inputs of the ops that update a state in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from cases import SIZES, TOKENS, Case, Scene, all_cases, attribute_choices, numbers
from numpy.typing import NDArray

from kvsift.builder import ops

if TYPE_CHECKING:
    from kvsift.builder.bodies import Dims

Array = NDArray[Any]

#: Ops that take a step's queries of all slots.
STEP_OPS = ("AccumUpdate", "QueryStatsUpdate")


class StepScene:
    """A step of S tokens: NaN wherever an op must not look.

    `case.lens` are rows held before the step and `case.new` real tokens of the first slots, then
    random ones; with Rl > 1 the heads of a slot differ.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        self.size = SIZES | {"C": TOKENS, "Rl": 1} | dict(case.sizes)
        slots, steps = self.size["B"], self.size["S"]
        new = self.rng.integers(0, steps + 1, slots)
        self.new = np.array([*case.new, *new[len(case.new) :]][:slots], np.int32)
        room = self.size["C"] - self.new[:, None]
        past = self.rng.integers(0, room + 1, (slots, self.size["Rl"]))
        lens = np.array(case.lens, np.int32)[:slots]
        past[: len(lens)] = lens[:, None]
        self.past = np.minimum(past, room).astype(np.int32)
        # Some rows were evicted, or none.
        gone = self.rng.integers(0, 2, slots) * self.rng.integers(0, 99, slots)
        self.first = (self.past.max(axis=1) + gone).astype(np.int32)

    def shape(self, tensor: ops.Tensor) -> tuple[int, ...]:
        """The tensor's shape in numbers."""
        return numbers(tensor, self.size)

    def rows(self, shape: tuple[int, ...], held: Array) -> Array:
        """Random [B, Hkv, C, ..], NaN from row held [B, Rl] on."""
        out = self.rng.standard_normal(shape).astype(np.float32)
        beyond = np.arange(shape[2]) >= np.broadcast_to(held, shape[:2])[..., None]
        out[beyond] = np.nan
        return out

    def make(self, tensor: ops.Tensor) -> Array:
        """Make one input."""
        shape, rng = self.shape(tensor), self.rng
        given = {"past_lens": self.past, "n_new": self.new, "first_position": self.first}
        if tensor.name in given:
            return given[tensor.name]
        if tensor.name == "accum":
            return np.abs(self.rows(shape, self.past))
        if tensor.name == "keys":
            keys = self.rows(shape, self.past + self.new[:, None])
            return keys.astype(np.float16 if self.case.half else np.float32)
        if tensor.name == "queries":
            queries = 2.0 * rng.standard_normal(shape) + 0.5
            queries[np.arange(shape[1]) >= self.new[:, None]] = np.nan
            return queries.astype(np.float16 if self.case.half else np.float32)
        # A slot of no counted token, of which some step comes, may hold an older sequence's state.
        state = rng.standard_normal(shape).astype(np.float32)
        if tensor.name == "moment":
            state = state @ np.swapaxes(state, -1, -2)
        counted = self.first > int(self.case.attrs["sink_tokens"])
        state[~counted & (self.new > 0)] = np.nan
        return state

    def inputs(self) -> dict[str, Array]:
        """Every input of the op."""
        return {t.name: self.make(t) for t in ops.TABLE[self.case.op].inputs}

    def dims(self) -> Dims:
        """What a body must know."""
        from kvsift.builder.bodies import Dims  # the GPU check has no onnx_ir

        size = self.size
        return Dims(size["Hq"], size["Hkv"], size["D"], size["W"])


def scene_of(case: Case) -> Scene | StepScene:
    """The scene that makes a case's inputs."""
    return StepScene(case) if case.op in STEP_OPS else Scene(case)


def cases_of(op: ops.Op) -> list[Case]:
    """Every case of an op, of a step or of an eviction."""
    return step_cases(op) if op.name in STEP_OPS else all_cases(op)


def step_cases(op: ops.Op) -> list[Case]:
    """Attribute choices at typical sizes, then the edges of a step."""
    cases = [Case(op.name, f"attrs{i}", attrs) for i, attrs in enumerate(attribute_choices(op))]
    base = cases[0]
    sizes: dict[str, dict[str, int]] = {
        "one-token": {"S": 1},
        "one-slot": {"B": 1},
        "one-row": {"C": 1, "S": 1},
        "no-group": {"Hq": 2},
        "one-head": {"Hkv": 1},
    }
    if any("Rl" in t.shape for t in op.inputs):
        sizes |= {"heads": {"Rl": 2}, "heads-one-token": {"Rl": 2, "S": 1}}
    cases += [base.but(name=name, sizes=size) for name, size in sizes.items()]
    cases += [
        base.but(name="first-step", lens=(0,) * 4, new=(9, 5, 1, 0)),
        base.but(name="full", lens=(19,) * 4, new=(9,) * 4),
        base.but(name="nothing-new", new=(0,) * 4),
        base.but(name="decode", sizes={"S": 1}, lens=(7, 27, 0, 9), new=(1, 1, 1, 0)),
        base.but(name="half", half=True),
    ]
    return [case.but(seed=seed) for seed, case in enumerate(cases)]
