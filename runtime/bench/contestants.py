"""What a benchmark run times: an engine with a density, or what a user might take instead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

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
    `evicts`: whether each step between tokens evicts, empty where none ever does.
    """

    ttft_s: float
    itl_s: list[float]
    rows: float | None = None
    evicts: list[bool] = field(default_factory=list)


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

    @property
    def sizes(self) -> Sizes:
        """Bytes of an engine that is built for this density and no larger one."""
        manifest = self.engine.manifest
        if not manifest.policy.evicts:
            return sizes(manifest)
        only = {"density": self.density, "max_density": self.density}
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
        budget = results[0].budget_tokens
        start = len(prompt) if budget is None else min(budget, len(prompt))
        rows = float(np.mean([(start + r.kept_tokens) / 2 for r in results]))
        itl = list(results[-1].timings.itl_s)
        return Run(results[0].timings.ttft_s, itl, rows, self._evictions(len(prompt), len(itl)))

    def _evictions(self, prompt: int, steps: int) -> list[bool]:
        """Return which decode steps evict.

        A row is full one interval beyond its budget, in which a partial unit counts as a whole.
        """
        policy = self.engine.manifest.policy
        if not policy.in_decode or self.density >= 1:
            return []
        partial, interval = prompt % policy.block_size, policy.decode_interval
        return [i >= interval and (partial + i) % interval == 0 for i in range(1, steps + 1)]


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
    """kvpress' SnapKV on transformers: one sequence, as many tokens kept as ours."""

    peer: KvpressPeer
    density: float
    name: str = "kvpress, snapkv"
    weights: str = "fp32"
    weight_bytes: int | None = None
    token_bytes: int | None = None

    def run(self, prompt: Sequence[int], output: int, batch: int) -> Run:
        """Read, press, and go on token by token; other batches than 1 have no figures."""
        start = time.perf_counter()
        token = int(self.peer.read(prompt).argmax())
        kept = max(1, int(self.density * len(prompt)))
        rest = self.peer.evict("snapkv", kept)
        ttft = time.perf_counter() - start
        itl = []
        for _ in range(output - 1):
            start = time.perf_counter()
            token = int(rest.force([token])[-1].argmax())
            itl.append(time.perf_counter() - start)
        return Run(ttft, itl, kept + output / 2)
