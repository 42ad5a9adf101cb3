"""What `build_engine` lets one choose: names of options' values, limits, the directory."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

from kvsift.builder.errors import UsageError
from kvsift.builder.families import ModelConfig
from kvsift.builder.package import Limits
from kvsift.builder.policies.base import Policy

DEFAULT_OUTPUT = 1024


class Scope(str, Enum):
    """Where a policy evicts."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


class Quantize(str, Enum):
    """Weight formats."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


class AttentionForm(str, Enum):
    """Forms of the attention in the graph."""

    auto = "auto"
    gqa = "gqa"
    portable = "portable"


class Dtype(str, Enum):
    """Types of activations and caches."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def checked_limits(
    config: ModelConfig,
    policy: Policy,
    max_input: int | None,
    max_output: int | None,
    max_batch: int,
    chunk: int,
    density: float,
    max_density: float,
) -> Limits:
    """Return the limits with what was not given filled in; UsageError for one out of range."""
    positions = config.max_positions
    longest = positions if max_input is None else max_input
    answer = min(DEFAULT_OUTPUT, positions) if max_output is None else max_output
    for name, value, high, why in (
        ("--max-input", longest, positions, "the model's positions"),
        ("--max-output", answer, positions, "the model's positions"),
        ("--max-batch", max_batch, 1024, "the most slots of an engine"),
        ("--chunk", chunk, 1 << 16, "the largest step"),
    ):
        if not 1 <= value <= high:
            raise UsageError(f"{name} must be in [1, {high}] ({why}), got {value}")
    if chunk % policy.block_size:
        raise UsageError(
            f"--chunk must be a multiple of the policy's blocks of {policy.block_size} tokens, "
            f"got {chunk}"
        )
    return Limits(
        max_input=longest,
        max_output=answer,
        max_batch=max_batch,
        density=density,
        max_density=max_density,
        chunk=chunk,
    )


def default_name(model: Path, policy: Policy, density: float) -> str:
    """Return the directory of an engine that was given none."""
    name = model.stem if model.is_file() else model.resolve().name
    name = re.sub(r"[._-](I?Q\d\w*|B?F16|F32)$", "", name, flags=re.IGNORECASE)
    return f"{name}-{policy.name}-{density:g}" if policy.evicts else f"{name}-{policy.name}"
