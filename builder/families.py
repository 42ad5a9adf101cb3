"""Model families: what a config.json or GGUF header says of a decoder, in one form."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Family = Literal["llama", "qwen2", "qwen3", "mistral"]


class Rope(BaseModel):
    """Rotary embedding parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0

    def inv_freq(self, head_dim: int) -> NDArray[np.float32]:
        """Return the inverse frequencies [head_dim / 2]."""
        raise NotImplementedError

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin (YaRN's mscale), 1.0 elsewhere."""
        raise NotImplementedError


class ModelConfig(BaseModel):
    """A decoder-only transformer as the builder sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope: Rope = Rope()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
