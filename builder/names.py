"""Names of the graph's inputs and outputs: what the builder writes and the runtime binds.

Symbols as in `ops.py`; S is the number of tokens of a step, V the vocabulary. Caches and the query
ring have the manifest's `dtype`; in TensorRT's form the ring is [B, 1, W + 1, L*Hq*D], the same
bytes.
"""

from __future__ import annotations

# Every step
INPUT_IDS = "input_ids"  # int64 [B, S]
POSITION_IDS = "position_ids"  # int64 [B, S], the true positions
N_NEW = "n_new"  # int32 [B], real tokens: S, or 0 in a one-token step: slot untouched
PAST_LENS = "past_lens"  # int32 [Ll, Bl], valid rows before the step: [1, B], [L, B], [L, B*Hkv]
#: Newest queries of all layers, a ring: position p is row p % (W + 1). One row more than W, so
#: that the padding token of an idle slot (n_new = 0) overwrites nothing that is still needed.
Q_RING_IN = "q_ring_in"  # dtype [B, W + 1, L*Hq*D]
Q_RING_OUT = "q_ring_out"  # the same, bound to the input's memory
LOGITS = "logits"  # float32 [B, V], of each sequence's last real token

# Evicting slots only (E = 0 in every other step)
EVICT_SLOTS = "evict_slots"  # int32 [E]
TOKENS_SEEN = "tokens_seen"  # int32 [E], true tokens including this step's
UNIT_IDS = "unit_ids"  # int32 [L, E, R, N]
BUDGET = "budget"  # int32 [L, E, R]
PIN_SPANS = "pin_spans"  # int32 [E, P, 2]
EVICTION_SEED = "eviction_seed"  # int32 [E, 2]
EVICTION_STEP = "eviction_step"  # int32 [E]
UNIFORM = "uniform"  # float32 [L, E, R, n, N], Philox draws, in TensorRT for RTX's form only
PROMPT_END = "prompt_end"  # int32 [E], 1 at a prompt's end, 0 in decode
KEEP = "keep"  # int32 [L, E, R, N]
KEEP_LEN = "keep_len"  # int32 [L, E, R]
COVERAGE = "coverage"  # float32 [L, E, R]
SCORES = "scores"  # float32 [L, E, R, N], of engines built with --trace-scores


def past_key(layer: int) -> str:
    """Return the name of the layer's key cache input [B, Hkv, C, D]."""
    return f"past_key.{layer}"


def past_value(layer: int) -> str:
    """Return the name of the layer's value cache input [B, Hkv, C, D]."""
    return f"past_value.{layer}"


def present_key(layer: int) -> str:
    """Return the name of the layer's key cache output, bound to the input's memory."""
    return f"present_key.{layer}"


def present_value(layer: int) -> str:
    """Return the name of the layer's value cache output, bound to the input's memory."""
    return f"present_value.{layer}"


def state_in(state: str, layer: int) -> str:
    """Return the name of a state's input [B, ...], see `states.py`."""
    return f"{state}_in.{layer}"


def state_out(state: str, layer: int) -> str:
    """Return the name of a state's output, bound to the input's memory."""
    return f"{state}_out.{layer}"
