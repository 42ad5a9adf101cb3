"""Model families: what is understood, what is refused, and the rotary frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, hf_config

from kvsift.builder.errors import ModelError
from kvsift.builder.families import Rope, from_hf_config, tensor_shapes

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

HEAD_DIMS = st.sampled_from([8, 16, 64, 128])
THETAS = st.floats(1e3, 1e7)
FACTORS = st.floats(1.0, 64.0)


@given(HEAD_DIMS, THETAS)
@settings(max_examples=50, deadline=None)
def test_default_frequencies_are_a_geometric_series(head_dim: int, theta: float) -> None:
    got = Rope(theta=theta).inv_freq(head_dim)
    want = theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


@given(HEAD_DIMS, THETAS, FACTORS)
@settings(max_examples=50, deadline=None)
def test_linear_scaling_divides_every_frequency(head_dim: int, theta: float, f: float) -> None:
    scaled = Rope(kind="linear", theta=theta, factor=f).inv_freq(head_dim)
    np.testing.assert_allclose(scaled * f, Rope(theta=theta).inv_freq(head_dim), rtol=1e-6)


@given(HEAD_DIMS, THETAS, FACTORS, st.integers(64, 65536))
@settings(max_examples=100, deadline=None)
def test_llama3_keeps_short_and_divides_long_wavelengths(
    head_dim: int, theta: float, f: float, length: int
) -> None:
    plain = Rope(theta=theta).inv_freq(head_dim).astype(np.float64)
    rope = Rope(kind="llama3", theta=theta, factor=f, original_max_positions=length)
    ratio = rope.inv_freq(head_dim) / plain
    turns = length * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 4.001], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.999], 1 / f, rtol=1e-6)
    smooth = (turns - 1) / 3
    between = (turns > 1.001) & (turns < 3.999)
    np.testing.assert_allclose(
        ratio[between], ((1 - smooth) / f + smooth)[between], rtol=1e-4, atol=1e-6
    )


@given(HEAD_DIMS, THETAS, st.floats(1.1, 64.0), st.integers(64, 65536), st.booleans())
@settings(max_examples=100, deadline=None)
def test_yarn_ramps_from_kept_to_divided(
    head_dim: int, theta: float, f: float, length: int, truncate: bool
) -> None:
    plain = Rope(theta=theta).inv_freq(head_dim).astype(np.float64)
    rope = Rope(
        kind="yarn", theta=theta, factor=f, original_max_positions=length, truncate=truncate
    )
    got = rope.inv_freq(head_dim)
    ratio = got / plain
    assert np.all(ratio <= 1 + 1e-6)
    assert np.all(ratio >= 1 / f - 1e-6)
    assert np.all(np.diff(got) < 0)
    turns = length * plain / (2 * np.pi)
    if turns.min() > 1.0 and turns.max() < 32.0:
        return
    # Dimensions past the ramp's ends; one of slack where the ends are rounded outwards.
    step = theta ** (2 / head_dim)
    np.testing.assert_allclose(ratio[turns > 32 * step], 1.0, rtol=1e-5)
    np.testing.assert_allclose(ratio[turns < 1 / step], 1 / f, rtol=1e-5)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(f) + 1)


def test_attention_factor_follows_the_model_before_the_formula() -> None:
    scaled = {"kind": "yarn", "factor": 4.0, "original_max_positions": 128}
    assert Rope(**scaled, given_attention_factor=1.25).attention_factor == 1.25
    both = Rope(**scaled, mscale=2.0, mscale_all_dim=1.0).attention_factor
    assert both == pytest.approx((0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1))
    assert Rope(kind="linear", factor=4.0).attention_factor == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_family_sets_its_own_tensors(family: str, tied: bool) -> None:
    config = from_hf_config(hf_config(family, tied=tied))
    shapes = tensor_shapes(config)
    attn = "model.layers.1.self_attn"
    assert config.family == family
    assert shapes[f"{attn}.k_proj.weight"] == (32, 64)
    assert shapes[f"{attn}.o_proj.weight"] == (64, 64)
    assert (f"{attn}.v_proj.bias" in shapes) == (family == "qwen2")
    assert (f"{attn}.q_norm.weight" in shapes) == (family == "qwen3")
    assert ("lm_head.weight" in shapes) != tied


@pytest.mark.parametrize("scaling", [{}, LLAMA3, YARN, {"type": "linear", "factor": 2}])
def test_old_and_new_rope_keys_mean_the_same(scaling: dict[str, Any]) -> None:
    old = from_hf_config(hf_config("llama", rope=scaling, rope_theta=5e5))
    raw = hf_config("llama", rope_parameters={**scaling, "rope_theta": 5e5})
    del raw["rope_theta"]
    assert from_hf_config(raw) == old
    assert old.rope.theta == 5e5


def test_absent_keys_take_the_family_default() -> None:
    raw = hf_config("llama")
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_theta"):
        del raw[key]
    del raw["eos_token_id"], raw["architectures"]
    config = from_hf_config(raw)
    assert (config.head_dim, config.num_kv_heads, config.tied_embeddings) == (16, 4, False)
    assert (config.rope, config.eos_token_ids) == (Rope(), (2,))
    assert from_hf_config(hf_config("llama", eos_token_id=[5, 7])).eos_token_ids == (5, 7)


def test_yarn_extends_the_context() -> None:
    raw = hf_config("qwen2", rope=YARN, max_position_embeddings=128)
    assert from_hf_config(raw).max_positions == 512


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", {"sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
        ("qwen3", {"layer_types": ["full_attention"] * 2, "sliding_window": 32}),
        ("llama", {"attention_bias": False, "mlp_bias": False, "num_experts": 0}),
    ],
)
def test_variants_that_change_nothing_are_accepted(family: str, overrides: dict[str, Any]) -> None:
    from_hf_config(hf_config(family, **overrides))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"model_type": "gemma", "architectures": []}, "gemma.*known: llama"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassif"),
        ("llama", {"architectures": ["Qwen2ForCausalLM"]}, "disagree"),
        ("llama", {"architectures": 7}, "architectures is 7; it must be a list"),
        ("mistral", {"sliding_window": 64}, "sliding_window 64"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
         "sliding_window 9"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"num_local_experts": 8}, "mixture-of-experts"),
        ("qwen3", {"num_experts": 8}, "mixture-of-experts"),
        ("llama", {"vision_config": {"a": 1}}, "multimodal"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized checkpoints"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "'gelu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "0.5"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*llama3"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "'factor'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor is 0.0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x'"),
        ("llama", {"rope_scaling": {"a": {"rope_type": "default"}}}, "per layer type"),
        ("llama", {"rope_theta": float("nan")}, "theta"),
        ("llama", {"hidden_size": -64}, "hidden_size = -64"),
        ("llama", {"hidden_size": None}, "hidden_size = None"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads 3"),
        ("llama", {"head_dim": 15}, "head_dim 15"),
        ("llama", {"head_dim": None, "hidden_size": 65}, "hidden_size 65"),
        ("llama", {"rms_norm_eps": 0}, "rms_eps is 0"),
        ("llama", {"tie_word_embeddings": "maybe"}, "tied_embeddings is 'maybe'"),
    ],
)  # fmt: skip
def test_what_the_decoder_cannot_express_is_refused(
    family: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        from_hf_config(hf_config(family, **overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parity
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False},
        {"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.3},
    ],
)
def test_frequencies_equal_transformers(head_dim: int, scaling: dict[str, Any] | None) -> None:
    from transformers.models.llama import modeling_llama as llama

    raw = hf_config("llama", rope=scaling, head_dim=head_dim, rope_theta=5e5)
    rope = from_hf_config(raw).rope
    theirs = llama.LlamaRotaryEmbedding(llama.LlamaConfig(**raw))
    np.testing.assert_allclose(rope.inv_freq(head_dim), theirs.inv_freq.numpy(), rtol=5e-7)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
