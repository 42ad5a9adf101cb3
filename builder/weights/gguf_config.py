"""The model config in a GGUF header."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from kvsift.builder.errors import ModelError
from kvsift.builder.families import ModelConfig, make_config
from kvsift.builder.rope import Rope, make_rope

#: Mistral files call themselves llama; the graph is the same.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
T = TypeVar("T")

#: Keys of variants that the decoder cannot express, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
    "pooling_type": (0,),
}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Metadata:
    """Typed access to the key-value pairs of a GGUF header."""

    def __init__(self, reader: GGUFReader, file: str) -> None:
        """Keep the pairs; ModelError for an architecture or a file layout that is unsupported."""
        self.file = file
        self._fields = reader.fields
        self.architecture = self.need("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{file} has architecture {self.architecture!r}; known: {', '.join(ARCHITECTURES)}"
            )
        if self.get("split.count", int, 1) > 1:
            raise ModelError(
                f"{file} is one of {self.get('split.count', int, 1)} parts; join them with "
                "llama-gguf-split --merge"
            )

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the value of `key`, or None if absent; ModelError if it is of another type."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, int) and kind is float:
            value = float(value)
        if not isinstance(value, kind):
            raise ModelError(f"{self.file}: {key} is {value!r:.60}; {kind.__name__} expected")
        return value

    def get(self, key: str, kind: type[T], default: T) -> T:
        """Return the value of `key`, or the default."""
        value = self.find(key, kind)
        return default if value is None else value

    def need(self, key: str, kind: type[T]) -> T:
        """Return the value of `key`; ModelError if absent."""
        value = self.find(key, kind)
        if value is None:
            raise ModelError(f"{self.file} has no {key} in its header; the file is incomplete")
        return value

    def arch(self, key: str) -> str:
        """Return the full name of a key that carries the architecture's prefix."""
        return f"{self.architecture}.{key}"

    def raw(self, key: str) -> Any:
        """Return the value of `key` whatever its type, or None."""
        field = self._fields.get(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.file}: {key} is no valid UTF-8 ({error.reason})") from None


def config_from_gguf(
    meta: Metadata, vocab_size: int, tied: bool, freq_divisors: NDArray[np.float32] | None
) -> ModelConfig:
    """Return the model config of a GGUF header.

    `freq_divisors` float32 [head_dim / 2] is the tensor rope_freqs.weight, if there is one.
    ModelError for a missing or wrong value and for variants that are not supported.
    """
    positions = meta.need(meta.arch("context_length"), int)
    _refuse_variants(meta, positions)
    heads = meta.need(meta.arch("attention.head_count"), int)
    hidden = meta.need(meta.arch("embedding_length"), int)
    head_dim = meta.get(meta.arch("attention.key_length"), int, hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        value = meta.get(meta.arch(key), int, head_dim)
        if value != head_dim:
            raise ModelError(f"{meta.file}: {meta.arch(key)} is {value}; it must be {head_dim}")
    rope = _rope(meta, positions, head_dim, freq_divisors)
    ends = [meta.find(f"tokenizer.ggml.{key}", int) for key in _END_TOKENS]
    return make_config(
        family=meta.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=meta.need(meta.arch("feed_forward_length"), int),
        num_layers=meta.need(meta.arch("block_count"), int),
        num_heads=heads,
        num_kv_heads=meta.get(meta.arch("attention.head_count_kv"), int, heads),
        head_dim=head_dim,
        rms_eps=_short_float(meta.need(meta.arch("attention.layer_norm_rms_epsilon"), float)),
        max_positions=rope.max_positions(positions),
        tied_embeddings=tied,
        qkv_bias=meta.architecture == "qwen2",
        qk_norm=meta.architecture == "qwen3",
        rope=rope,
        bos_token_id=meta.find("tokenizer.ggml.bos_token_id", int),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def _refuse_variants(meta: Metadata, positions: int) -> None:
    for key, neutral in _NEUTRAL.items():
        value = meta.raw(meta.arch(key))
        if value is None or value in neutral:
            continue
        if key == "attention.sliding_window" and isinstance(value, int) and value >= positions:
            continue
        raise ModelError(
            f"{meta.file}: {meta.arch(key)} = {value!r:.60} is not supported; "
            f"it must be absent or {neutral[0]!r}"
        )


def _rope(
    meta: Metadata, positions: int, head_dim: int, divisors: NDArray[np.float32] | None
) -> Rope:
    kind = meta.get(meta.arch("rope.scaling.type"), str, "none")
    factor = meta.find(meta.arch("rope.scaling.factor"), float)
    if factor is None:
        # The key of files from 2023, which knew linear scaling only.
        factor = meta.find(meta.arch("rope.scale_linear"), float)
        if factor is not None and kind == "none" and factor != 1.0:
            kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{meta.file}: rope scaling {kind!r} is not supported; known: none, linear, yarn"
        )
    fields: dict[str, Any] = {
        "kind": "default" if kind == "none" else kind,
        "theta": meta.get(meta.arch("rope.freq_base"), float, 10000.0),
    }
    if kind != "none":
        if factor is None:
            raise ModelError(f"{meta.file}: rope scaling {kind!r} has no factor")
        fields["factor"] = factor
    if kind == "yarn":
        key = meta.arch("rope.scaling.original_context_length")
        fields["original_max_positions"] = meta.get(key, int, positions)
        for name in ("beta_fast", "beta_slow"):
            beta = meta.find(meta.arch(f"rope.scaling.yarn_{name}"), float)
            if beta is not None:
                fields[name] = beta
    if divisors is not None:
        if divisors.shape != (head_dim // 2,) or not np.all(divisors > 0):
            raise ModelError(
                f"{meta.file}: rope_freqs.weight must be {head_dim // 2} positive numbers"
            )
        fields["freq_divisors"] = tuple(float(value) for value in divisors)
    return make_rope(fields)


def _short_float(value: float) -> float:
    """Return the shortest decimal with the same float32 value: 1e-05, not 9.99999974738e-06."""
    short = float(str(np.float32(value)))
    return short if math.isfinite(short) else value
