"""Weights out of a GGUF file: dequantized, un-permuted, under Hugging Face names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from kvsift.builder.errors import ModelError
from kvsift.builder.families import ModelConfig, tensor_shapes
from kvsift.builder.weights import checked
from kvsift.builder.weights.gguf_config import Metadata, config_from_gguf
from kvsift.builder.weights.gguf_tokenizer import save_gguf_tokenizer

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Rows dequantized at a time: the working set stays far below the tensor.
_CHUNK_ROWS = 4096


def gguf_name(name: str) -> str:
    """Return the GGUF name of the Hugging Face tensor `name`."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return q or k rows [heads * head_dim, ...] with each head's rotary halves apart again.

    GGUF's llama conversion interleaves them: row 2 i + s of a head is row s * head_dim / 2 + i.
    """
    half = rows.shape[0] // heads // 2
    split = rows.reshape(heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


class GgufSource:
    """A GGUF file, memory-mapped; tensors are dequantized when asked for."""

    config: ModelConfig

    def __init__(self, path: Path) -> None:
        """Read the header and check names and shapes; ModelError if damaged or unsupported."""
        self._path = path
        reader = _open(path)
        self._meta = Metadata(reader, path.name)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        divisors: NDArray[np.float32] | None = None
        if "rope_freqs.weight" in self._tensors:
            divisors = self._read("rope_freqs.weight")
        self.config = config_from_gguf(
            self._meta,
            vocab_size=self._shape("token_embd.weight")[0],
            tied="output.weight" not in self._tensors,
            freq_divisors=divisors,
        )
        self._shapes = tensor_shapes(self.config)
        self._check_names()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return the tensor `name` as float32; ModelError if missing, misshapen or not finite."""
        if name not in self._shapes:
            raise ModelError(f"{self._path.name} has no tensor {name}")
        value = self._read(gguf_name(name))
        if self._meta.architecture == "llama":
            # Only llama files hold interleaved rotary pairs; qwen files keep the halves.
            if ".q_proj." in name:
                value = unpermute(value, self.config.num_heads)
            elif ".k_proj." in name:
                value = unpermute(value, self.config.num_kv_heads)
        return checked(name, value, self._shapes[name], self._path.name)

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json made from the file's vocabulary."""
        save_gguf_tokenizer(self._meta, directory)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise ModelError(f"{self._path.name} has no tensor {name}; the file is incomplete")
        # GGUF writes the fastest dimension first.
        return tuple(int(n) for n in reversed(self._tensors[name].shape.tolist()))

    def _check_names(self) -> None:
        wanted = {gguf_name(name): shape for name, shape in self._shapes.items()}
        for name, shape in wanted.items():
            found = self._shape(name)
            if found != shape:
                raise ModelError(
                    f"tensor {name} in {self._path.name} has shape {list(found)}; the config "
                    f"expects {list(shape)}"
                )
        extra = sorted(self._tensors.keys() - wanted.keys() - {"rope_freqs.weight"})
        if extra:
            raise ModelError(
                f"{self._path.name} has tensor {extra[0]}, which a {self.config.family} model "
                "does not use; this variant is not supported"
            )

    def _read(self, name: str) -> NDArray[np.float32]:
        tensor, shape = self._tensors[name], self._shape(name)
        out = np.empty(shape, dtype=np.float32)
        if len(shape) != 2:
            out[...] = self._dequantize(tensor, tensor.data)
            return out
        for start in range(0, shape[0], _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            out[rows] = self._dequantize(tensor, tensor.data[rows])
        return out

    def _dequantize(self, tensor: ReaderTensor, data: NDArray[np.generic]) -> NDArray[np.float32]:
        try:
            return np.asarray(dequantize(data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise ModelError(
                f"tensor {tensor.name} in {self._path.name} has type {tensor.tensor_type.name}, "
                "which the gguf package cannot dequantize; use a Q4_K, Q6_K, Q8_0, F16 or BF16 file"
            ) from None


def _open(path: Path) -> GGUFReader:
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise ModelError(
            f"{path.name} is no complete GGUF file ({error}); download it again and compare "
            f"its size, {path.stat().st_size} bytes here"
        ) from None
    if reader.byte_order != "I":
        raise ModelError(f"{path.name} has the other byte order; convert it with gguf's tools")
    return reader
