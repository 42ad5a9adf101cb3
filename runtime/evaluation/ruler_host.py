"""Runs a generator of `long_context_eval` with a tokenizer file in the place of its own tokenizers.

`python -m kvsift.runtime.evaluation.ruler_host SCRIPT TOKENIZER_JSON [OPTIONS OF THE SCRIPT]`.
The generators are programs that read their options when they start, so each runs by itself. Where
NLTK has no data for splitting sentences, its untrained splitter takes their place.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

#: The names under which the generators import their tokenizers.
TOKENIZER_MODULES = ("tokenizer", "long_context_eval.data.tokenizer")


class PlainTokenizer:
    """What a generator asks of a tokenizer."""

    def __init__(self, file: str) -> None:
        self._tokenizer = Tokenizer.from_file(file)
        self._tokenizer.no_truncation()

    def text_to_tokens(self, text: str) -> list[str]:
        """Return the tokens of a text, none added."""
        tokens: list[str] = self._tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens


def main() -> None:
    """Put the tokenizer in place and run the script as a program."""
    script, file, *options = sys.argv[1:]
    tokenizer = PlainTokenizer(file)
    module = ModuleType(TOKENIZER_MODULES[0])
    module.select_tokenizer = lambda kind, path: tokenizer  # type: ignore[attr-defined]
    sys.modules.update(dict.fromkeys(TOKENIZER_MODULES, module))
    _mend_sentences()
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))  # as for any program
    runpy.run_path(script, run_name="__main__")


def _mend_sentences() -> None:
    if importlib.util.find_spec("nltk") is None:  # the generator will say so if it needs it
        return
    import nltk.tokenize
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    module: Any = nltk.tokenize
    try:
        module.sent_tokenize("One. Two.")
    except LookupError:
        module.sent_tokenize = PunktSentenceTokenizer().tokenize


if __name__ == "__main__":
    main()
