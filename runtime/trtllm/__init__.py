"""Eviction in the shape of TensorRT-LLM's sparse attention; imports neither it nor torch."""

from __future__ import annotations

from kvsift.runtime.trtllm.predict import SparseKv

__all__ = ["SparseKv"]
