"""Makes tiny random models of every family, as Hugging Face directories and GGUF files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvsift.builder.families import ModelConfig, from_hf_config, tensor_shapes
from kvsift.builder.weights.gguf import gguf_name

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
Kind = gguf.GGMLQuantizationType
Weights = dict[str, NDArray[np.float32]]


def hf_config(
    family: str, *, tied: bool = False, rope: Mapping[str, Any] | None = None, **overrides: Any
) -> dict[str, Any]:
    """Return a config.json: hidden 64, 2 layers, 4 heads over 2 KV heads of 16, vocabulary 512."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[family]],
        "model_type": family,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if rope is not None:
        config["rope_scaling"] = dict(rope)
    return config | overrides


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Return random weights by name whose logits vary with the whole context."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            weights[name] = 1 + np.float32(0.1) * noise
            if "q_norm" in name:
                weights[name] *= 3
            if name == "model.norm.weight" and config.tied_embeddings:
                # With one sign, a tied head would find the last token's own embedding and repeat.
                weights[name] *= rng.choice(np.array([-1, 1], dtype=np.float32), shape)
        elif name.endswith(".bias"):
            weights[name] = np.float32(0.5) * noise
        elif "embed_tokens" in name:
            weights[name] = noise * np.float32(0.3 if config.tied_embeddings else 1.0)
        else:
            # Attention logits of std 3 pick few keys, so that an evicted key is missed.
            gain = 3 if "q_proj" in name or name == "lm_head.weight" else 1
            weights[name] = noise * np.float32(gain / np.sqrt(shape[-1]))
    return weights


def tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Return a byte-level BPE: 3 special tokens, 256 bytes, then merges of letter pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet]
    letters = "etaoinshrdlucmfwygpb"
    pairs = itertools.chain(((" ", x) for x in letters), itertools.product(letters, letters))
    merges = [("\u0120" if a == " " else a, b) for a, b in pairs][: vocab_size - len(tokens)]
    tokens += [a + b for a, b in merges]
    if len(tokens) != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is outside 259..679")
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return made


def write_hf(
    directory: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    tied: bool = False,
    rope: Mapping[str, Any] | None = None,
    shards: int = 1,
    dtype: str = "float32",
    weights: Weights | None = None,
    **overrides: Any,
) -> Path:
    """Write a model directory (config, safetensors, tokenizer) and return it.

    `rope` is the rope_scaling object; `dtype` float32, float16 or bfloat16; `overrides` replace
    keys of config.json; `weights` replaces the random ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = hf_config(family, tied=tied, rope=rope, **overrides)
    _write_json(directory / "config.json", config)
    if weights is None:
        weights = random_weights(from_hf_config(config), seed)
    stored: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(value.astype(np.dtype(getattr(ml_dtypes, dtype, dtype))))
        for name, value in weights.items()
    }
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
    else:
        where = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
                 for i, n in enumerate(stored)}  # fmt: skip
        for file in sorted(set(where.values())):
            save_file({n: v for n, v in stored.items() if where[n] == file}, directory / file)
        _write_json(directory / "model.safetensors.index.json", {"weight_map": where})
    tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    special = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]}
    _write_json(
        directory / "tokenizer_config.json",
        {
            **special,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    return directory


def write_gguf(
    path: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    tied: bool = False,
    quant: Kind | Callable[[NDArray[np.float32]], Kind] = Kind.F32,
    weights: Weights | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    **overrides: Any,
) -> Path:
    """Write the model that `write_hf` makes of the same arguments as a GGUF file; return its path.

    `quant` is the type of matrices, or gives it for each; `metadata` adds keys (str, int, float,
    bool or a list of one of these; a value None drops the key); `extra` adds tensors under GGUF
    names.
    """
    raw = hf_config(family, tied=tied, **overrides)
    config = from_hf_config(raw)
    weights = random_weights(config, seed) if weights is None else weights
    architecture = "llama" if family == "mistral" else family
    keys = _gguf_keys(config, architecture) | dict(metadata or {})
    writer = gguf.GGUFWriter(path, str(keys.get("general.architecture", architecture)))
    for key, value in keys.items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    for name, value in weights.items():
        if architecture == "llama" and ".q_proj.weight" in name:
            value = permute(value, config.num_heads)
        elif architecture == "llama" and ".k_proj.weight" in name:
            value = permute(value, config.num_kv_heads)
        kind = Kind.F32 if value.ndim != 2 else quant(value) if callable(quant) else quant
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Interleave the rotary halves of each head, row by row, as GGUF's llama files have them."""
    dim = rows.shape[0] // heads
    order = [h * dim + s * dim // 2 + i for h in range(heads) for i in range(dim // 2)
             for s in (0, 1)]  # fmt: skip
    return np.ascontiguousarray(rows[order])


def _gguf_keys(config: ModelConfig, arch: str) -> dict[str, Any]:
    vocabulary = tokenizer(config.vocab_size)
    model = json.loads(vocabulary.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_eps,
        f"{arch}.rope.freq_base": config.rope.theta,
        f"{arch}.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
