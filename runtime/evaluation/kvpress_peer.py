"""kvpress on the same weights and prompts: what its presses leave, and how the model goes on.

A prompt is read once; each press then compresses what every layer's attention saw, as its own hook
would, and the model continues from a cache of what is left. Needs the extra `parity`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsift.builder.errors import EngineError
from kvsift.builder.package import Manifest
from kvsift.runtime.bench.transformers_peer import Peer
from kvsift.runtime.evaluation.stage import Floats
from kvsift.runtime.evaluation.variants import Spec

#: Our spec of each press, told to evict at the prompt's end only, as presses do.
SHARED = {
    "snapkv": Spec("snapkv", "snapkv", scope="prefill"),
    "pyramidkv": Spec("pyramidkv", "pyramidkv", scope="prefill"),
    "tova": Spec("tova", "tova", scope="prefill"),
    "streaming": Spec("streaming", "streaming", scope="prefill"),
    "keydiff": Spec("keydiff", "keydiff", scope="prefill"),
    "knorm": Spec("knorm", "knorm", scope="prefill"),
    "expected_attention": Spec("expected_attention", "expected_attention", scope="prefill"),
    "adakv": Spec("adakv", "adakv", options={"max_head_ratio": 0}, scope="prefill"),
}


def why_absent() -> str | None:
    """Return why kvpress cannot take part, None if it can."""
    missing = [n for n in ("torch", "transformers", "kvpress") if not importlib.util.find_spec(n)]
    return f"{', '.join(missing)} not installed (pip install 'kvsift[parity]')" if missing else None


def check() -> None:
    """Raise EngineError without kvpress."""
    if absent := why_absent():
        raise EngineError(f"no comparison with kvpress: {absent}")


@dataclass
class Layer:
    """What a layer's attention saw of the prompt: torch tensors."""

    module: Any
    hidden: Any
    keys: Any
    values: Any
    kwargs: dict[str, Any]


class KvpressPeer:
    """A transformers model with the weights of an engine's model, and the presses.

    `tensors` as for `Peer`. EngineError without kvpress.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Floats], threads: int) -> None:
        check()
        import kvpress
        import torch
        import transformers

        self._torch: Any = torch
        self._new_cache: Callable[[], Any] = transformers.DynamicCache
        self._model = Peer(manifest, tensors, threads).model
        for layer in self._model.model.layers:  # presses look for it there
            layer.self_attn.rotary_emb = self._model.model.rotary_emb
        self._presses: dict[str, Callable[[], Any]] = {
            "snapkv": kvpress.SnapKVPress,
            "pyramidkv": kvpress.PyramidKVPress,
            "tova": kvpress.TOVAPress,
            "streaming": kvpress.StreamingLLMPress,
            "keydiff": kvpress.KeyDiffPress,
            "knorm": kvpress.KnormPress,
            "expected_attention": kvpress.ExpectedAttentionPress,
            "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress()),
        }
        self._layers: list[Layer] = []
        self._tokens = 0

    def read(self, tokens: Sequence[int]) -> Floats:
        """Read a prompt; return its last token's logits [V]."""
        torch, held = self._torch, self._new_cache()
        self._layers, self._tokens = [], len(tokens)

        def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            mine = held.layers[module.layer_idx]
            module.masked_key_indices = None
            self._layers.append(
                Layer(module, kwargs["hidden_states"], mine.keys, mine.values, dict(kwargs))
            )

        hooks = [
            layer.self_attn.register_forward_hook(note, with_kwargs=True)
            for layer in self._model.model.layers
        ]
        try:
            with torch.inference_mode():
                out = self._model(
                    torch.tensor([list(tokens)]), past_key_values=held, logits_to_keep=1
                )
        finally:
            for hook in hooks:
                hook.remove()
        logits: Floats = out.logits[0, -1].numpy()
        return logits

    def unmask(self) -> None:
        """Let the model forget what a press has masked."""
        for layer in self._layers:
            layer.module.masked_key_indices = None

    def evict(self, name: str | None, kept: int) -> Continuation:
        """Return what a press leaves of the prompt at `kept` tokens per head; None: everything."""
        torch, cache, single = self._torch, self._new_cache(), False
        press = None if name is None else self._presses[name]()
        if press is not None:
            # Presses cut total * (1 - ratio) down to an integer; PyramidKV's takes it as it is.
            share = (kept if hasattr(press, "beta") else kept + 0.5) / self._tokens
            press.compression_ratio = 1 - share
        lengths = set()
        self.unmask()
        for i, layer in enumerate(self._layers):
            keys, values = layer.keys, layer.values
            if press is not None:
                with torch.inference_mode():
                    keys, values = press.compress(
                        layer.module, layer.hidden, keys, values, None, layer.kwargs
                    )
                single |= layer.module.masked_key_indices is not None
            lengths.add(keys.shape[2])
            # A copy: masked keys are written over in place, and steps append.
            cache.update(keys.clone(), values.clone(), i)
        # One mask serves all layers, and fake keys suit one query: then tokens go one by one.
        return Continuation(torch, self._model, cache, self._tokens, single or len(lengths) > 1)


