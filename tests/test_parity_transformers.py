"""Logits, greedy text, tokens and chat prompts against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import MODELS, Engines, Trace, prompt, request, run_and_inspect
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvsift.builder.weights import open_model
from kvsift.runtime.chat import ChatTemplate, encode_chat

pytestmark = pytest.mark.parity
FORMS = ("gqa", "portable")
#: Seven prompt chunks of 64, the last one partial.
CHUNKS = {"chunk": 64}
NEW = 100
LONG_TEXT = (
    "The lighthouse keeper wrote one page a day. On Monday he described the weather, on Tuesday "
    "the ships, and on Wednesday he wrote about a seal that had learned to open the kitchen door. "
) * 8


def ours(form: str) -> dict[str, Any]:
    return {"attention": form, "all_logits": True}


def our_run(engines: Engines, model: str, form: str, tokens: list[int]) -> Trace:
    engine = engines("full", model=model, limits=CHUNKS, build_options=ours(form))
    return run_and_inspect(engine, [request(tokens, NEW)])[0]


def their_logits(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        made: torch.Tensor = model(torch.tensor([tokens])).logits
    return made[0].numpy()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> PreTrainedModel:
    """The default model, read out of its GGUF file by transformers itself."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [m for m in MODELS if m not in ("tiny", "long")])
def test_tiny_models(engines: Engines, model: str, form: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        engines.model(model), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = prompt(401)
    trace = our_run(engines, model, form, tokens)
    assert [len(rows) for rows in trace.prompt_logits] == [64] * 6 + [17]
    want = their_logits(theirs, [*tokens, *trace.tokens[:-1]])
    np.testing.assert_allclose(np.concatenate(trace.prompt_logits), want[:401], atol=1e-3, rtol=0)
    np.testing.assert_allclose(np.array(trace.logits), want[400:], atol=1e-3, rtol=0)
    # Each token is their greedy choice after all before it, so their greedy text is the same.
    assert list(trace.tokens) == want[400:].argmax(-1).tolist()
    assert want.std() > 0.5  # a model whose logits are all alike would prove nothing


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("form", FORMS)
def test_smollm2(engines: Engines, smollm2: PreTrainedModel, form: str) -> None:
    engine = engines("full", model="smollm2", limits=CHUNKS, build_options=ours(form))
    tokens = [int(i) for i in engine.tokenizer.encode(LONG_TEXT).ids]
    assert 200 < len(tokens) < 600
    trace = our_run(engines, "smollm2", form, tokens)
    want = their_logits(smollm2, [*tokens, *trace.tokens[:-1]])
    got = np.concatenate([*trace.prompt_logits, np.array(trace.logits[1:])])
    np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)
    assert list(trace.tokens) == want[len(tokens) - 1 :].argmax(-1).tolist()


TEXTS = [
    "Hello world",
    "I don't, THEY'LL \u2014 na\u00efve caf\u00e9\n\n  x=1; y = 23 456",
    "\u65e5\u672c\u8a9e \U0001f469\u200d\U0001f52c \u0645\u0631\u062d\u0628\u0627 \t tabs\t",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return [i ** 2 for i in range(x)]  # squares\n\n\n",
    " lead and trail  ",
]


@pytest.mark.slow
@pytest.mark.smollm2
def test_tokens_of_smollm2(engines: Engines, smollm2_gguf: Path) -> None:
    """Both readers of the GGUF file agree.

    Not where a digit follows several spaces: transformers overlooks that the file asks for digits
    to be split off first.
    """
    source = open_model(smollm2_gguf)
    theirs = PreTrainedTokenizerFast.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name
    )
    directory = engines.root / "smollm2-tokenizer"
    directory.mkdir()
    source.save_tokenizer(directory)
    mine = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = mine.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert mine.encode(text).ids == loaded(text).input_ids
        assert mine.decode(ids, skip_special_tokens=False) == text
    template = ChatTemplate.load(directory)
    for messages in CONVERSATIONS:
        for prompt_too in (True, False):
            text = loaded.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt_too
            )
            assert template.render(messages, prompt_too) == text
            assert (
                theirs.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt_too
                )
                == text
            )
        ids = loaded.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert encode_chat(mine, template.render(messages)) == ids


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = [
    [say("user", "Hello")],
    [say("system", "Answer in one word."), say("user", "  Capital of France?\n")],
    [say("user", "1+1"), say("assistant", "2"), say("user", "<b> & {{ x }} 'quoted' \U0001f600")],
    [say("system", ""), say("user", "")],
]
