"""A tokenizer.json made from the vocabulary in a GGUF header."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvsift.builder.errors import ModelError
from kvsift.builder.weights.gguf_config import Metadata

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: The tail that the newer split patterns share: punctuation, newlines, spaces.
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"


@dataclass(frozen=True)
class PreType:
    """How a byte-level vocabulary splits text before merging."""

    pattern: str
    #: Every digit is a piece of its own, cut before the pattern applies.
    split_digits: bool = False
    #: A piece that is a token as a whole is taken as it is.
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = PreType(_WORDS)
_DIGITS = PreType(_WORDS, split_digits=True)
_QWEN2 = PreType(_HEAD + r"\p{N}|" + _TAIL)
_LLAMA3 = PreType(_HEAD + r"\p{N}{1,3}|" + _TAIL, ignore_merges=True, add_bos=True)
_TEKKEN = PreType(
    _CASED + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
PRE_TYPES: dict[str, PreType] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "tekken": _TEKKEN,
}
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"


def save_gguf_tokenizer(meta: Metadata, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the vocabulary in `meta`.

    ModelError for a vocabulary type or a pre-tokenizer that is not known.
    """
    tokens = _strings(meta, "tokenizer.ggml.tokens")
    tokenizer, add_bos = build_tokenizer(meta, tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.need(meta.arch("context_length"), int),
    }
    for name in ("bos", "eos", "unk", "pad"):
        index = _special_id(meta, name, len(tokens))
        config[f"{name}_token"] = None if index is None else tokens[index]
    template = meta.find("tokenizer.chat_template", str)
    if template:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(meta: Metadata, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of a GGUF vocabulary and whether encoding prepends BOS."""
    model = meta.need("tokenizer.ggml.model", str)
    types = meta.raw("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelError(
            f"{meta.file}: the vocabulary has {len(tokens)} tokens ({len(set(tokens))} distinct) "
            f"and {len(types)} token types; the file is damaged"
        )
    if model == "gpt2":
        tokenizer, default_bos = _byte_level(meta, tokens)
    elif model == "llama":
        tokenizer, default_bos = _sentencepiece(meta, tokens, types), True
    else:
        raise ModelError(
            f"{meta.file}: tokenizer model {model!r} is not supported; known: gpt2, llama"
        )
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    bos = _special_id(meta, "bos", len(tokens))
    add_bos = meta.get("tokenizer.ggml.add_bos_token", bool, default_bos) and bos is not None
    if add_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"],
            pair=[tokens[bos], "$A", tokens[bos], "$B"],
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer, add_bos


def _byte_level(meta: Metadata, tokens: list[str]) -> tuple[Tokenizer, bool]:
    pre = meta.get("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TYPES:
        raise ModelError(
            f"{meta.file}: pre-tokenizer {pre!r} is not known; known: "
            f"{', '.join(sorted(PRE_TYPES))}; use the model's Hugging Face directory instead"
        )
    kind = PRE_TYPES[pre]
    merges = [_pair(merge) for merge in _strings(meta, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    for left, right in merges:
        if not {left, right, left + right} <= vocab.keys():
            raise ModelError(
                f"{meta.file}: merge {left!r} {right!r} uses or makes a piece that is no token; "
                "the file is damaged"
            )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if kind.split_digits else []),
            pre_tokenizers.Split(Regex(kind.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.add_bos


def _sentencepiece(meta: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """Rebuild merges from the scores: the pair whose joined piece scores highest merges first."""
    scores = meta.raw("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{meta.file} has no score for every token; the file is damaged")
    ids = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], (left, right)))
    merges.sort()
    unknown = _special_id(meta, "unk", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[pair for *_, pair in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _strings(meta: Metadata, key: str) -> list[str]:
    value = meta.raw(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelError(f"{meta.file} has no {key}; use a file that carries its tokenizer")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _special_id(meta: Metadata, name: str, vocab_size: int) -> int | None:
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    value = meta.find(f"tokenizer.ggml.{key}_token_id", int)
    if value is not None and not 0 <= value < vocab_size:
        raise ModelError(
            f"{meta.file}: tokenizer.ggml.{key}_token_id is {value}; the vocabulary has "
            f"{vocab_size} tokens"
        )
    return value
