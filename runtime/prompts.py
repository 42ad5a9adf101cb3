"""Prompts to token ids: the tokenizer of a package, and what is refused."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from kvsift.builder.errors import CapacityError, PackageError, UsageError
from kvsift.builder.package import Manifest
from kvsift.runtime.params import check_text, prompt_ids
from kvsift.runtime.request import Request

#: Characters; some token of every vocabulary is longer.
_SHORT_TOKEN = 8


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return a package's tokenizer, which neither cuts nor pads; PackageError if it is broken."""
    path = directory / "tokenizer.json"
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise PackageError(f"{path} cannot be read ({error}); rebuild the engine") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(
    request: Request, tokenizer: Tokenizer, manifest: Manifest, *, goes_on: bool = False
) -> list[int]:
    """Return the prompt's token ids; UsageError if it is empty or too long.

    With `goes_on` it continues a text, so the tokenizer adds no special tokens.
    """
    if isinstance(request.prompt, str):
        check_length(request.prompt, tokenizer, manifest)
    ids = _ids(request, tokenizer, request.add_special_tokens and not goes_on)
    vocab, limits = manifest.model.vocab_size, manifest.limits
    positions = manifest.model.max_positions
    if not ids:
        raise UsageError("empty prompt: there is nothing to condition on; give some text")
    if wrong := next((i for i in ids if not 0 <= i < vocab), None):
        raise UsageError(f"token id {wrong} is outside the vocabulary [0, {vocab}); leave it out")
    if len(ids) > positions:
        raise CapacityError(
            f"the prompt has {len(ids)} tokens and the model has {positions} positions; shorten it"
        )
    if len(ids) > limits.max_input:
        raise CapacityError(
            f"the prompt has {len(ids)} tokens and the engine was built with --max-input "
            f"{limits.max_input}; shorten it or rebuild"
        )
    return ids


def check_length(text: str, tokenizer: Tokenizer, manifest: Manifest) -> None:
    """Raise CapacityError if `text` is longer than the longest prompt of the longest tokens.

    Tokenizing it to tell that it is too long would take 200 times its size in memory.
    """
    most = min(manifest.limits.max_input, manifest.model.max_positions)
    if len(text) <= most * _SHORT_TOKEN:
        return
    longest = max(map(len, tokenizer.get_vocab()))
    if len(text) > most * longest:
        raise CapacityError(
            f"the prompt has {len(text)} characters, and the engine's longest prompt of {most} "
            f"tokens (--max-input) has {most * longest} at most; shorten it"
        )


def _ids(request: Request, tokenizer: Tokenizer, special: bool) -> list[int]:
    """Return the ids of the prompt, none for the empty text; UsageError if it is neither."""
    prompt = request.prompt
    if not isinstance(prompt, str):
        return prompt_ids(prompt)
    encoded = tokenizer.encode(check_text("the prompt", prompt), add_special_tokens=special)
    return list(encoded.ids) if prompt else []
