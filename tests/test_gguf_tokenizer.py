"""Tokenizers made from GGUF vocabularies, and those copied from directories."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, SPECIAL, tokenizer, write_gguf, write_hf
from tokenizers import Tokenizer

from kvsift.builder.errors import ModelError
from kvsift.builder.weights import open_model

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def saved(path: Path, directory: Path) -> tuple[Tokenizer, dict[str, Any]]:
    directory.mkdir(exist_ok=True)
    open_model(path).save_tokenizer(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    return Tokenizer.from_file(str(directory / "tokenizer.json")), config


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf")
    return saved(write_gguf(path / "m.gguf"), path)[0]


@given(TEXT)
@settings(max_examples=100, deadline=None)
def test_byte_level_equals_the_original(byte_level: Tokenizer, text: str) -> None:
    chat = f"{SPECIAL[0]}user\n{text}{SPECIAL[1]}"
    ids = byte_level.encode(chat).ids
    assert ids == tokenizer().encode(chat).ids
    assert byte_level.decode(ids, skip_special_tokens=False) == chat
    if not any(token in text for token in SPECIAL):
        assert byte_level.decode(ids) == f"user\n{text}"


def test_config_carries_template_and_special_tokens(tmp_path: Path) -> None:
    made, config = saved(write_gguf(tmp_path / "m.gguf"), tmp_path)
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == SPECIAL
    assert config["add_bos_token"] is False
    assert made.encode("the").ids == made.encode("the", add_special_tokens=False).ids


@pytest.mark.parametrize(("pre", "flag", "want"), [
    ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
    ("llama-bpe", False, False),
])  # fmt: skip
def test_bos_is_prepended_once_and_only_on_request(
    pre: str, flag: bool | None, want: bool, tmp_path: Path
) -> None:
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    made, config = saved(write_gguf(tmp_path / "m.gguf", metadata=keys), tmp_path)
    assert config["add_bos_token"] is want
    plain = made.encode("the sea", add_special_tokens=False).ids
    assert 0 not in plain
    assert made.encode("the sea").ids == [0] * want + plain


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 1234", "\n\n\n ", " x", "'", "S"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "\n\n\n ", " x", "'", "S"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "\n\n\n", " ", " x", "'S"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", "\n\n\n", " ", " x", "'S"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", "\n\n\n", " ", " x", "'S"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(
    pre: str, pieces: list[str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": pre})
    made, _ = saved(path, tmp_path)
    split = made.pre_tokenizer.pre_tokenize_str("it's 1234\n\n\n  x'S")
    text = "it's 1234\n\n\n  x'S"
    assert [text[a:b] for _, (a, b) in split] == pieces


#: "he" scores above "el", so that hello is he + l + lo and not h + el + lo.
PIECES = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{i:02X}>": 6 for i in range(256)}}
WORDS = ["he", "lo", "el", "\u2581he", "ell", "llo", "\u2581", *"helo w"]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [*PIECES, *WORDS],
    "tokenizer.ggml.token_type": [*PIECES.values(), *[1] * len(WORDS)],
    "tokenizer.ggml.scores": [0.0] * len(PIECES) + [-float(i) for i in range(len(WORDS))],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": None,
    "tokenizer.ggml.add_bos_token": None,
}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm")
    return saved(write_gguf(path / "m.gguf", metadata=SPM), path)[0]


def by_score(text: str) -> list[str]:
    """SentencePiece's BPE: join the neighbours whose piece scores highest, leftmost first."""
    rank = {word: i for i, word in enumerate(WORDS)}
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = enumerate(itertools.pairwise(symbols))
        joined = [(rank.get(a + b, 99), i) for i, (a, b) in pairs]
        best, at = min(joined, default=(99, 0))
        if best == 99:
            break
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    tokens: list[str] = []
    for symbol in symbols:
        known = symbol in rank
        tokens += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return tokens


@given(st.text("helo w\u00e9", min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_merges_by_score(pieces: Tokenizer, text: str) -> None:
    encoded = pieces.encode(text, add_special_tokens=False)
    assert encoded.tokens == by_score(text)
    assert pieces.decode(encoded.ids) == text
    assert pieces.encode(text).ids == [1, *encoded.ids]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "'martian' is not known; known: .*smollm"),
        ({"tokenizer.ggml.pre": None}, "'default' is not known"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported; known: gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["q\u0120 zz"]}, "damaged"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "damaged"),
        ({**SPM, "tokenizer.ggml.scores": None}, "no score"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id is 9999"),
    ],
)
def test_unusable_vocabularies_are_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=keys)
    with pytest.raises(ModelError, match=message) as caught:
        saved(path, tmp_path)
    assert "\n" not in str(caught.value)


def test_directory_files_are_copied(tmp_path: Path) -> None:
    write_hf(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("x")
    made, config = saved(tmp_path / "m", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "x"
    assert config["chat_template"] == CHAT_TEMPLATE
    assert made.get_vocab_size() == 512
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json; make one"):
        saved(tmp_path / "m", tmp_path / "out")


def test_default_model_splits_digits_and_keeps_text(smollm2_gguf: Path, tmp_path: Path) -> None:
    made, config = saved(smollm2_gguf, tmp_path)
    assert made.encode("in 2024").tokens == ["in", "\u0120", "2", "0", "2", "4"]
    text = (
        "<|im_start|>user\ncaf\u00e9 \u2192 x=12.5\n\n   def f():\n\treturn \U0001f642<|im_end|>\n"
    )
    ids = made.encode(text).ids
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert made.decode(ids, skip_special_tokens=False) == text
    assert "<|im_start|>" in config["chat_template"]
    assert config["add_bos_token"] is False
