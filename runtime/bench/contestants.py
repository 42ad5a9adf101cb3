"""What a benchmark run times: an engine with a density, or what a user might take instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvsift.builder.package import Policy
from kvsift.runtime.bench.transformers_peer import Peer
from kvsift.runtime.bench.weights import weight_bytes
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.evaluation.kvpress_peer import KvpressPeer
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.sizes import Sizes, sizes


@dataclass
class Run:
    """One run of a batch: seconds to the first token, between tokens while all decode, and rows.

    `rows`: cached tokens per sequence, the mean over the decode steps; None if not known.
    `evicts`: whether each step between tokens evicts, empty where none ever does. `cuts`: whether
    the prompt's end does.
    """

    ttft_s: float
    itl_s: list[float]
    rows: float | None = None
    evicts: list[bool] = field(default_factory=list)
    cuts: bool = False


class Contestant(Protocol):
    """Something that reads prompts and generates a fixed number of tokens."""

    name: str
    weights: str
    density: float
    #: Bytes of weights that a step reads, and of a cached token; None if not known.
    weight_bytes: int | None
    token_bytes: int | None

    def run(self, prompt: Sequence[int], output: int, batch: int) -> Run:
        """Generate `output` tokens greedily for `batch` sequences with the same prompt."""
        ...


@dataclass
class Ours:
    """An engine asked for a density; sequences of a batch have eviction seeds of their own."""

    engine: Engine
    density: float
    name: str = field(init=False)
    weights: str = field(init=False)
    weight_bytes: int | None = field(init=False)
    token_bytes: int | None = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.engine.manifest
        self.name = manifest.policy.name
        self.weights = {"none": "fp32"}.get(manifest.quantize, manifest.quantize)
        self.weight_bytes = weight_bytes(self.engine)
        self.token_bytes = self.engine.kv_bytes_per_token

    def kept(self, prompt: int) -> int:
        """Return the tokens that stay of a prompt."""
        policy = self.engine.manifest.policy
        units = self.engine.budgets.units(prompt, EvictionParams(density=self.density), 1)
        budget = None if units is None else units * policy.block_size
        return held_rows(policy, prompt, budget, 1)[0][0] - 1

    def sizes(self, context: int, output: int) -> Sizes:
        """Bytes of an engine that is built for this density, prompt and answer, and no larger."""
        manifest = self.engine.manifest
        only: dict[str, Any] = {"max_input": context, "max_output": output}
        if manifest.policy.evicts:
            only |= {"density": self.density, "max_density": self.density}
        limits = manifest.limits.model_copy(update=only)
        return sizes(manifest.model_copy(update={"limits": limits}))

    def run(self, prompt: Sequence[int], output: int, batch: int) -> Run:
        """Run the requests together; the steps of the last one to start have all sequences."""
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, seed=1)
        evicts = self.engine.manifest.policy.evicts
        requests = [
            Request(
                list(prompt),
                sampling,
                EvictionParams(density=self.density if evicts else None, eviction_seed=i),
            )
            for i in range(batch)
        ]
        results = self.engine.generate(requests)
        timings = [r.timings for r in results]
        policy, budget = self.engine.manifest.policy, results[0].budget_tokens
        itl = list(timings[-1].itl_s)
        rows, steps, cuts = held_rows(policy, len(prompt), budget, len(itl))
        return Run(timings[0].ttft_s, itl, float(np.mean(rows)), steps, cuts)


def held_rows(
    policy: Policy, prompt: int, budget: int | None, steps: int
) -> tuple[list[int], list[bool], bool]:
    """Return the rows that each decode step reads, which steps evict, and if the prompt is cut.

    `budget` tokens are whole units, of which a partial one counts as a whole; a row is full one
    interval beyond it. The second list is empty where no step evicts.
    """
    partial = -prompt % policy.block_size
    cuts = budget is not None and prompt + partial > budget
    held = budget - partial if cuts and budget is not None else prompt
    rows, evicts = [], []
    for _ in range(steps):
        held += 1
        rows.append(held)
        full = budget is not None and held >= budget + policy.decode_interval
        evicts.append(policy.in_decode and full)
        if evicts[-1] and budget is not None:
            held = budget
    return rows, evicts if any(evicts) else [], cuts


@dataclass
class Transformers:
    """transformers, dense, on the same float weights; a batch reads its prompts one by one."""

    peer: Peer
    name: str = "transformers, dense"
    weights: str = "fp32"
    density: float = 1.0
    weight_bytes: int | None = None
    token_bytes: int | None = None

    def run(self, prompt: Sequence[int], output: int, batch: int) -> Run:
        """Read with one call per sequence, then take steps of the whole batch."""
        ttft, itl = self.peer.generate(prompt, output, batch)
        return Run(ttft, itl, len(prompt) + output / 2)


@dataclass
class Kvpress:
    """kvpress' SnapKV on transformers: one sequence, `kept` tokens of a prompt's as ours."""

    peer: KvpressPeer
    density: float
    kept: Callable[[int], int]
    name: str = "kvpress, snapkv"
    weights: str = "fp32"
    weight_bytes: int | None = None
    token_bytes: int | None = None

    def run(self, prompt: Sequence[int], output: int, batch: int) -> Run:
        """Read, press, and go on token by token; other batches than 1 have no figures."""
        start = time.perf_counter()
        token = int(self.peer.read(prompt).argmax())
        kept = self.kept(len(prompt))
        rest = self.peer.evict("snapkv" if kept < len(prompt) else None, kept)
        ttft = time.perf_counter() - start
        itl = []
        for _ in range(output - 1):
            start = time.perf_counter()
            token = int(rest.force([token])[-1].argmax())
            itl.append(time.perf_counter() - start)
        return Run(ttft, itl, kept + output / 2)
