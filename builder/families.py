"""Model families: what a config.json or GGUF header says of a decoder, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvsift.builder.errors import ModelError
from kvsift.builder.rope import Rope, rope_from_hf

__all__ = ["FAMILIES", "Family", "ModelConfig", "Rope", "from_hf_config", "tensor_shapes"]

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
FAMILIES: tuple[str, ...] = get_args(Family)

#: What a config.json of a family means when a key is absent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
}
_CAUSAL_LM = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}
_REFUSED_KEYS = {
    "vision_config": "multimodal models are not supported",
    "audio_config": "multimodal models are not supported",
    "text_config": "multimodal models are not supported",
    "num_experts": "mixture-of-experts models are not supported",
    "num_local_experts": "mixture-of-experts models are not supported",
    "n_routed_experts": "mixture-of-experts models are not supported",
    "quantization_config": "quantized checkpoints are not supported; use the original fp16 or "
    "bf16 weights, or a GGUF file",
    "attention_bias": "biases on all attention projections are not supported",
    "mlp_bias": "biases in the MLP are not supported",
}


class ModelConfig(BaseModel):
    """A decoder-only transformer as the builder sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    family: Family
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_eps: float = Field(gt=0)
    max_positions: int = Field(gt=0)
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope: Rope = Rope()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")
        return self


def make_config(**fields: Any) -> ModelConfig:
    """Return the checked ModelConfig; ModelError names the value that is wrong."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where} is {first['input']!r}: {first['msg']}" if where else first["msg"]
        raise ModelError(f"model config: {what}") from None


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every weight by its Hugging Face name with its shape ([out, in] for matrices).

    `lm_head.weight` is absent when the embeddings are tied.
    """
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size)
    }
    for i in range(c.num_layers):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        shapes[f"{layer}.input_layernorm.weight"] = (c.hidden_size,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{attn}.{name}_proj.weight"] = (rows, c.hidden_size)
            if c.qkv_bias:
                shapes[f"{attn}.{name}_proj.bias"] = (rows,)
        if c.qk_norm:
            shapes[f"{attn}.q_norm.weight"] = (c.head_dim,)
            shapes[f"{attn}.k_norm.weight"] = (c.head_dim,)
        shapes[f"{attn}.o_proj.weight"] = (c.hidden_size, q)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (c.hidden_size,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[f"{layer}.mlp.up_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[f"{layer}.mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tied_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def from_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a parsed config.json.

    Absent keys take the family's default. ModelError for another family and for whatever the
    decoder cannot express (sliding windows in use, experts, unknown rope, other activations).
    """
    family = _family(config)
    for key, why in _REFUSED_KEYS.items():
        if config.get(key):
            raise ModelError(f"config.json has {key} = {_short(config[key])}: {why}")
    merged = {**_DEFAULTS[family], **config}
    act = merged.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {act!r} is not supported; it must be 'silu'")
    positions = _int(merged, "max_position_embeddings")
    _refuse_sliding(family, merged, positions)
    hidden, heads = _int(merged, "hidden_size"), _int(merged, "num_attention_heads")
    kv_heads, head_dim = merged.get("num_key_value_heads"), merged.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ModelError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is "
            "no head_dim"
        )
    rope = rope_from_hf(merged, 10000.0, positions)
    eos = merged.get("eos_token_id")
    return make_config(
        family=family,
        vocab_size=_int(merged, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(merged, "intermediate_size"),
        num_layers=_int(merged, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        rms_eps=merged.get("rms_norm_eps", 1e-6),
        max_positions=rope.max_positions(positions),
        tied_embeddings=merged.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=rope,
        bos_token_id=merged.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"architectures is {_short(architectures)}; it must be a list of names")
    named = [_CAUSAL_LM.get(a) for a in architectures]
    if architectures and None in named:
        raise ModelError(
            f"architecture {_short(architectures)} is not supported; "
            f"known: {', '.join(sorted(_CAUSAL_LM))}"
        )
    family = config.get("model_type") or (named[0] if named else None)
    if family not in FAMILIES:
        raise ModelError(
            f"model_type {family!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
        )
    if named and named[0] != family:
        raise ModelError(f"model_type {family!r} and architecture {architectures[0]!r} disagree")
    return str(family)


def _refuse_sliding(family: str, config: Mapping[str, Any], positions: int) -> None:
    """Raise if any layer attends to fewer tokens than the model's context."""
    types = config.get("layer_types") or []
    window = config.get("sliding_window")
    if family in ("qwen2", "qwen3"):
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        if not types and first >= _int(config, "num_hidden_layers"):
            window = None
    other = sorted({str(t) for t in types} - {"full_attention"})
    if other:
        raise ModelError(f"layer_types has {', '.join(other)}; only full_attention is supported")
    if family != "llama" and not types and window is not None and window < positions:
        raise ModelError(
            f"sliding_window {window} is in use and below max_position_embeddings {positions}; "
            f"lower max_position_embeddings to {window} in config.json to use the model up to there"
        )


def _int(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json has {key} = {value!r}; it must be a positive integer")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
