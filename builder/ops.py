"""The op table: one row per op of the `kvsift` domain, the only place where an op is described.

From a row come the C++ header `plugins/ops.gen.h`, the ONNX schema, `docs/ops.md` and the random
inputs of the op tests. The symbols in shapes are explained at the top of `docs/ops.md`; a product
of symbols is written `Hq*D`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DOMAIN = "kvsift"
OPSET = 1
#: Version of the op set; a package records it and the runtime refuses another.
OPS_VERSION = "1"

DType = Literal["float32", "int32", "T"]
Value = int | float


@dataclass(frozen=True)
class Tensor:
    """An input or output: dtype `T` is the model's float type (fp32, fp16 or bf16)."""

    name: str
    dtype: DType
    shape: tuple[str, ...]
    doc: str


@dataclass(frozen=True)
class Attr:
    """An attribute (INT or FLOAT, as TensorRT's importer passes them) with its closed range."""

    name: str
    default: Value
    low: Value
    high: Value
    doc: str
    #: For enumerations: the names of the values low, low + 1, ...
    choices: tuple[str, ...] = ()
    #: The shape symbol that this attribute sets, if no input has it.
    symbol: str = ""

    @property
    def is_int(self) -> bool:
        """Whether the attribute is an ONNX INT (else FLOAT)."""
        return isinstance(self.default, int)


@dataclass(frozen=True)
class Op:
    """One op: its interface, meaning, equation and source."""

    name: str
    summary: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: tuple[Attr, ...]
    equation: str
    source: str

    def attr(self, name: str) -> Attr:
        """Return the attribute called `name`."""
        return next(a for a in self.attrs if a.name == name)

    def defaults(self) -> dict[str, Value]:
        """Return every attribute with its default."""
        return {a.name: a.default for a in self.attrs}


HEAD_REDUCE = ("mean_qk", "mean_prob", "per_head")
REDUCE = ("mean", "sum", "max")
WALK_ORDER = ("chronological", "newest_first", "strided")
INT_MAX = 2**31 - 1

_SLOTS = Tensor("evict_slots", "int32", ("E",), "slot of each evicting sequence; -1 is skipped")
_SEEN = Tensor("tokens_seen", "int32", ("E",), "true tokens so far; the newest is at seen - 1")
_KEYS = Tensor("keys", "T", ("B", "Hkv", "C", "D"), "key cache of the layer, rotated")
_WINDOW = Tensor("q_window", "T", ("E", "W", "Hq*D"), "last W rotated queries, chronological")
_IDS = Tensor("unit_ids", "int32", ("E", "R", "N"), "block number or position; -1 is padding")
_SCORE = Tensor("score", "float32", ("E", "R", "N"), "higher means keep; -inf at padding")
_VALUES = Tensor("values", "T", ("B", "Hkv", "C", "D"), "value cache of the layer")
_MEAN = Tensor("mean", "float32", ("B", "Hq", "D"), "mean of the queries before rotation")
_MOMENT = Tensor("moment", "float32", ("B", "Hq", "D", "D"), "sum of (q - mean)(q - mean)^T")
_N_NEW = Tensor("n_new", "int32", ("B",), "real tokens of this step; 0 leaves the slot untouched")
_BLOCK = Attr("block_size", 32, 1, 4096, "tokens per unit")

_ALL_SCORES = Tensor("score", "float32", ("L", "E", "R", "N"), "higher means keep; -inf at padding")
_ALL_IDS = Tensor("unit_ids", "int32", ("L", "E", "R", "N"), "unit ids; -1 is padding")
_BUDGET = Tensor("budget", "int32", ("L", "E", "R"), "units to keep, forced ones included")
_PINS = Tensor("pin_spans", "int32", ("E", "P", "2"), "pinned positions [start, end); empty: 0, 0")
_SINK = Attr("sink_units", 1, 0, INT_MAX, "units with id below this are forced")
_RECENT = Attr("recent_units", 1, 0, INT_MAX, "newest full units forced; a partial tail always is")
_MASS = Attr("score_is_mass", 1, 0, 1, "whether a share of the score is a meaningful coverage")
_SELECTED = (
    Tensor("keep", "int32", ("L", "E", "R", "N"), "kept unit indices, ascending, then -1"),
    Tensor("keep_len", "int32", ("L", "E", "R"), "number of kept units"),
    Tensor("coverage", "float32", ("L", "E", "R"), "kept share of the score, NaN if no mass"),
)
_FORCED = (
    "unit j is forced if id_j < sink_units, id_j >= floor(seen / b) - recent_units, or a pinned "
    "span meets it; keep_len = min(#valid, max(budget, #forced)); forced first, then the highest "
    "{key}, ties to the lower index; the key is clamped to finite fp32 and NaN is the lowest"
)

