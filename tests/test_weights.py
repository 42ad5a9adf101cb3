"""Weight sources: HF directories and GGUF files give the same tensors, and say what is broken."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import FAMILIES, hf_config, permute, random_weights, write_gguf, write_hf

from kvsift.builder.errors import ModelError
from kvsift.builder.families import from_hf_config, tensor_shapes
from kvsift.builder.weights import hf, open_model
from kvsift.builder.weights.gguf import unpermute

KIND = gguf.GGMLQuantizationType
NORM = "model.layers.1.input_layernorm.weight"


def damaged(family: str = "llama", **tensors: Any) -> dict[str, Any]:
    """Random weights with some replaced (`__` stands for a dot), or dropped if None."""
    weights = random_weights(from_hf_config(hf_config(family)))
    for name, value in tensors.items():
        weights[name.replace("__", ".")] = value
    return {name: value for name, value in weights.items() if value is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_directory_and_gguf_hold_the_same_model(family: str, tied: bool, tmp_path: Path) -> None:
    hf = open_model(write_hf(tmp_path / "hf", family, 3, tied=tied, shards=1 + tied))
    made = open_model(write_gguf(tmp_path / "model.gguf", family, 3, tied=tied))
    same = {"family": "llama"} if family == "mistral" else {}
    assert hf.config.model_copy(update=same) == made.config
    written = random_weights(hf.config, 3)
    assert written.keys() == tensor_shapes(hf.config).keys()
    for name, value in written.items():
        np.testing.assert_array_equal(hf.tensor(name), value)
        np.testing.assert_array_equal(made.tensor(name), value)
        assert made.tensor(name).dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_widened(dtype: str, tmp_path: Path) -> None:
    source = open_model(write_hf(tmp_path, dtype=dtype))
    eps = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for name, value in random_weights(source.config).items():
        np.testing.assert_allclose(source.tensor(name), value, rtol=eps, atol=1e-6)
        assert source.tensor(name).dtype == np.float32


@pytest.mark.parametrize(
    ("kind", "error"),
    [(KIND.F16, 1e-3), (KIND.BF16, 1e-2), (KIND.Q8_0, 0.02), (KIND.Q4_0, 0.3), (KIND.Q4_1, 0.2)],
)
def test_quantized_matrices_are_near_the_originals(
    kind: gguf.GGMLQuantizationType, error: float, tmp_path: Path
) -> None:
    source = open_model(write_gguf(tmp_path / "m.gguf", quant=kind))
    for name, value in random_weights(source.config).items():
        assert np.abs(source.tensor(name) - value).max() <= error * np.abs(value).max()


@pytest.mark.parametrize("kind", [KIND.Q4_K, KIND.Q6_K])
def test_k_quants_are_dequantized_by_rows(
    kind: gguf.GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsift.builder.weights.gguf._CHUNK_ROWS", 7)
    rng = np.random.default_rng(0)
    block, width = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (50, 256 // block * width), dtype=np.uint8)
    # The block scales are fp16: small exponents keep random bytes finite.
    scales = (0, 2) if kind is KIND.Q4_K else (208,)
    for at in scales:
        raw[:, at : at + 2] = rng.normal(0, 0.01, (50, 1)).astype(np.float16).view(np.uint8)
    real = gguf.quants.quantize

    def fake(data: np.ndarray, qtype: gguf.GGMLQuantizationType) -> np.ndarray:
        return raw if qtype == kind and data.shape == (50, 256) else real(data, KIND.F32)

    monkeypatch.setattr(gguf.quants, "quantize", fake)
    sizes = {"hidden_size": 256, "intermediate_size": 50}
    names = {n for n, s in tensor_shapes(from_hf_config(hf_config("llama", **sizes))).items()
             if s == (50, 256)}  # fmt: skip
    path = tmp_path / "m.gguf"
    write_gguf(path, quant=lambda value: kind if value.shape == (50, 256) else KIND.F32, **sizes)
    source = open_model(path)
    for name in names:
        np.testing.assert_array_equal(source.tensor(name), gguf.dequantize(raw, kind))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("shape", [(64, 5), (64,)])
def test_unpermute_undoes_the_llama_conversion(heads: int, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    moved = permute(rows, heads)
    assert not np.array_equal(moved, rows)
    np.testing.assert_array_equal(unpermute(moved, heads), rows)


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert open_model(tmp_path).config.eos_token_ids == (7, 1)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("eos_token_id")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").unlink()
    assert open_model(tmp_path).config.eos_token_ids == (2,)


def test_gguf_header_gives_rope_and_end_tokens(tmp_path: Path) -> None:
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 512,
        "tokenizer.ggml.eot_token_id": 5,
    }
    config = open_model(write_gguf(tmp_path / "a.gguf", "qwen2", metadata=yarn)).config
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    wanted = from_hf_config(hf_config("qwen2", rope=rope, eos_token_id=[1, 5]))
    assert config == wanted
    assert config.max_positions == 2048
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    config = open_model(write_gguf(tmp_path / "b.gguf", metadata=linear)).config
    assert (config.rope.kind, config.rope.factor) == ("linear", 2.0)


def test_rope_freqs_tensor_equals_llama3_scaling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    want = from_hf_config(hf_config("llama", rope=rope)).rope.inv_freq(16)
    divisors = from_hf_config(hf_config("llama")).rope.inv_freq(16) / want
    assert len(set(divisors.round(3))) > 2
    path = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    np.testing.assert_allclose(open_model(path).config.rope.inv_freq(16), want, rtol=1e-6)


HF_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"weights": damaged(**{NORM.replace(".", "__"): None})}, f"lacks tensor {NORM}"),
    (
        {"weights": damaged(**{NORM.replace(".", "__"): np.ones(65, np.float32)})},
        rf"{NORM}.*shape \[65\].*expects \[64\]",
    ),
    ({"weights": damaged(model__layers__0__mlp__up_proj__bias=np.ones(128))}, "up_proj.bias"),
    ({"weights": damaged(), "dtype": "int32"}, "not floating point"),
]


@pytest.mark.parametrize(("arguments", "message"), HF_FAULTS)
def test_wrong_tensors_are_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_hf(tmp_path, **arguments)
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_values_that_are_not_finite_are_named(bad: float, form: str, tmp_path: Path) -> None:
    weights = damaged()
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name][3, 4] = bad
    path = tmp_path / "m.gguf"
    write = (
        write_hf(tmp_path, weights=weights) if form == "hf" else write_gguf(path, weights=weights)
    )
    source = open_model(write)
    source.tensor(NORM)
    with pytest.raises(ModelError, match=f"{name}.*NaN or infinite"):
        source.tensor(name)


def test_broken_directories_say_what_is_broken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_model(tmp_path)
    write_hf(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for size in (len(whole) - 4, 100, 4, 0):
        shard.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=f"{shard.name} is no complete safetensors"):
            open_model(tmp_path)
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard {shard.name}"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no valid JSON"):
        open_model(tmp_path)
    (tmp_path / "other.txt").write_text("text")
    with pytest.raises(ModelError, match="neither a directory"):
        open_model(tmp_path / "other.txt")


def test_a_file_that_may_not_be_read_is_not_called_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    write_hf(tmp_path)
    monkeypatch.setattr(hf, "safe_open", refuse)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .*Permission denied"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_damaged_tokenizer_files_are_found_when_the_engine_is_built(
    tmp_path: Path, name: str
) -> None:
    write_hf(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / name).write_text('{"chat_template": "{{')
    with pytest.raises(ModelError, match=f"{name} is no valid JSON"):
        open_model(tmp_path).save_tokenizer(tmp_path / "out")


def test_index_cannot_leave_the_directory(tmp_path: Path) -> None:
    write_hf(tmp_path / "m", shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="outside the directory"):
        open_model(tmp_path / "m")


class Exploit:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_bin_files_are_never_unpickled(tmp_path: Path) -> None:
    write_hf(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    mark = tmp_path / "ran"
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(mark)))
    with pytest.raises(ModelError, match="safetensors"):
        open_model(tmp_path / "m")
    assert not mark.exists()


@pytest.mark.parity
def test_bin_files_load_through_torch(tmp_path: Path) -> None:
    import torch

    write_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = random_weights(from_hf_config(hf_config("llama")))
    state = {n: torch.from_numpy(v).to(torch.bfloat16) for n, v in weights.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    source = open_model(tmp_path)
    for name, value in weights.items():
        np.testing.assert_allclose(source.tensor(name), value, rtol=2**-8, atol=1e-6)


GGUF_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"general.architecture": "gemma"}}, "'gemma'.*known: llama"),
    ({"metadata": {"llama.expert_count": 8}}, "expert_count = 8"),
    ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding_window = 64"),
    ({"metadata": {"llama.rope.dimension_count": 8}}, "dimension_count is 8"),
    ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope'"),
    ({"metadata": {"llama.rope.scaling.type": "linear"}}, "no factor"),
    ({"metadata": {"llama.context_length": None}}, "no llama.context_length"),
    ({"metadata": {"llama.block_count": 3}}, r"no tensor blk\.2\."),
    ({"metadata": {"llama.block_count": 1}}, r"has tensor blk\.1\."),
    ({"metadata": {"llama.feed_forward_length": 100}}, r"ffn_gate.*\[128, 64\].*\[100, 64\]"),
    ({"metadata": {"llama.attention.head_count_kv": [2, 2]}}, "int expected"),
    ({"metadata": {"split.count": 3}}, "3 parts"),
    ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, r"attn_q\.bias"),
    ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "8 positive numbers"),
]


@pytest.mark.parametrize(("arguments", "message"), GGUF_FAULTS)
def test_unsupported_gguf_is_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        open_model(write_gguf(tmp_path / "m.gguf", **arguments))
    assert "\n" not in str(caught.value)


def test_truncated_gguf_is_an_error_at_every_length(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for size in [0, 3, 8, 20, len(whole) - 1, *rng.integers(24, len(whole), 10)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"m\.gguf") as caught:
            open_model(path)
        assert "\n" not in str(caught.value)


def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at, byte in rng.integers(0, [[16000, 256]] * 60):
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        try:
            open_model(path).save_tokenizer(tmp_path)
        except ModelError:
            refused += 1
    assert refused > 10


def test_default_model_opens(smollm2_gguf: Path) -> None:
    source = open_model(smollm2_gguf)
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.max_positions, config.tied_embeddings, config.rope.theta) == (8192, True, 1e5)
    assert source.tensor("model.layers.29.self_attn.k_proj.weight").std() > 0.01


@pytest.mark.parity
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_tensors_equal_transformers(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    path = write_gguf(tmp_path / "m.gguf", family, quant=KIND.Q8_0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    source = open_model(path)
    theirs = model.state_dict()
    for name in tensor_shapes(source.config):
        np.testing.assert_array_equal(source.tensor(name), theirs[name].numpy())
