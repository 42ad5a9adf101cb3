"""From token ids to text as it grows: no split characters, no stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Decodes token ids one by one; the pieces joined are the text of all ids together.

    U+FFFD at the end is held back, since the next token may complete that character; so
    it comes out only where bytes are wrong for good. Each decode covers the tokens of the
    previous piece as well, because what a token says can depend on what stands before it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder().items()
            self._skipped = frozenset(i for i, token in added if token.special)
        self._ids: list[int] = []  # the previous piece's tokens, then the undecided ones
        self._context = 0  # how many of them belong to the previous piece
        self._context_text = ""
        self._given = ""  # what has been given out of the undecided tokens' text

    def push(self, token: int) -> str:
        """Return the text that becomes certain with `token`, often one token's, maybe empty."""
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        text = self._pending()
        certain = text.rstrip(REPLACEMENT)
        piece = ""
        if certain.startswith(self._given):
            piece = certain[len(self._given) :]
            self._given = certain
        if text and certain == text:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._context_text = self._decode(self._ids)
            self._given = ""
        return piece

    def finish(self) -> str:
        """Return what is held back; an incomplete character comes out as U+FFFD."""
        text = self._pending()
        piece = text[len(self._given) :]
        self._ids, self._context, self._context_text, self._given = [], 0, "", ""
        return piece

    def _pending(self) -> str:
        """Return the text of the undecided tokens."""
        text = self._decode(self._ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # Byte-fallback decoders spoil a whole run of byte tokens for one wrong byte.
        return self._decode(self._ids[self._context :])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopMatcher:
    """Passes text on up to the first stop string, holding back what may become one.

    The stop string that is complete first wins (of several, the longest), so the result does not
    depend on how the text is cut into pieces. `matched` is that string, None before.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain to stand before any stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop]
        found = [hit for hit in found if hit[0] >= len(hit[2])]  # find gave -1 otherwise
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back, now that no stop string can follow."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stop):
                return size
        return 0


class TextStream:
    """The text of one answer, from token ids, cut before the first stop string.

    After a stop string nothing more comes out. `text` is all that came out so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stop)
        self._pieces: list[str] = []

    def push(self, token: int) -> str:
        """Return the new text that `token` makes certain, maybe empty."""
        return self._emit(self._matcher.push(self._decoder.push(token)))

    def finish(self) -> str:
        """Return the rest of the text at the end of the answer; a second call returns ""."""
        last = self._matcher.push(self._decoder.finish())
        return self._emit(last + self._matcher.finish())

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.matched is not None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