OPS: tuple[Op, ...] = (
    Op(
        "WindowMass",
        "Share of each window query's attention that each unit of a layer has.",
        (_WINDOW, _KEYS, _IDS, _SEEN, _SLOTS),
        (Tensor("mass", "float32", ("E", "R", "W", "N"), "rows sum to 1; undefined if no key"),),
        (_BLOCK, Attr("head_reduce", 1, 0, 2, "what is averaged over heads", HEAD_REDUCE)),
        "S = rownorm(BlockSum_b(softmax(Q K^T / sqrt(D)))), one row per window query, which sees "
        "the keys whose position is not above its own; a row of the cache is valid if its unit's "
        "id is not -1 and its position is below seen",
        "arXiv 2606.23961, Eq. 1",
    ),
    Op(
        "NexusScore",
        "Mean attention of the window plus a short walk that lifts bridge blocks.",
        (
            Tensor("mass", "float32", ("L", "E", "R", "W", "N"), "WindowMass of all layers"),
            _ALL_IDS,
            _SEEN,
        ),
        (_ALL_SCORES,),
        (
            _BLOCK,
            Attr("walk_steps", 3, 0, 64, "H, window rows that the walk visits"),
            Attr(
                "walk_order",
                0,
                0,
                2,
                "the newest H rows, those backwards, or rows W - 1 - floor(i W / H) oldest first",
                WALK_ORDER,
            ),
            Attr("walk_lambda", 0.5, 0.0, 1e6, "lambda, weight of the walk"),
            Attr("tie_eps", 1e-6, 0.0, 1.0, "eps, recency ramp that breaks ties"),
        ),
        "a = mean of the rows S of queries that see a key; C <- C + (1 + <S_q, C>) S_q; "
        "c = C / |C|_1; w = a + lambda * c + eps * r, r = (id - min id) / (max id - min id)",
        "arXiv 2606.23961, Eq. 2-5",
    ),
    Op(
        "PhiloxUniform",
        "Counter-based uniforms: a draw depends on its request's seed and history only.",
        (
            _ALL_IDS,
            Tensor("seed", "int32", ("E", "2"), "64-bit eviction seed, low word first"),
            Tensor("step", "int32", ("E",), "eviction step of the sequence"),
        ),
        (Tensor("u", "float32", ("L", "E", "R", "n", "N"), "uniforms strictly inside (0, 1)"),),
        (
            Attr("draws", 5, 1, 1024, "n, draws per unit", symbol="n"),
            Attr("heads_per_layer", 1, 1, 65536, "Hkv, so that layers do not share counters"),
        ),
        "x = Philox4x32-10(key = seed, counter = (id, i // 4, layer * Hkv + row, step))[i % 4]; "
        "u = ((x >> 9) + 0.5) * 2^-23",
        "Salmon et al., SC 2011",
    ),
    Op(
        "ReservoirSelect",
        "Weighted reservoir sampling without replacement, averaged over n draws.",
        (
            _ALL_SCORES,
            Tensor("u", "float32", ("L", "E", "R", "n", "N"), "uniforms in (0, 1)"),
            _BUDGET,
            _ALL_IDS,
            _SEEN,
            _PINS,
        ),
        _SELECTED,
        (
            _BLOCK,
            _SINK,
            _RECENT,
            Attr("normalize", 0, 0, 1, "scale the weights of a row to sum 1.5 first"),
            _MASS,
        ),
        "log pi_j = logsumexp_i(ln(u_ij) / max(w_j, 1e-20)) - ln n; " + _FORCED.format(key="pi"),
        "arXiv 2606.23961, Eq. 6; Efraimidis and Spirakis 2006",
    ),
    Op(
        "TopKSelect",
        "The units with the highest score of each row.",
        (_ALL_SCORES, _BUDGET, _ALL_IDS, _SEEN, _PINS),
        _SELECTED,
        (_BLOCK, _SINK, _RECENT, _MASS),
        _FORCED.format(key="score"),
        "common practice",
    ),
    Op(
        "HeadTopKSelect",
        "The heads of a layer compete for its budget; each is safe in a share of its own.",
        (_ALL_SCORES, _BUDGET, _ALL_IDS, _SEEN, _PINS),
        _SELECTED,
        (
            _BLOCK,
            _SINK,
            _RECENT,
            _MASS,
            Attr("safeguard", 0.2, 0.0, 1.0, "share of its own budget that a head never loses"),
            Attr(
                "max_head_ratio", 2.0, 0.0, 1e6, "largest share of a head over its budget; 0: any"
            ),
        ),
        "each row first takes its forced units, then its own best up to floor(safeguard * budget); "
        "the rest of the layer's sum of budgets goes to the best (row, unit) pairs of the layer, "
        "ties to the lower row, then the lower index; no row exceeds floor(max_head_ratio * "
        "budget) but by its forced units; floors take x + 1e-3; "
        + _FORCED.split("; ")[0]
        + "; the key is the score, clamped to finite fp32, and NaN is the lowest",
        "Ada-KV, arXiv 2407.11550; arXiv 2605.26678, Eq. 17-18",
    ),
    Op(
        "KNormScore",
        "Keys of small norm attract attention: keep them.",
        (_KEYS, _IDS, _SLOTS),
        (_SCORE,),
        (),
        "-|k|; unit j is row j of the slot, R = Hkv",
        "arXiv 2406.11430",
    ),
    Op(
        "KeyDiffScore",
        "Keys unlike the mean key are kept.",
        (_KEYS, _IDS, _SLOTS),
        (_SCORE,),
        (),
        "-cos(k, mean over the row's units of k / |k|); unit j is row j of the slot, R = Hkv",
        "arXiv 2504.15364",
    ),
    Op(
        "NestedKVScore",
        "Anomaly of a key against three time scales, routed by their disagreement.",
        (_KEYS, _IDS, _SLOTS),
        (_SCORE,),
        (
            Attr("window", 64, 1, 65536, "tokens of the current memory"),
            Attr(
                "block_div", 32, 1, 65536, "episodic block = clip(floor(N / block_div), min, max)"
            ),
            Attr("block_min", 128, 1, 65536, "shortest episodic block"),
            Attr("block_max", 256, 1, 65536, "longest episodic block"),
            Attr("tail", 0.1, 0.0, 0.5, "p, share of tokens at each end that measures a scale"),
            Attr("beta", 3.0, 0.0, 1e3, "temperature of the blend"),
            Attr("prior_stable", 0.4, 0.0, 1.0, "prior weight of the stable memory"),
            Attr("prior_episodic", 0.4, 0.0, 1.0, "prior weight of the episodic memory"),
            Attr("prior_current", 0.2, 0.0, 1.0, "prior weight of the current memory"),
            Attr("kappa", 10.0, 0.0, 1e3, "sharpness of the gate"),
            Attr("tau", 0.6, 0.0, 1.0, "threshold of the gate"),
            Attr("adaptive", 1, 0, 1, "0: the blend keeps the prior weights (sum 1)"),
            Attr("gate", 1, 0, 1, "0: no routing to the strongest memory"),
            Attr("continuum", 1, 0, 1, "0: the stable memory alone, neither scaled nor blended"),
        ),
        "k scaled to length 1; mu of all units, of the unit's block, of the last `window` units; "
        "a_k = -cos(k, mu_k), min-max per row (mm; 0 where the span is below 1e-5); "
        "w = softmax(log prior + beta * (mean of the top p - mean of the bottom p of a_k)), "
        "p = max(1, floor(tail * N + 1e-3)); "
        "s = std of the three, s' = max(0, mm(s) - mean mm(s)); "
        "alpha = sigmoid(kappa * (s' - tau)); score = (1 - alpha) * sum w_k a_k + alpha * max a_k; "
        "N counts the row's valid units; unit j is row j of the slot, R = Hkv, rows in order",
        "arXiv 2605.26678, Eq. 5-15",
    ),
    Op(
        "WindowScore",
        "Attention of the newest queries to each token, pooled over neighbours.",
        (_WINDOW, _KEYS, _IDS, _SEEN, _SLOTS),
        (_SCORE,),
        (
            Attr("window_reduce", 0, 0, 2, "over the W queries", REDUCE),
            Attr("group_reduce", 0, 0, 2, "over the query heads of a row", REDUCE),
            Attr("pool_size", 1, 1, 63, "odd width of the average over neighbouring rows"),
            Attr("shared", 0, 0, 1, "1: all query heads give one row (R = 1), else R = Hkv"),
        ),
        "group_reduce(pool(window_reduce(softmax(Q K^T / sqrt(D))))), causal; tokens of the window "
        "itself count as 0 in the pool, which sums pool_size neighbours / pool_size, zeros "
        "beyond the ends; unit j is row j of the slot",
        "SnapKV arXiv 2404.14469; TOVA arXiv 2401.06104; MorphKV arXiv 2503.00979",
    ),
    Op(
        "AccumUpdate",
        "Attention that each cached token has received from all queries so far.",
        (
            Tensor("accum", "float32", ("B", "Hkv", "C"), "attention mass so far"),
            Tensor("queries", "T", ("B", "S", "Hq*D"), "rotated queries of the step"),
            _KEYS,
            Tensor("past_lens", "int32", ("B", "Rl"), "valid rows before the step"),
            _N_NEW,
        ),
        (Tensor("accum_out", "float32", ("B", "Hkv", "C"), "with this step's queries"),),
        (),
        "accum_j (0 for new rows) + sum over the step's queries and the group's heads of the "
        "causal softmax(q K^T / sqrt(D))_j; 0 at rows that are not valid",
        "H2O, arXiv 2306.14048",
    ),
    Op(
        "QueryStatsUpdate",
        "Running mean and second moment of the queries before rotation, sinks left out.",
        (
            _MEAN,
            _MOMENT,
            Tensor("queries", "T", ("B", "S", "Hq*D"), "queries of the step before rotation"),
            Tensor("first_position", "int32", ("B",), "true position of the step's first token"),
            _N_NEW,
        ),
        (
            Tensor("mean_out", "float32", ("B", "Hq", "D"), "with this step's queries"),
            Tensor("moment_out", "float32", ("B", "Hq", "D", "D"), "with this step's queries"),
        ),
        (Attr("sink_tokens", 4, 0, INT_MAX, "first positions that do not count"),),
        "mean and sum of (q - mean)(q - mean)^T over all tokens at position >= sink_tokens, merged "
        "as in Chan et al.; the earlier count is max(0, first_position - sink_tokens); where it is "
        "0 and n_new is not, the earlier state is not read",
        "Expected Attention, arXiv 2510.00636",
    ),
    Op(
        "ExpectedAttentionScore",
        "Attention that future queries, taken as Gaussian, are expected to pay.",
        (
            _MEAN,
            _MOMENT,
            Tensor("inv_freq", "float32", ("Dh",), "inverse frequencies of the rotation, D / 2"),
            _KEYS,
            _VALUES,
            _IDS,
            _SEEN,
            _SLOTS,
        ),
        (_SCORE,),
        (
            Attr("n_future", 512, 1, 65536, "future positions whose rotation is averaged"),
            Attr("sink_tokens", 4, 0, INT_MAX, "first positions that the statistics leave out"),
            Attr("epsilon", 0.0, 0.0, 1.0, "added to the probability"),
            Attr("use_covariance", 1, 0, 1, "0: the mean query alone"),
            Attr("use_vnorm", 1, 0, 1, "0: without |v|"),
            Attr("rope_factor", 1.0, 0.0, 1e3, "factor on cos and sin"),
        ),
        "p = softmax over non-sink units of mu' k / sqrt(D) + k^T cov' k / (2 D), mu' = M mu, "
        "cov' = M cov M^T, M = mean rotation of the next n_future positions, cov = moment / count; "
        "score = mean over the group of (p + epsilon) * |v|; sinks score 0",
        "Expected Attention, arXiv 2510.00636",
    ),
)

TABLE: dict[str, Op] = {op.name: op for op in OPS}
