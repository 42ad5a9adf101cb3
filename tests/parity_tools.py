"""One prompt read by transformers: what kvpress keeps of its cache, and what our op nodes keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from runners import run_onnx

from kvsift.builder import names, ops
from kvsift.builder.bodies import Dims
from kvsift.builder.eviction_model import eviction_model
from kvsift.builder.families import ModelConfig, tensor_shapes
from kvsift.builder.policies.base import Policy
from kvsift.builder.weights import WeightSource

Array = NDArray[Any]
#: Tokens per step of the query statistics, so that steps are merged.
CHUNK = 200


@dataclass
class Layer:
    """What a layer's attention saw: torch tensors for presses, arrays for our ops.

    `hidden` [1, N, hidden], `keys` and `values` [1, Hkv, N, D]; `raw` and `rotated` queries
    float32 [N, Hq*D]; `kwargs` those of the attention module's call.
    """

    module: Any
    hidden: Any
    keys: Any
    values: Any
    kwargs: dict[str, Any]
    raw: Array
    rotated: Array


@dataclass
class Read:
    """A prompt of N tokens in a model."""

    model: Any
    config: ModelConfig
    tokens: list[int]
    layers: list[Layer]
    #: Mean and moment of the queries by the sinks that they leave out.
    statistics: dict[int, list[tuple[Array, Array]]] = field(default_factory=dict)


class Weights:
    """A weight source that reads the tensors of another once and holds them."""

    def __init__(self, source: WeightSource) -> None:
        self.config = source.config
        self.save_tokenizer = source.save_tokenizer
        self.tensor = cache(source.tensor)


def llama(source: WeightSource) -> Any:
    """Return transformers' model with the weights of one of ours (a llama with plain rotation)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    c = source.config
    assert c.family == "llama"
    assert c.rope.kind == "default"
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_eps,
        max_position_embeddings=c.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):  # no random weights
        made = LlamaForCausalLM(config).eval()
    weights = {name: torch.from_numpy(source.tensor(name)) for name in tensor_shapes(c)}
    missing, unexpected = made.load_state_dict(weights, strict=False, assign=True)
    assert missing == (["lm_head.weight"] if c.tied_embeddings else [])
    assert not unexpected
    made.tie_weights()
    made.model.rotary_emb = LlamaRotaryEmbedding(config)
    return made