def greedy(rests: Sequence[Continuation], first: int, ends: set[int], most: int) -> list[list[int]]:
    """Return the greedy tokens of several caches, of which those of one length go together."""
    made: list[list[int]] = [[] for _ in rests]
    for rows in dict.fromkeys(rest.rows for rest in rests):
        at = [i for i, rest in enumerate(rests) if rest.rows == rows]
        answers = Continuation.join([rests[i] for i in at]).greedy(first, ends, most)
        for i, tokens in zip(at, answers, strict=True):
            made[i] = tokens
    return made


class Continuation:
    """A cache that goes on at the prompt's true length; `single`: one token at a time."""

    def __init__(self, torch: Any, model: Any, cache: Any, tokens: int, single: bool) -> None:
        self._torch, self._model, self._cache = torch, model, cache
        self._seen, self.single = tokens, single

    @classmethod
    def join(cls, rests: Sequence[Continuation]) -> Continuation:
        """Return the caches of equal length as one of a batch."""
        one = rests[0]
        torch, cache = one._torch, type(one._cache)()
        for i in range(len(one._cache.layers)):
            layers = [rest._cache.layers[i] for rest in rests]
            cache.update(
                torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers]), i
            )
        return cls(torch, one._model, cache, one._seen, False)

    def force(self, tokens: Sequence[int]) -> Floats:
        """Append known tokens; return their logits [S, V]."""
        parts = [[t] for t in tokens] if self.single else [list(tokens)]
        return np.concatenate([self._step(part) for part in parts])

    @property
    def rows(self) -> int:
        """Tokens per head that the cache holds."""
        return int(self._cache.layers[0].keys.shape[2])

    def greedy(self, first: int, ends: set[int], most: int) -> list[list[int]]:
        """Return the greedy tokens of each sequence from `first` on, to an end or `most` tokens."""
        torch = self._torch
        made = [[first] for _ in range(self._cache.layers[0].keys.shape[0])]
        while any(len(m) < most and m[-1] not in ends for m in made):
            logits = self._run(torch.tensor([m[-1:] for m in made]))
            for tokens, row in zip(made, logits[:, -1].argmax(-1), strict=True):
                if len(tokens) < most and tokens[-1] not in ends:
                    tokens.append(int(row))
        return made

    def _step(self, tokens: list[int]) -> Floats:
        logits: Floats = self._run(self._torch.tensor([tokens]))[0].numpy()
        return logits

    def _run(self, ids: Any) -> Any:
        """Append ids [B, S]; return logits [B, S, V]."""
        torch = self._torch
        batch, size = ids.shape
        positions = torch.arange(self._seen, self._seen + size)[None].expand(batch, size)
        self._seen += size
        with torch.inference_mode():
            out = self._model(ids, past_key_values=self._cache, position_ids=positions)
        return out.logits
