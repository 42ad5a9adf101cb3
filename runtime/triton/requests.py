"""From the tensors of a Triton request to the request of an engine, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import UsageError, unknown_name
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.request import Request
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.triton.fields import INPUTS, OUTPUTS, Field

Tensor = NDArray[Any]
_INPUTS = {field.name: field for field in INPUTS}
_NUMPY = {
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "STRING": np.object_,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}
#: Which input sets which parameter, where the names differ.
_SAMPLING = {"stop_words": "stop"}
_FLAGS = ("stream", "return_log_probs", "exclude_input_in_output", "return_eviction_stats")
#: Parameters that Triton itself adds begin so.
_OWN_PREFIX = "triton_"
#: The generate endpoint's name of a request, which the server 2.51 hands on as a parameter.
_REQUEST_ID = "id"


class NoPromptError(UsageError):
    """A request without any prompt, with which a health check asks whether the model answers."""


@dataclass(frozen=True)
class Asked:
    """A parsed request: what the engine gets, and how the answer is to be sent."""

    request: Request
    stream: bool
    #: Put before the text of an answer in one piece.
    echo: str
    stats: bool
    ids: bool


def parse(tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Asked:
    """Return what a request asks for; UsageError naming the input that is wrong.

    `tensors` by input name, of any rank; `parameters` may give single values instead, as vLLM's
    clients do. An input wins over the parameter of its name.
    """
    values = {name: _from_parameter(name, value) for name, value in parameters.items()
              if not name.startswith(_OWN_PREFIX) and name != _REQUEST_ID}  # fmt: skip
    values.update({name: _from_tensor(_INPUTS[name], data) for name, data in tensors.items()})
    flags = {name: bool(values.pop(name, False)) for name in _FLAGS}
    text, ids = values.pop("text_input", None), values.pop("input_ids", None)
    where = "a request has a prompt in text_input or in input_ids, got"
    if text is None and ids is None:
        raise NoPromptError(f"{where} neither; give one of them")
    if text is not None and ids is not None:
        raise UsageError(f"{where} both; give one of them")
    if "random_seed" in values:
        values.setdefault("seed", values.pop("random_seed"))
    session, turn = values.pop("session_id", None), values.pop("session_turn", None)
    if turn is not None and session is None:
        raise UsageError(f"session_turn {turn} is of no session; give session_id, too")
    if "pin" in values:
        values["pin"] = _spans(values["pin"])
    sampling: dict[str, Any] = {"logprobs": 0 if flags["return_log_probs"] else None}
    eviction: dict[str, Any] = {}
    for name, value in values.items():
        name = _SAMPLING.get(name, name)
        (eviction if name in EvictionParams.__dataclass_fields__ else sampling)[name] = value
    return Asked(
        Request(
            text if ids is None else ids,
            SamplingParams(**sampling),
            EvictionParams(**eviction),
            session_id=session,
            session_turn=turn,
        ),
        stream=flags["stream"],
        echo="" if text is None or flags["exclude_input_in_output"] else text,
        stats=flags["return_eviction_stats"],
        ids=ids is not None,
    )


def piece(text: str) -> dict[str, Any]:
    """Return the outputs of a response before the last."""
    return {"text_output": text}


def last(asked: Asked, text: str, result: GenerationResult) -> dict[str, Any]:
    """Return the outputs of the last response; `text` is the last piece of a stream."""
    outputs = {
        "text_output": text if asked.stream else asked.echo + result.text,
        "finish_reason": result.finish_reason,
        "num_input_tokens": result.prompt_tokens,
        "num_output_tokens": len(result.token_ids),
    }
    if result.session_turn is not None:
        outputs["session_turn"] = result.session_turn
    if asked.ids:
        outputs["output_ids"] = list(result.token_ids)
    if result.logprobs is not None:
        outputs["log_probs"] = [step.logprob for step in result.logprobs]
    if asked.stats:
        outputs["kept_tokens"] = result.kept_tokens
        outputs["kv_bytes"] = result.kv_bytes
        outputs["cached_tokens"] = result.cached_tokens
        outputs["eviction_seed"] = result.eviction_seed
        if result.coverage is not None:
            outputs["coverage"] = result.coverage
    return outputs


def tensors(outputs: Mapping[str, Any], batched: bool) -> dict[str, Tensor]:
    """Return outputs as tensors [n], or [1, n] for a model with a batch dimension."""
    made = {}
    for field in OUTPUTS:
        if field.name in outputs:
            value = outputs[field.name]
            values = value if field.many else [value]
            if field.dtype == "STRING":
                values = [text.encode() for text in values]
            array: Tensor = np.array(values, _NUMPY[field.dtype])
            made[field.name] = array.reshape(1, -1) if batched else array
    return made


def _from_tensor(field: Field, data: Tensor) -> Any:
    """Return a tensor's value, or the list of its values, as Python objects."""
    values = [_plain(field, value) for value in data.reshape(-1)]
    if field.many:
        # Clients send one empty string for "none".
        return [v for v in values if v != ""] if field.dtype == "STRING" else values
    if len(values) != 1:
        raise UsageError(f"{field.name} must be one value, got {len(values)}; send shape [1]")
    return values[0]


def _from_parameter(name: str, value: Any) -> Any:
    """Return the value of a request parameter, of a type that its input would have."""
    if name not in _INPUTS:
        raise unknown_name("input", name, _INPUTS)
    field = _INPUTS[name]
    if field.dtype == "BOOL" and not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {value!r:.60}; leave out the quotes")
    if field.dtype == "STRING" and not isinstance(value, str):
        raise UsageError(f"{name} must be a text, got {value!r:.60}; put it in quotes")
    return [value] if field.many and value != "" else value


def _plain(field: Field, value: Any) -> Any:
    if field.dtype == "STRING":
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{field.name} is not UTF-8 text (byte {error.start}); mend its encoding"
            ) from None
    if field.dtype == "FP32":
        # The number that was meant: 0.2, not the 0.200000003 of fp32, which may round a budget up.
        return float(str(np.float32(value)))
    return value.item()


def _spans(ends: list[int]) -> list[tuple[int, int]]:
    """Return pairs of a flat list."""
    if len(ends) % 2:
        raise UsageError(
            f"pin must hold pairs start, end, got {len(ends)} numbers; give an even count"
        )
    return list(zip(ends[::2], ends[1::2], strict=True))
