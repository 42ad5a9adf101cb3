"""transformers on the same weights, in the fastest of its settings; torch is optional."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import EngineError
from kvsift.builder.package import Manifest

Floats = NDArray[np.float32]
NEEDED = ("torch", "transformers")
CACHES = ("DynamicCache", "StaticCache")
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def why_absent() -> str | None:
    """Return why transformers cannot take part, None if it can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install 'kvsift[parity]')"
    return None


def versions() -> dict[str, str]:
    """Return the versions of torch and transformers, as far as they are installed."""
    return {n: metadata.version(n) for n in NEEDED if importlib.util.find_spec(n)}


class Peer:
    """A float32 causal LM of transformers (sdpa attention) with the weights of a package's model.

    `tensors` holds every weight under its Hugging Face name.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Floats], threads: int) -> None:
        import torch
        import transformers

        c = manifest.model
        if c.rope.kind != "default" or c.rope.freq_divisors:
            raise EngineError(f"the transformers peer knows no {c.rope.kind!r} rope; use --no-peer")
        torch.set_num_threads(threads)
        self._torch: Any = torch
        self._transformers: Any = transformers
        config_class = getattr(transformers, f"{CLASSES[c.family]}Config")
        self._config = config_class(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_eps,
            max_position_embeddings=c.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            tie_word_embeddings=c.tied_embeddings,
            attn_implementation="sdpa",
            **({"sliding_window": None} if c.family == "mistral" else {}),
        )
        with torch.device("meta"):
            model = getattr(transformers, f"{CLASSES[c.family]}ForCausalLM")(self._config)
        self._model = model.to_empty(device="cpu").eval()
        weights = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        self._model.load_state_dict(weights, strict=False, assign=True)
        self._model.tie_weights()
        # Not a parameter, so the meta device has left it without values.
        rotary = self._model.model.rotary_emb
        rotary.inv_freq = torch.from_numpy(c.rope.inv_freq(c.head_dim))
        rotary.original_inv_freq = rotary.inv_freq
        left = [n for n, p in self._model.named_parameters() if p.is_meta]
        if left:
            raise EngineError(f"transformers has weights that the model lacks: {left[0]}")

    @property
    def model(self) -> Any:
        """The transformers model itself."""
        return self._model

    def steps(self, keys: Sequence[Floats], values: Sequence[Floats], rows: int, kind: str) -> Any:
        """Return decode steps over caches `keys[layer]`, `values[layer]` [B, Hkv, >= rows - 1, D].

        `kind` is one of CACHES.
        """
        return PeerSteps(self._torch, self._transformers, self._model, (keys, values), rows, kind)

    def generate(self, prompt: Sequence[int], output: int, batch: int) -> tuple[float, list[float]]:
        """Return the seconds to the first token and between tokens of `batch` greedy answers.

        The prompt is read once, in one call, and its cache repeated for the batch: the time of
        the first sequence, as of an engine that reads one prompt after the other.
        """
        torch = self._torch
        cache = self._transformers.DynamicCache()
        itl = []
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model(torch.tensor([list(prompt)]), past_key_values=cache, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            ttft = time.perf_counter() - start
            cache.batch_repeat_interleave(batch)
            ids = ids.expand(batch, 1)
            for _ in range(output - 1):
                start = time.perf_counter()
                out = self._model(ids, past_key_values=cache, use_cache=True)
                ids = out.logits[:, -1].argmax(-1, keepdim=True)
                itl.append(time.perf_counter() - start)
        return ttft, itl

    def prefill(self, prompt: list[int], chunk: int) -> tuple[float, Floats]:
        """Return the seconds of reading the prompt in chunks, and the last logits [V]."""
        torch = self._torch
        ids = torch.tensor([prompt])
        cache = self._transformers.DynamicCache()
        start = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(prompt), chunk):
                out = self._model(
                    ids[:, at : at + chunk],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        logits: Floats = out.logits[0, -1].numpy()
        return time.perf_counter() - start, logits


class PeerSteps:
    """The same decode step again and again, appending token number `rows`, as in `DenseSteps`."""

    def __init__(
        self,
        torch: Any,
        transformers: Any,
        model: Any,
        arrays: tuple[Sequence[Floats], Sequence[Floats]],
        rows: int,
        kind: str,
    ) -> None:
        self._torch, self._model = torch, model
        self._rows, self._kind = rows, kind
        self._at = torch.tensor([rows - 1])
        self._cache = (
            transformers.DynamicCache()
            if kind == "DynamicCache"
            else transformers.StaticCache(model.config, max_cache_len=rows)
        )
        position = {"cache_position": torch.arange(rows - 1)}
        for layer, (key, value) in enumerate(zip(*arrays, strict=True)):
            held = (torch.from_numpy(a[:, :, : rows - 1]).contiguous() for a in (key, value))
            self._cache.update(*held, layer, position)
        self._ids = torch.zeros((arrays[0][0].shape[0], 1), dtype=torch.int64)

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Set the token that each sequence appends."""
        self._ids[:, 0] = self._torch.tensor(list(tokens))

    def logits(self) -> Floats:
        """Run the step, take it back and return its logits [B, V]."""
        with self._torch.inference_mode():
            out = self._model(
                self._ids,
                past_key_values=self._cache,
                cache_position=self._at,
                position_ids=self._at[None].expand(len(self._ids), 1),
                use_cache=True,
                logits_to_keep=1,
            )
        if self._kind == "DynamicCache":
            self._cache.crop(self._rows - 1)
        made: Floats = out.logits[:, -1].numpy()
        return made

    def step(self) -> None:
        """Run the step and choose the next tokens greedily."""
        self.logits().argmax(axis=-1)


def fastest(candidates: dict[str, Callable[[], float]]) -> str:
    """Return the name whose function returns the least seconds; each is called once."""
    seconds = {name: run() for name, run in candidates.items()}
    return min(seconds, key=seconds.__getitem__)
