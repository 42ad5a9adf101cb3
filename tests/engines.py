"""Engines of tests, built once per session, and a probe that watches a run from inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from numpy.typing import NDArray

from kvsift.builder.package import Limits
from kvsift.builder.policies import resolve
from kvsift.builder.targets.ort import BuildOptions, build
from kvsift.builder.weights import default_model, open_model
from kvsift.runtime.cache import KEY, VALUE, KVCache
from kvsift.runtime.engine import Engine, Request, Update
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.prefill import Prefill
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.sequence import Sequence as Running
from kvsift.runtime.sessions import Step, StepOutput
from kvsift.runtime.slots import Slot

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Watch = Callable[[KVCache, Step, StepOutput], None]

#: Small enough to be built in a moment, large enough that slots overflow many times.
LIMITS: dict[str, Any] = {
    "max_input": 600,
    "max_output": 300,
    "max_batch": 4,
    "density": 0.2,
    "max_density": 1.0,
    "chunk": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"family": "llama", "max_position_embeddings": 1024},
    "long": {"family": "llama", "max_position_embeddings": 8192},
    "deep": {"family": "llama", "max_position_embeddings": 1 << 20, "num_hidden_layers": 12},
    "131072": {"family": "llama", "max_position_embeddings": 131072},
    **{name: {"family": name} for name in tiny.FAMILIES},
    "tied": {"family": "llama", "tied": True},
    "llama3": {
        "family": "llama",
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {
        "family": "qwen2",
        "tied": True,
        "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "linear": {"family": "mistral", "rope": {"rope_type": "linear", "factor": 4.0}},
}


class Engines:
    """Builds packages and loads engines on first use; the same arguments give the same object."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._packages: dict[str, Path] = {}
        self._engines: dict[tuple[Path, int | None], Engine] = {}

    def model(self, name: str) -> Path:
        """Return the path of a model: a key of MODELS, or 'smollm2'."""
        if name == "smollm2":
            return default_model()
        path = self.root / "models" / name
        if not path.exists():
            tiny.write_hf(path, **MODELS[name])
        return path

    def package(
        self,
        eviction: str = "nexus",
        *,
        model: str = "tiny",
        limits: dict[str, Any] | None = None,
        build_options: dict[str, Any] | None = None,
        **policy: Any,
    ) -> Path:
        """Return the directory of an engine; `policy` as in `policies.resolve`."""
        key = json.dumps([eviction, model, limits, build_options, policy], sort_keys=True)
        if key not in self._packages:
            directory = self.root / f"engine-{len(self._packages)}"
            build(
                open_model(self.model(model)),
                resolve(eviction, **policy),
                Limits(**(LIMITS | (limits or {}))),
                directory,
                BuildOptions(**(build_options or {})),
            )
            self._packages[key] = directory
        return self._packages[key]

    def __call__(
        self, eviction: str = "nexus", *, max_batch: int | None = None, **kw: Any
    ) -> Engine:
        """Return a loaded engine; see `package`."""
        key = (self.package(eviction, **kw), max_batch)
        if key not in self._engines:
            self._engines[key] = Engine(key[0], max_batch=max_batch, threads=1)
        return self._engines[key]


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """Return random token ids without the special ones."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, length)]


def request(
    tokens: int | Sequence[int] | str, max_tokens: int = 60, *, seed: int = 1, **options: Any
) -> Request:
    """Return a greedy request that ignores the end token; `tokens` a prompt or its length.

    Options of EvictionParams and SamplingParams go where they belong; the minimum budget is off.
    """
    given = prompt(tokens, seed=tokens) if isinstance(tokens, int) else tokens
    eviction: dict[str, Any] = {"min_budget_tokens": 0}
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "seed": seed}
    for name, value in options.items():
        (eviction if name in EvictionParams.__dataclass_fields__ else sampling)[name] = value
    return Request(given, SamplingParams(**sampling), EvictionParams(**eviction))


@dataclass
class Trace:
    """What a request went through.

    `kept` holds the unit ids [L, R, n] right after each eviction and `seen` the true tokens then;
    `ids` those at the end. `logits` has one row per step, `positions` the ids that the steps of
    decode used. `keys` and `values` [L, Hkv, rows, D] are the slot's rows at the end, and
    `positions_held` [L, R, rows] where they come from (-1: nowhere). `wrong_rows` counts cached
    rows that are not, bit for bit, what the graph wrote for their position; `most_rows` is the
    most that the slot has held.
    """

    slot: int = -1
    result: GenerationResult | None = None
    pieces: list[str] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)
    prompt_logits: list[Floats] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kept: list[Ints] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    ids: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    keys: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    positions_held: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    wrong_rows: int = 0
    most_rows: int = 0
    written: dict[int, list[Floats]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text as it was streamed."""
        return "".join(self.pieces)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The generated token ids."""
        assert self.result is not None
        return self.result.token_ids

    def kept_sets(self) -> list[list[int]]:
        """Return the kept ids after each eviction, sorted per row and flattened to plain lists."""
        return [np.sort(ids, axis=-1).ravel().tolist() for ids in self.kept]


def keys_and_values(cache: KVCache, slot: int) -> tuple[list[Any], list[Any]]:
    """Return what a slot holds, a list over layers of [Hkv, C, D] each."""
    held = [cache.read(slot, layer) for layer in range(len(cache.capacities))]
    return [x[KEY] for x in held], [x[VALUE] for x in held]


class Probe:
    """Stands between an engine and its session while requests run."""

    def __init__(self, engine: Engine, watch: Watch | None = None) -> None:
        self.engine = engine
        self.watch = watch
        self.traces: dict[int, Trace] = {}
        self.steps: list[Step] = []
        self._by_slot: dict[int, Running] = {}
        self._reading: Running | None = None
        self._session = engine.session
        self._evictions: dict[int, int] = {}

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """Pass on."""
        return self._session.new_cache(slots, capacity)

    def run(self, cache: KVCache, step: Step) -> StepOutput:
        """Run the step and note which rows it wrote for which positions."""
        output = self._session.run(cache, step)
        self.steps.append(step)
        if self.watch:
            self.watch(cache, step, output)
        layers, heads = len(cache.capacities), len(cache.read(0, 0)[KEY])
        batch = len(step.n_new)
        lens = step.past_lens.reshape(len(step.past_lens), batch, -1)
        lens = np.broadcast_to(lens, (layers, batch, heads))
        for b, count in enumerate(step.n_new):
            owner = self._reading if cache is self.engine.scratch else self._by_slot.get(b)
            if owner is None or count == 0:
                continue
            trace = self.traces[owner.index]
            first = lens[:, b]  # [L, Hkv]
            held = keys_and_values(cache, b)
            for i in range(int(count)):
                position = int(step.position_ids[b, i])
                assert position not in trace.written, "a position was written twice"
                trace.written[position] = [
                    a[range(heads), first[layer] + i].copy()
                    for arrays in held
                    for layer, a in enumerate(arrays)
                ]
            if cache is self.engine.scratch:
                trace.prompt_logits.append(output.logits[b].copy())
            else:
                trace.positions.append(int(step.position_ids[b, 0]))
                trace.most_rows = max(trace.most_rows, int(first.max()) + 1)
        return output

    def begin(self, sequence: Running, index: int, source: Slot | None = None) -> Prefill:
        """Begin as the engine does, with the sequence known."""
        self.traces[sequence.index] = Trace(slot=index)
        self._evictions[sequence.index] = 0
        self._reading = self._by_slot[index] = sequence
        return type(self.engine).begin(self.engine, sequence, index, source)

    def advance(self, sequence: Running, logits: Floats) -> Update:
        """Look at the slot before the engine goes on."""
        trace, slot = self.traces[sequence.index], sequence.slot
        trace.logits.append(logits.copy())
        if slot.steps > self._evictions[sequence.index]:
            self._evictions[sequence.index] = slot.steps
            trace.kept.append(slot.ids[:, :, : int(slot.units.max())].copy())
            trace.seen.append(slot.seen)
            self._compare(trace, sequence)
        update = type(self.engine).advance(self.engine, sequence, logits)
        trace.pieces.append(update.text)
        trace.result = update.result
        if update.result:
            self._compare(trace, sequence)
            del self._by_slot[slot.index]
            trace.ids = slot.ids[:, :, : int(slot.units.max())].copy()
            trace.keys, trace.values = (
                [a[:, : slot.length].copy() for a in arrays]
                for arrays in keys_and_values(self.engine.cache, slot.index)
            )
        return update

    def _compare(self, trace: Trace, sequence: Running) -> None:
        """Count the valid rows of the slot that are not what was written for their position."""
        slot, cache = sequence.slot, self.engine.cache
        size = slot.block_size
        layers, rows, most = slot.ids.shape
        units, lens = (np.broadcast_to(a, (layers, rows)) for a in (slot.units, slot.lens))
        assert ((slot.ids >= 0) == (np.arange(most) < units[..., None])).all()
        held = (slot.ids[..., None] * size + np.arange(size)).reshape(layers, rows, -1)
        held = np.where(np.arange(held.shape[-1]) < lens[..., None], held, -1)
        trace.positions_held = held[..., : slot.length]
        keys, values = keys_and_values(cache, slot.index)
        for layer, row in np.ndindex(layers, rows):
            length = int(lens[layer, row])
            heads = slice(None) if rows == 1 else slice(row, row + 1)
            positions = held[layer, row, :length].tolist()
            for array, at in ((keys[layer], layer), (values[layer], layers + layer)):
                got = array[heads, :length]
                want = np.stack([trace.written[p][at][heads] for p in positions], 1)
                trace.wrong_rows += int((~(got == want).all(-1)).sum())


@contextmanager
def probed(engine: Engine, poison: bool = False, watch: Watch | None = None) -> Iterator[Probe]:
    """Put a probe into an engine; `poison` spoils evicted and stale rows.

    `watch` sees every step after the graph has run and before rows move.
    """
    probe = Probe(engine, watch)
    changed = {"session": probe, "begin": probe.begin, "advance": probe.advance}
    session = engine.session
    try:
        engine.__dict__.update(changed)
        engine.cache.poison = engine.scratch.poison = poison
        yield probe
    finally:
        del engine.__dict__["begin"], engine.__dict__["advance"]
        engine.session = session
        engine.cache.poison = engine.scratch.poison = False


def run_and_inspect(
    engine: Engine,
    requests: Sequence[Request],
    *,
    poison: bool = False,
    watch: Watch | None = None,
) -> list[Trace]:
    """Run requests and return their traces; every row of every slot is checked on the way."""
    with probed(engine, poison, watch) as probe:
        engine.generate(requests)
    traces = [probe.traces[i] for i in range(len(requests))]
    assert sum(t.wrong_rows for t in traces) == 0
    assert all(t.result is not None for t in traces)
    return traces
