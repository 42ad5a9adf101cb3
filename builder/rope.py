"""Rotary embedding parameters and the frequencies that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kvsift.builder.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[str, ...] = get_args(RopeKind)

Floats = NDArray[np.float32]


class Rope(BaseModel):
    """Rotary embedding parameters; fields that a kind does not use keep their default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    #: Context length before scaling, in tokens (llama3, yarn).
    original_max_positions: int | None = None
    #: llama3: wavelengths above original / low are divided, below original / high are kept.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: yarn: rotations at which the ramp between kept and divided frequencies starts and ends.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    #: yarn: an attention factor given by the model instead of the computed one.
    given_attention_factor: float | None = None
    #: Divisors [head_dim / 2] on top of everything else, as GGUF stores llama3 scaling.
    freq_divisors: tuple[float, ...] = ()

    def inv_freq(self, head_dim: int) -> Floats:
        """Return the inverse frequencies, float32 [head_dim / 2], in radians per token.

        `theta ** (-2 i / head_dim)` by default; divided by `factor` (linear), by wavelength
        (llama3), or by a ramp over the dimensions (YaRN, arXiv 2309.00071, Eq. 17-23). The
        arithmetic is float32 throughout, as in the models' training code.
        """
        exponent: Floats = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers: Floats = np.power(np.float32(self.theta), exponent, dtype=np.float32)
        inv: Floats = np.float32(1.0) / powers
        if self.kind == "linear":
            inv = inv / np.float32(self.factor)
        elif self.kind == "llama3":
            inv = self._llama3(inv)
        elif self.kind == "yarn":
            inv = self._yarn(powers, head_dim)
        if self.freq_divisors:
            divisors: Floats = np.array(self.freq_divisors, dtype=np.float32)
            inv = inv / divisors
        return inv.astype(np.float32, copy=False)

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin: YaRN's `0.1 ln(factor) + 1` or what the model gives; else 1.0."""
        if self.kind != "yarn":
            return 1.0
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def max_positions(self, stated: int) -> int:
        """Return the context in tokens, given what the model's header states.

        Headers often keep the length before YaRN; the scaled one is what YaRN is for.
        """
        if self.kind != "yarn":
            return stated
        return max(stated, int(self.factor * self._original()))

    def _original(self) -> int:
        if self.original_max_positions is None:
            raise ModelError(f"rope type {self.kind!r} needs original_max_position_embeddings")
        return self.original_max_positions

    def _llama3(self, inv: Floats) -> Floats:
        length, low, high = self._original(), self.low_freq_factor, self.high_freq_factor
        factor = np.float32(self.factor)
        wavelength = np.float32(2 * math.pi) / inv
        smooth = (np.float32(length) / wavelength - np.float32(low)) / np.float32(high - low)
        blended = (np.float32(1.0) - smooth) * inv / factor + smooth * inv
        scaled = np.where(wavelength > np.float32(length / low), inv / factor, blended)
        return np.where(wavelength < np.float32(length / high), inv, scaled)

    def _yarn(self, powers: Floats, head_dim: int) -> Floats:
        def dimension(rotations: float) -> float:
            # The dimension that turns `rotations` times over the original context.
            turns = self._original() / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        if first == last:
            last += 0.001
        index = np.arange(head_dim // 2, dtype=np.float32)
        ramp = np.clip((index - np.float32(first)) / np.float32(last - first), 0, 1)
        keep = np.float32(1.0) - ramp
        divided = np.float32(1.0) / (np.float32(self.factor) * powers)
        kept = np.float32(1.0) / powers
        blended: Floats = divided * (np.float32(1.0) - keep) + kept * keep
        return blended


def rope_from_hf(config: Mapping[str, Any], theta: float, max_positions: int) -> Rope:
    """Return the rope of a config.json that holds `rope_parameters`, or `rope_scaling`.

    `theta` is the family's default base, `max_positions` the model's context in tokens.
    ModelError for an unknown type, a missing or non-positive value, or a partial rotation.
    """
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise ModelError(f"rope parameters are {raw!r}; they must be a JSON object")
    if set(raw) == {"full_attention"}:
        raw = raw["full_attention"]
    if any(isinstance(v, Mapping) for v in raw.values()):
        raise ModelError(
            f"rope parameters differ per layer type ({', '.join(map(str, raw))}); only one set "
            "for all layers is supported"
        )
    values = {key: value for key, value in raw.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; known: {', '.join(KINDS)}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial!r} is not supported; it must be 1.0")
    fields: dict[str, Any] = {
        "kind": kind,
        "theta": values.get("rope_theta") or config.get("rope_theta") or theta,
    }
    if kind in ("llama3", "yarn"):
        given = config.get("original_max_position_embeddings")
        inner = values.get("original_max_position_embeddings", max_positions)
        fields["original_max_positions"] = inner if given is None else given
    if kind == "yarn" and "factor" not in values:
        fields["factor"] = max_positions / fields["original_max_positions"]
    elif kind != "default":
        fields["factor"] = _need(values, "factor", kind)
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            fields[key] = _need(values, key, kind)
    if kind == "yarn":
        # Zero means "the default" here, as it does in the models' reference code.
        fields |= {k: values[k] for k in ("beta_fast", "beta_slow") if values.get(k)}
        fields |= {k: values[k] for k in ("truncate", "mscale", "mscale_all_dim") if k in values}
        fields["given_attention_factor"] = values.get("attention_factor")
    return make_rope(fields)


def make_rope(fields: Mapping[str, Any]) -> Rope:
    """Return the checked Rope with these fields; ModelError names the value that is wrong."""
    try:
        rope = Rope(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ModelError(f"rope {where} is {first['input']!r}: {first['msg']}") from None
    positive = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    for name in positive:
        if getattr(rope, name) <= 0:
            raise ModelError(f"rope {name} is {getattr(rope, name)!r}; it must be above 0")
    if rope.theta <= 1:
        raise ModelError(f"rope theta is {rope.theta!r}; it must be above 1")
    if rope.original_max_positions is not None and rope.original_max_positions <= 0:
        raise ModelError(
            f"rope original_max_position_embeddings is {rope.original_max_positions}; it must be "
            "above 0"
        )
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"rope high_freq_factor {rope.high_freq_factor} must be above low_freq_factor "
            f"{rope.low_freq_factor}"
        )
    return rope


def _need(values: Mapping[str, Any], key: str, kind: str) -> Any:
    if key not in values:
        raise ModelError(f"rope type {kind!r} needs {key!r} in rope_scaling; config.json has none")
    return values[key]


def _mscale(scale: float, weight: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0
