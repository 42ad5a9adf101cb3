"""`sparse_kv_predict`: which prompt tokens each KV head of a layer keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsift.builder.errors import UsageError
from kvsift.builder.package import HEAD_REDUCE, REDUCE, WALK_ORDER, Policy
from kvsift.runtime.budgets import forced_units, units_of
from kvsift.runtime.kernels import Kernels
from kvsift.runtime.seeds import check_seed, request_seed, seed_words
from kvsift.runtime.trtllm.arrays import Arrays
from kvsift.runtime.trtllm.metadata import context_lens, integers, split_qk

#: Scorers that need nothing but the newest queries and the keys of one layer.
SCORERS = ("nexus", "snapkv")
#: The op of each selector that keeps as many units in every row.
SELECTORS = {"topk": "TopKSelect", "reservoir": "ReservoirSelect"}


class SparseKv:
    """The eviction of one attention layer when prompts end.

    `policy` is what `kvsift.builder.policies.resolve` returns for nexus or snapkv, `prompt_budget`
    the tokens that a prompt keeps at most, `kernels` the library for where q and k lie
    (`Kernels(plugin_library.find())` on a GPU), `seed` in [0, 2^64) that of the draws of nexus.
    Raises UsageError for a policy that needs more than one layer's queries and keys, and for a
    budget that its forced tokens exceed.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_budget: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kernels: Kernels,
        layer_idx: int = 0,
        seed: int = 0,
    ) -> None:
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads or head_dim < 1:
            raise UsageError(
                f"num_heads is {num_heads}, num_kv_heads {num_kv_heads} and head_dim {head_dim}; "
                "they must be positive, and num_heads a multiple of num_kv_heads"
            )
        self.policy, self.kernels = policy, kernels
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.prompt_budget = int(prompt_budget)
        self.selector = policy.selector if policy.prefill_selector == "same" else "topk"
        plain = policy.layer_budgets == "uniform" and not policy.recent_fraction
        if policy.scorer not in SCORERS or self.selector not in SELECTORS or not plain:
            raise UsageError(
                f"policy {policy.name!r} (scorer {policy.scorer!r}, selector {self.selector!r}) "
                f"does not fit here; allowed: scorers {' and '.join(SCORERS)}, selectors topk "
                "and reservoir, the same budget in every layer, no recent_fraction"
            )
        block = policy.block_size
        units = policy.sink_units + policy.recent_units + (block > 1)
        least = max(units * block, policy.window)
        if self.prompt_budget < least:
            raise UsageError(
                f"prompt_budget is {prompt_budget} and sinks, window and newest block take "
                f"{least} tokens; give {least} or more, or lower window, sink_units or block_size"
            )
        # Layers draw apart: the op's counter tells only the layers of one call apart.
        self._seed = request_seed(check_seed("seed", seed), layer_idx)

    def sparse_kv_predict(
        self, q: Any, k: Any, metadata: Any, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Return the tokens that the context sequences keep.

        `q` [num_tokens, Hq*D] and `k` [num_tokens, Hkv*D], or packed QKV and None; rotated, fp32,
        fp16 or bf16; context tokens first. `metadata` has `num_contexts`, `seq_lens` and, for
        checks and seeds, `kv_lens` and `request_ids`. Returns int32 indices [Hkv, total_kept],
        positions in their own sequence, ascending, and int32 offsets [num_contexts + 1] of the
        sequences, both where q lies; None, None without a context sequence. Waits for no kernel.
        Raises UsageError for other shapes, types and parts of prompts.
        """
        lens = context_lens(metadata)
        if not lens:
            return None, None
        sizes = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        queries, keys, dtype = split_qk(q, k, sum(lens), *sizes)
        ids = getattr(metadata, "request_ids", None)
        requests = range(len(lens)) if ids is None else integers("request_ids", ids, len(lens))
        arrays = Arrays(q)
        kept = [self._kept_tokens(n) for n in lens]
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(lens)])
        indices = arrays.empty((self.num_kv_heads, int(offsets[-1])), "int32")
        for i, (n, request) in enumerate(zip(lens, requests, strict=True)):
            rows = slice(int(starts[i]), int(starts[i]) + n)
            if n == kept[i]:
                found = arrays.put(np.arange(n, dtype=np.int32)[None])
            else:
                found = _Eviction(self, arrays, dtype, n).run(queries[rows], keys[rows], request)
            indices[:, int(offsets[i]) : int(offsets[i + 1])] = found
        return indices, arrays.put(offsets)

    def kept_units(self, n: int) -> int:
        """Return how many units a prompt of n tokens keeps; a partial tail is one."""
        p = self.policy
        forced = forced_units(n, p.block_size, p.sink_units, p.recent_units)
        return max(self.prompt_budget // p.block_size, forced)

    def _kept_tokens(self, n: int) -> int:
        block = self.policy.block_size
        if n <= self.prompt_budget:
            return n
        # The partial tail always stays, and it is the last unit.
        return self.kept_units(n) * block - -n % block

    def draw_seed(self, request: int) -> int:
        """Return the seed of a request's draws in this layer."""
        return request_seed(self._seed, request)


class _Eviction:
    """One prompt of n tokens, longer than the budget: the ops of its eviction, in order."""

    def __init__(self, owner: SparseKv, arrays: Arrays, dtype: str, n: int) -> None:
        self.owner, self.arrays, self.dtype, self.n = owner, arrays, dtype, n
        self.policy = owner.policy
        self.units = units_of(n, self.policy.block_size)
        self.shared = not self.policy.per_head
        rows = 1 if self.shared else owner.num_kv_heads
        ids = np.tile(np.arange(self.units, dtype=np.int32), (1, rows, 1))
        self.ids, self.all_ids = arrays.put(ids), arrays.put(ids[None])
        self.seen = self._ints([n])
        self.budget = self._ints(np.full((1, 1, rows), owner.kept_units(n)))

    def _ints(self, values: Any) -> Any:
        return self.arrays.put(np.asarray(values, np.int32))

    def _op(self, op: str, attrs: Mapping[str, float], inputs: Sequence[Any]) -> Any:
        """Enqueue an op; return its first output."""
        kernels = self.owner.kernels
        sizes = kernels.sizes(op, attrs, [tuple(a.shape) for a in inputs])
        outputs = [
            self.arrays.empty(shape, spec[1])
            for spec, shape in zip(
                kernels.ops[op].outputs, kernels.output_shapes(op, sizes), strict=True
            )
        ]
        space = kernels.workspace(op, attrs, self.dtype, sizes)
        workspace = self.arrays.empty((space,), "uint8")
        kernels.run(op, attrs, self.dtype, inputs, outputs, workspace, self.arrays.stream())
        return outputs[0]

    def run(self, queries: Any, keys: Any, request: int) -> Any:
        """Return int32 [Hkv or 1, kept] of queries [n, Hq*D] and keys [n, Hkv*D]."""
        owner, policy = self.owner, self.policy
        q_window = self.arrays.contiguous(queries[self.n - policy.window :])[None]
        heads = keys.reshape(self.n, owner.num_kv_heads, owner.head_dim)
        cache = self.arrays.contiguous(heads.swapaxes(0, 1))[None]
        inputs = (q_window, cache, self.ids, self.seen, self._ints([0]))
        score = self._nexus(inputs) if policy.scorer == "nexus" else self._snapkv(inputs)
        keep = self._select(score, request)
        block = policy.block_size
        kept = keep[0, 0, :, : owner.kept_units(self.n), None] * block
        tokens = kept + self._ints(np.arange(block))
        tokens = tokens.reshape(tokens.shape[0], -1)
        # Of the last unit, which always stays, there is what the prompt has.
        return tokens[:, : tokens.shape[1] - -self.n % block]

    def _snapkv(self, inputs: Sequence[Any]) -> Any:
        given = self.policy.scorer_options
        attrs = {
            "window_reduce": REDUCE.index(str(given["window_reduce"])),
            "group_reduce": REDUCE.index(str(given["group_reduce"])),
            "pool_size": int(given["pool_size"]),
            "shared": int(self.shared),
        }
        return self._op("WindowScore", attrs, inputs)[None]

    def _nexus(self, inputs: Sequence[Any]) -> Any:
        given, block = self.policy.scorer_options, self.policy.block_size
        reduce = HEAD_REDUCE.index(str(given["head_reduce"]))
        mass = self._op("WindowMass", {"block_size": block, "head_reduce": reduce}, inputs)
        attrs = {
            "block_size": block,
            "walk_steps": min(int(given["walk_steps"]), self.policy.window),
            "walk_order": WALK_ORDER.index(str(given["walk_order"])),
            "walk_lambda": float(given["walk_lambda"]),
            "tie_eps": float(given["tie_eps"]),
        }
        return self._op("NexusScore", attrs, (mass[None], self.all_ids, self.seen))

    def _select(self, score: Any, request: int) -> Any:
        """Return keep [1, 1, R, N] of score [1, 1, R, N]."""
        policy, owner = self.policy, self.owner
        attrs: dict[str, float] = {
            "block_size": policy.block_size,
            "sink_units": policy.sink_units,
            "recent_units": policy.recent_units,
            "score_is_mass": int(policy.score_is_mass),
        }
        pins = self._ints(np.zeros((1, 1, 2)))
        rest = (self.budget, self.all_ids, self.seen, pins)
        op = SELECTORS[owner.selector]
        if owner.selector == "topk":
            return self._op(op, attrs, (score, *rest))
        seed = self.arrays.put(seed_words([owner.draw_seed(request)]))
        draws = int(policy.selector_options["draws"])
        uniform = {"draws": draws, "heads_per_layer": owner.num_kv_heads}
        u = self._op("PhiloxUniform", uniform, (self.all_ids, seed, self._ints([0])))
        # As the builder does: the weights of nexus are shares already.
        attrs["normalize"] = int(policy.scorer != "nexus")
        return self._op(op, attrs, (score, u, *rest))
