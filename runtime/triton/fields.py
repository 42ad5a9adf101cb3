"""The inputs and outputs of the Triton model: one table for configuration, parser and docs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One tensor: Triton's data type without TYPE_, and whether it holds a list or one value."""

    name: str
    dtype: str
    meaning: str
    many: bool = False

    @property
    def dims(self) -> int:
        """The one dimension that the configuration states; -1 is any length."""
        return -1 if self.many else 1


#: All are optional to Triton; a request gives text_input or input_ids.
INPUTS = (
    Field("text_input", "STRING", "the prompt"),
    Field("input_ids", "INT32", "the prompt as token ids, instead of text_input", many=True),
    Field("max_tokens", "INT32", "longest answer, tokens"),
    Field("stream", "BOOL", "send the text piece by piece; else one response"),
    Field("stop_words", "STRING", "end before any of these texts", many=True),
    Field("bad_words", "STRING", "texts that must not be generated", many=True),
    Field("temperature", "FP32", "0 is greedy"),
    Field("top_k", "INT32", "sample among the k likeliest; 0 is off"),
    Field("top_p", "FP32", "sample among the likeliest that sum to p; 1 is off"),
    Field("min_p", "FP32", "least share of the likeliest's probability; 0 is off"),
    Field("repetition_penalty", "FP32", "above 1: repeat prompt and answer less"),
    Field("presence_penalty", "FP32", "above 0: repeat the answer less"),
    Field("frequency_penalty", "FP32", "above 0: the oftener, the less"),
    Field("seed", "UINT64", "sampling seed"),
    Field("random_seed", "UINT64", "older name of seed"),
    Field("ignore_eos", "BOOL", "go on past the end of the text"),
    Field("return_log_probs", "BOOL", "return log_probs"),
    Field("exclude_input_in_output", "BOOL", "leave the prompt out of an unstreamed text_output"),
    Field("density", "FP32", "share of the prompt to keep; default: the engine's"),
    Field("budget_tokens", "INT32", "tokens to keep, instead of density"),
    Field("min_coverage", "FP32", "raise the budget until evictions keep this share of the score"),
    Field("eviction_seed", "UINT64", "seed of policies that draw; default: the sampling seed"),
    Field("session_id", "STRING", "go on from what this session has said; a new id begins one"),
    Field("session_turn", "INT32", "refuse unless this is the session's next turn; the first is 1"),
    Field("pin", "INT32", "prompt tokens never evicted: start, end, start, end ...", many=True),
    Field("return_eviction_stats", "BOOL", "return what was kept and what it takes"),
)

#: The last response holds all of them that were asked for, those before it text_output only.
OUTPUTS = (
    Field("text_output", "STRING", "the text, or its next piece"),
    Field("finish_reason", "STRING", "stop or length"),
    Field("num_input_tokens", "UINT32", "tokens of the prompt"),
    Field("num_output_tokens", "UINT32", "tokens of the answer"),
    Field("session_turn", "INT32", "number of the session's turn"),
    Field("output_ids", "INT32", "the answer's token ids, where input_ids was given", many=True),
    Field("log_probs", "FP32", "natural log of each token's probability", many=True),
    Field("kept_tokens", "INT32", "tokens in the cache at the end"),
    Field("kv_bytes", "INT64", "bytes of the cache that they take"),
    Field("coverage", "FP32", "share of the score that was kept; absent where undefined"),
    Field("cached_tokens", "INT32", "prompt tokens that were not read anew"),
    Field("eviction_seed", "UINT64", "the seed that was used"),
)
