"""The ONNX Runtime session: caches stay in place, only small inputs change between steps."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvsift.builder import names
from kvsift.builder.errors import EngineError
from kvsift.builder.package import GRAPH, Manifest
from kvsift.runtime.cache import KVCache
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.hugepages import huge_pages
from kvsift.runtime.selftest import attention_error
from kvsift.runtime.sessions import Evictions, Kept, Step, StepOutput

try:
    import onnxruntime as ort
except ImportError:  # engines can be built without it
    ort = None

#: Causal attention over a partly filled cache is silently wrong in older versions.
MIN_ORT = (1, 28)


#: Largest difference from numpy that the self-test allows.
MAX_ATTENTION_ERROR = 1e-3


class OrtSession:
    """Runs a package's graph on the CPU.

    `threads` is ONNX Runtime's intra-op thread count, None for its own choice; `profile` how the
    file begins that `end_profile` writes. Raises EngineError when ONNX Runtime is missing, too old
    or refuses the graph.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        threads: int | None = None,
        profile: Path | None = None,
    ) -> None:
        if ort is None:
            raise EngineError(
                f"onnxruntime is not installed for Python {platform.python_version()}; it has "
                f"wheels for 3.11 and later: pip install 'onnxruntime>={MIN_ORT[0]}.{MIN_ORT[1]}'"
            )
        found = tuple(int(part) for part in ort.__version__.split(".")[:2])
        if found < MIN_ORT:
            raise EngineError(
                f"onnxruntime {ort.__version__} computes wrong attention; "
                f"pip install 'onnxruntime>={MIN_ORT[0]}.{MIN_ORT[1]}'"
            )
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.inter_op_num_threads = 1
        if threads:
            options.intra_op_num_threads = threads
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        try:
            with huge_pages():
                self._session = ort.InferenceSession(
                    str(directory / GRAPH), options, providers=["CPUExecutionProvider"]
                )
        except Exception as error:
            raise EngineError(
                f"ONNX Runtime {ort.__version__} refuses {directory / GRAPH}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        if (off := attention_error(manifest.attention)) > MAX_ATTENTION_ERROR:
            raise EngineError(
                f"onnxruntime {ort.__version__} computes wrong {manifest.attention} attention here "
                f"(off by {off:.1e}); run kvsift doctor, and try another version"
            )
        self._manifest = manifest
        self._inputs = {spec.name for spec in manifest.inputs}
        self._rows = manifest.model.num_kv_heads if manifest.policy.per_head else 1
        self._bindings: WeakKeyDictionary[HostCache, dict[tuple[int, ...], Any]] = (
            WeakKeyDictionary()
        )
        self._empty = self._no_evictions()

    def end_profile(self) -> Path:
        """Stop profiling and return the file of ONNX Runtime's events, a JSON list."""
        return Path(self._session.end_profiling())

    def new_cache(self, slots: int, capacity: int) -> HostCache:
        """Return an empty host cache."""
        return HostCache(self._manifest, slots, capacity)

    def run(self, cache: KVCache, step: Step) -> StepOutput:
        """Run one step in place on the first B slots of `cache`."""
        assert isinstance(cache, HostCache), "a cache of another session"
        batch, size = step.input_ids.shape
        binding = self._binding(cache, batch)
        for name, array in (
            (names.INPUT_IDS, step.input_ids),
            (names.POSITION_IDS, step.position_ids),
            (names.N_NEW, step.n_new),
            (names.PAST_LENS, step.past_lens),
        ):
            binding.bind_ortvalue_input(name, _shared(array))
        vocab = self._manifest.model.vocab_size
        shape = (batch, size, vocab) if self._manifest.all_logits else (batch, vocab)
        logits = np.empty(shape, np.float32)
        binding.bind_ortvalue_output(names.LOGITS, _shared(logits))
        kept = self._bind_evictions(binding, step.evictions)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"the step failed: {str(error).splitlines()[0]}") from error
        return StepOutput(logits, kept)

    def release(self) -> None:
        """Let go of the graph and of the caches' memory."""
        self._bindings.clear()
        self._session = None

    def _binding(self, cache: HostCache, batch: int) -> Any:
        """Return the binding of the first `batch` slots, whose cache memory is bound once."""
        known = self._bindings.setdefault(cache, {})
        key = (batch, *cache.capacities)
        if key not in known:
            known.clear()
            binding = self._session.io_binding()
            folded = self._manifest.policy.layout == "head"
            pairs = [(names.past_key, names.present_key, cache.keys, folded)]
            pairs.append((names.past_value, names.present_value, cache.values, folded))
            for name, arrays in cache.states.items():
                ends = (partial(names.state_in, name), partial(names.state_out, name))
                pairs.append((*ends, arrays, False))
            for before, after, arrays, fold in pairs:
                for layer, array in enumerate(arrays):
                    part = array[:batch]
                    shared = _shared(part.reshape(-1, 1, *part.shape[2:]) if fold else part)
                    binding.bind_ortvalue_input(before(layer), shared)
                    binding.bind_ortvalue_output(after(layer), shared)
            if cache.ring is not None:
                shared = _shared(cache.ring[:batch])
                binding.bind_ortvalue_input(names.Q_RING_IN, shared)
                binding.bind_ortvalue_output(names.Q_RING_OUT, shared)
            known[key] = binding
        return known[key]

    def _bind_evictions(self, binding: Any, evictions: Evictions | None) -> Kept | None:
        if not self._manifest.policy.evicts:
            return None
        x = evictions or self._empty
        for name, array in x.feed().items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, _shared(array))
        kept = Kept(
            np.full(x.unit_ids.shape, -1, np.int32),
            np.zeros(x.budget.shape, np.int32),
            np.zeros(x.budget.shape, np.float32),
        )
        binding.bind_ortvalue_output(names.KEEP, _shared(kept.keep))
        binding.bind_ortvalue_output(names.KEEP_LEN, _shared(kept.keep_len))
        binding.bind_ortvalue_output(names.COVERAGE, _shared(kept.coverage))
        if self._manifest.trace_scores:
            kept.scores = np.zeros(x.unit_ids.shape, np.float32)
            binding.bind_ortvalue_output(names.SCORES, _shared(kept.scores))
        return kept if evictions else None

    def _no_evictions(self) -> Evictions:
        """Return the inputs of a step in which nothing is evicted (E = 0)."""
        layers = self._manifest.model.num_layers

        def zeros(*shape: int) -> NDArray[np.int32]:
            return np.zeros(shape, np.int32)

        return Evictions(
            slots=zeros(0),
            tokens_seen=zeros(0),
            unit_ids=zeros(layers, 0, self._rows, 0),
            budget=zeros(layers, 0, self._rows),
            pin_spans=zeros(0, 1, 2),
            seed=zeros(0, 2),
            step=zeros(0),
            prompt_end=zeros(0),
        )


def _shared(array: NDArray[Any]) -> ort.OrtValue:
    """Return an OrtValue on the array's own memory, which must be contiguous."""
    assert array.flags.c_contiguous
    return ort.OrtValue.ortvalue_from_numpy(array)
