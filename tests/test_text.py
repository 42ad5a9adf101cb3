import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvsift.runtime.text import StopMatcher, TextStream

# The characters that stand for bytes: the printable ones themselves, then from 256 on.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PLAIN]
BYTE_CHARS = {b: chr(b) for b in _PLAIN} | {b: chr(256 + n) for n, b in enumerate(_REST)}
SAMPLES = [
    "Hello, world",
    "\U0001f469\u200d\U0001f52c lab",
    "\u65e5\u672c\u8a9e\u3067\u3059",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643",
    "a\x00b\x00",
    "\ufffd literal \ufffd\ufffd",
    "e\u0301 caf\u00e9\n\n\t x",
    "",
]


def byte_level():
    """One token per byte, some that cross characters, and a special token."""
    vocab = {char: index for index, char in enumerate(BYTE_CHARS.values())}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ("\u65e5\u672c", "\u672c\u8a9e", "ee fo", "\U0001f469\u200d", "  "):
        for chunk, _ in level.pre_tokenize_str(text):
            for piece in (chunk, chunk[1:], chunk[:-1], chunk[2:-1]):
                if piece:
                    vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback():
    """A sentencepiece-like tokenizer: words with a leading mark, and bytes for the rest."""
    words = ["<unk>", "</s>", "\u2581", "\u2581hello", "\u2581world", "lo", "!", "\u3042"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab.update({f"<0x{byte:02X}>": len(words) + byte for byte in range(256)})
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


LEVEL, FALLBACK = byte_level(), byte_fallback()


def ids_of(text):
    return [LEVEL.token_to_id(BYTE_CHARS[byte]) for byte in text.encode()]


def stream(tokenizer, ids, **options):
    """Push all ids; return the stream and its pieces, the last from finish()."""
    out = TextStream(tokenizer, **options)
    pieces = [out.push(i) for i in ids]
    return out, [*pieces, out.finish()]


@pytest.mark.parametrize("text", SAMPLES)
def test_bytes_one_by_one(text):
    out, pieces = stream(LEVEL, ids_of(text))
    assert "".join(pieces) == out.text == text
    if "\ufffd" not in text:
        assert pieces[-1] == ""  # nothing certain is held back to the end
        assert len([piece for piece in pieces if piece]) == len(text)


@settings(max_examples=150)
@given(st.lists(st.integers(0, LEVEL.get_vocab_size() - 1), max_size=25), st.booleans())
def test_pieces_join_to_the_full_decode_byte_level(ids, skip):
    out, pieces = stream(LEVEL, ids, skip_special_tokens=skip)
    assert "".join(pieces) == out.text == LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150)
@given(
    st.lists(
        st.integers(0, 7).map(lambda i: [i])
        | st.text(max_size=4).map(lambda text: [8 + byte for byte in text.encode()]),
        max_size=8,
    )
)
def test_pieces_join_to_the_full_decode_byte_fallback(groups):
    ids = [i for group in groups for i in group]
    _, pieces = stream(FALLBACK, ids)
    assert "".join(pieces) == FALLBACK.decode(ids)


@settings(max_examples=100)
@given(st.text(max_size=12).filter(lambda text: "\ufffd" not in text), st.integers(0, 40))
def test_never_a_replacement_character_before_the_end(text, cut):
    ids = ids_of(text)[:cut]
    _, pieces = stream(LEVEL, ids)
    certain = "".join(pieces[:-1])
    assert "\ufffd" not in certain
    assert text.startswith(certain)
    assert pieces[-1] in ("", "\ufffd")


def test_wrong_bytes_come_out_as_soon_as_they_are_certain():
    wrong = LEVEL.token_to_id(BYTE_CHARS[0xFF])
    _, pieces = stream(LEVEL, [wrong, wrong, *ids_of("ab")])
    assert pieces == ["", "", "\ufffd\ufffda", "b", ""]
    # a lone lead byte among byte tokens does not spoil what came before it
    _, pieces = stream(
        FALLBACK, [8 + 0xE3, 8 + 0x81, 8 + 0x82, 8 + 0xE3, FALLBACK.token_to_id("!")]
    )
    assert pieces == ["", "", "\u3042", "", "\ufffd!", ""]


def test_special_tokens_are_skipped_and_do_not_eat_spaces():
    end, hello, world = (FALLBACK.token_to_id(t) for t in ("</s>", "\u2581hello", "\u2581world"))
    _, pieces = stream(FALLBACK, [hello, end, end, world, 99_999])
    assert pieces == ["hello", "", "", " world", "", ""]
    special, tool = LEVEL.token_to_id("<|end|>"), LEVEL.token_to_id("<tool>")
    assert stream(LEVEL, [special, tool])[0].text == "<tool>"
    assert stream(LEVEL, [special, tool], skip_special_tokens=False)[0].text == "<|end|><tool>"


def test_stop_string_across_tokens():
    out, pieces = stream(LEVEL, ids_of("one two three four"), stop=["ee fo"])
    assert out.text == "".join(pieces) == "one two thr"
    assert out.stopped
    assert out.push(ids_of("x")[0]) == ""
    assert out.finish() == ""


def test_what_only_looked_like_a_stop_string_is_given_back():
    out, pieces = stream(LEVEL, ids_of("three f"), stop=["ee fo"])
    assert pieces[-1] == "ee f"
    assert out.text == "three f"
    assert not out.stopped


def test_stop_string_at_the_incomplete_end():
    ids = ids_of("ab\u3042")[:-1]
    out, _ = stream(LEVEL, ids, stop=["b\ufffd"])
    assert out.text == "a"
    assert out.stopped


STOPS = st.lists(st.text("ab\u3042", min_size=1, max_size=4), max_size=4)


def stopped_by_definition(text, stops):
    """Read character by character; at the first stop string at the end, cut it off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=200)
@given(st.lists(st.text("ab\u3042", max_size=5), max_size=8), STOPS)
def test_stop_matching_does_not_depend_on_the_pieces(pieces, stops):
    matcher = StopMatcher(stops)
    shown = []
    text = "".join(pieces)
    expected = stopped_by_definition(text, stops)
    for piece in pieces:
        shown.append(matcher.push(piece))
        assert expected.startswith("".join(shown))  # nothing has ever to be taken back
    shown.append(matcher.finish())
    assert "".join(shown) == expected
    assert (matcher.matched is not None) == any(stop in text for stop in stops)
    assert not any(stop in expected for stop in stops)


@given(st.text("ab", max_size=20), STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None and shown != text:
        held = text[len(shown) :]
        assert any(stop.startswith(held) and stop != held for stop in stops)


@settings(max_examples=100)
@given(st.text("ab\u3042\U0001f52c", max_size=12), STOPS)
def test_stream_with_stop_strings(text, stops):
    out, pieces = stream(LEVEL, ids_of(text), stop=stops)
    assert "".join(pieces) == out.text == stopped_by_definition(text, stops)