def read(model: Any, config: ModelConfig, tokens: Sequence[int]) -> Read:
    """Run a prompt through transformers and note what every layer's attention saw."""
    import torch
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layers: list[Layer] = []
    held = DynamicCache()

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden, mine = kwargs["hidden_states"], held.layers[module.layer_idx]
        raw = module.q_proj(hidden)
        split = raw.view(1, raw.shape[1], -1, module.head_dim).transpose(1, 2)
        rotated, _ = apply_rotary_pos_emb(split, mine.keys, *kwargs["position_embeddings"])
        merged = rotated.transpose(1, 2).reshape(raw.shape[1:])
        arrays = raw[0].numpy(), merged.numpy()
        layers.append(Layer(module, hidden, mine.keys, mine.values, dict(kwargs), *arrays))

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(torch.tensor([tokens]), past_key_values=held, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Read(model, config, list(tokens), layers)


def ratio(press: Any, kept: int, total: int) -> float:
    """Return the compression ratio at which a press keeps exactly `kept` of `total` tokens.

    Presses cut total * (1 - ratio) down to an integer, and PyramidKV's computes with it as it is.
    """
    return 1 - (kept if hasattr(press, "beta") else kept + 0.5) / total


def scores_of(press: Any, prompt: Read) -> Array:
    """Return a press' scores, float32 [L, Hkv, N]."""
    import torch

    scorer = getattr(press, "press", press)
    with torch.no_grad():
        made = [
            scorer.score(x.module, x.hidden, x.keys, x.values, None, x.kwargs)[0].numpy()
            for x in prompt.layers
        ]
    return np.stack(made)


def kept_by(press: Any, prompt: Read, scores: Array) -> Array:
    """Return what a press leaves of each layer's cache at its `scores_of`, a mask [L, Hkv, N]."""
    import torch

    masks = []
    scorer = getattr(press, "press", press)
    # A tensor of its own each time: AdaKV's press writes into the scores.
    scorer.score = lambda module, *_: torch.tensor(scores[module.layer_idx][None])
    for x in prompt.layers:
        x.module.masked_key_indices = None
        with torch.no_grad():
            keys, _ = press.compress(x.module, x.hidden, x.keys, x.values, None, x.kwargs)
        if x.module.masked_key_indices is None:
            masks.append(_rows_found(x.keys[0].numpy(), keys[0].numpy()))
        else:  # it holds them all and masks some
            mask = np.ones(x.keys.shape[1:3], bool)
            mask[tuple(index.numpy() for index in x.module.masked_key_indices[1:])] = False
            masks.append(mask)
            x.module.masked_key_indices = None
    del scorer.score
    return np.stack(masks)


def _rows_found(rows: Array, kept: Array) -> Array:
    """Return which of `rows` [Hkv, N, D] are in `kept` [Hkv, n, D], bit for bit."""
    mask = np.zeros(rows.shape[:2], bool)
    for head, mine in enumerate(rows):
        at = {row.tobytes(): i for i, row in enumerate(mine)}
        assert len(at) == len(mine), "two tokens have the same key"
        mask[head, [at[row.tobytes()] for row in kept[head]]] = True
    return mask


class OurNodes:
    """A policy's scorers and selector, as the graph of an engine has them, on a read prompt."""

    def __init__(self, policy: Policy, prompt: Read) -> None:
        self.policy = policy
        self._prompt = prompt
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        model = ir.to_proto(eviction_model(prompt.config, policy)).SerializeToString()
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        wanted = {x.name for x in self._session.get_inputs()}
        self._feed = {k: v for k, v in self._caches().items() if k in wanted}

    def keep(self, budgets: Array) -> Array:
        """Return the mask [L, Hkv, N] of what stays at budgets [L] in tokens per head."""
        config, count = self._prompt.config, len(self._prompt.tokens)
        rows = config.num_kv_heads if self.policy.per_head else 1
        ids = np.broadcast_to(np.arange(count, dtype=np.int32), (config.num_layers, 1, rows, count))
        feed = self._feed | {
            names.EVICT_SLOTS: np.zeros(1, np.int32),
            names.TOKENS_SEEN: np.array([count], np.int32),
            names.UNIT_IDS: np.ascontiguousarray(ids),
            names.BUDGET: np.tile(budgets.astype(np.int32)[:, None, None], (1, 1, rows)),
            names.PIN_SPANS: np.zeros((1, 1, 2), np.int32),
        }
        keep, lens = self._session.run([names.KEEP, names.KEEP_LEN], feed)
        assert ((keep[:, 0] >= 0).sum(-1) == lens[:, 0]).all()
        mask = np.zeros((config.num_layers, rows, count + 1), bool)
        np.put_along_axis(mask, keep[:, 0].astype(np.int64), True, axis=-1)  # -1 is the last one
        return np.broadcast_to(mask[..., :-1], (config.num_layers, config.num_kv_heads, count))

    def _caches(self) -> dict[str, Array]:
        prompt, window = self._prompt, self.policy.window
        made: dict[str, Array] = {}
        for i, layer in enumerate(prompt.layers):
            made[names.past_key(i)] = layer.keys.numpy()
            made[names.past_value(i)] = layer.values.numpy()
        if window:
            assert self.policy.window_heads == "all"
            positions = np.arange(len(prompt.tokens) - window, len(prompt.tokens))
            queries = np.concatenate([x.rotated[positions] for x in prompt.layers], axis=1)
            ring = np.full((1, window + 1, queries.shape[1]), np.nan, np.float32)
            ring[0, positions % (window + 1)] = queries
            made[names.Q_RING_IN] = ring
        if "query_mean" in self.policy.states:
            for i, pair in enumerate(statistics(prompt, self.policy.sink_units)):
                for name, array in zip(("query_mean", "query_moment"), pair, strict=True):
                    made[names.state_in(name, i)] = array
        return made


def statistics(prompt: Read, sinks: int) -> list[tuple[Array, Array]]:
    """Return each layer's mean [1, Hq, D] and moment [1, Hq, D, D] of the queries, step by step."""
    c = prompt.config
    if sinks not in prompt.statistics:
        dims = Dims(c.num_heads, c.num_kv_heads, c.head_dim, 0)
        attrs = ops.TABLE["QueryStatsUpdate"].defaults() | {"sink_tokens": sinks}
        made = []
        for layer in prompt.layers:
            mean: Array = np.zeros((1, c.num_heads, c.head_dim), np.float32)
            moment: Array = np.zeros((1, c.num_heads, c.head_dim, c.head_dim), np.float32)
            for start in range(0, len(layer.raw), CHUNK):
                part = layer.raw[start : start + CHUNK][None]
                inputs = {
                    "mean": mean,
                    "moment": moment,
                    "queries": part,
                    "first_position": np.array([start], np.int32),
                    "n_new": np.array([part.shape[1]], np.int32),
                }
                mean, moment = run_onnx("QueryStatsUpdate", attrs, dims, inputs)
            made.append((mean, moment))
        prompt.statistics[sinks] = made
    return prompt.statistics[sinks]


def continued(
    prompt: Read, press: Any, tokens: Sequence[int], factors: Array | None = None
) -> Array:
    """Return the logits [n, V] after each of `tokens`, fed one by one, of what a press left.

    Positions go on from the true length. Without a press nothing is evicted. `factors`
    [L, Hkv, N] multiply the scores.
    """
    import torch
    from transformers import DynamicCache

    model, held = prompt.model, DynamicCache()
    made = []
    for layer in prompt.layers:
        layer.module.masked_key_indices = None  # of an earlier run
    with torch.no_grad():
        if press is None:
            for i, layer in enumerate(prompt.layers):
                held.update(layer.keys, layer.values, i)
        else:
            with press(model), _scaled(press, factors):
                model(torch.tensor([prompt.tokens]), past_key_values=held, logits_to_keep=1)
        for i, token in enumerate(tokens):
            positions = torch.tensor([[len(prompt.tokens) + i]])
            step = model(torch.tensor([[token]]), past_key_values=held, position_ids=positions)
            made.append(step.logits[0, -1].numpy())
    return np.stack(made)


@contextmanager
def _scaled(press: Any, factors: Array | None) -> Iterator[None]:
    """Multiply a press' scores for a while."""
    import torch

    if factors is None:
        yield
        return
    scorer = getattr(press, "press", press)
    plain = scorer.score
    scorer.score = lambda module, *args: (
        plain(module, *args) * torch.from_numpy(factors[module.layer_idx][None])
    )
    try:
        yield
    finally:
        del scorer.score
