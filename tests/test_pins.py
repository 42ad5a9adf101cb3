"""Pinned roles: the tokens of what a role says, whatever the template puts around it."""

from __future__ import annotations

from typing import Any

import pytest
from engines import Engines
from kept import engine_of

from kvsift import LLM
from kvsift.builder.errors import CapacityError, UsageError
from kvsift.runtime.chat import ChatTemplate
from kvsift.runtime.engine import Request
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.pins import role_pins

TALK = [
    {"role": "system", "content": " be kind to the é user\n"},
    {"role": "user", "content": "system"},
    {"role": "assistant", "content": "user"},
    {"role": "user", "content": "be kind to the user"},
]
TRIMMED = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("source", [None, TRIMMED])
@pytest.mark.parametrize("roles", ["system", ("user",), ("system", "assistant")])
def test_pins_are_the_tokens_of_the_contents(engines: Engines, source: Any, roles: Any) -> None:
    engine = engine_of(engines, "nexus")
    template = ChatTemplate(source) if source else ChatTemplate.load(engine.directory)
    text = template.render(TALK)
    pins = role_pins(template.render, engine.tokenizer, TALK, roles)
    ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
    wanted = [m["content"] for m in TALK if m["role"] in roles]
    assert len(pins) == len(wanted)
    for (start, end), content in zip(pins, wanted, strict=True):
        assert content.strip() in engine.tokenizer.decode(ids[start:end], skip_special_tokens=False)
        fewer = engine.tokenizer.decode(ids[start + 1 : end], skip_special_tokens=False)
        assert content.strip() not in fewer


def test_a_pinned_role_survives(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    filler = "the rain in spain stays mainly in the plain " * 10
    talk = [
        {"role": "user", "content": filler},
        {"role": "system", "content": "remember the number four"},
        {"role": "user", "content": filler},
    ]
    evict = EvictionParams(density=0.2, min_budget_tokens=0)
    with LLM(engine.directory, threads=1) as llm:
        asked = [
            llm.chat_request(talk, SamplingParams(max_tokens=1), evict, pin_roles=roles)
            for roles in ((), ("system",))
        ]
    (start, end) = asked[1].eviction.pin[0]
    for r, all_there in zip(asked, (False, True), strict=True):
        sequence = engine.prepare(0, r)
        reading = engine.begin(sequence, 0)
        while reading.step() is None:
            pass
        held = set(sequence.slot.ids.ravel().tolist())
        assert (set(range(start // 8, -(-end // 8))) <= held) == all_there


@pytest.mark.parametrize(
    ("source", "roles", "words"),
    [
        (TRIMMED, "tool", "no message has the pinned role 'tool'; roles here: assistant, system"),
        ("{{ messages[0].content | upper }}", "system", "rewrites the content of a system message"),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", "user", "rewrites the content"),
    ],
)
def test_what_cannot_be_pinned(engines: Engines, source: str, roles: str, words: str) -> None:
    engine = engine_of(engines, "nexus")
    with pytest.raises(UsageError, match=words):
        role_pins(ChatTemplate(source).render, engine.tokenizer, TALK, roles)


def test_pins_beyond_the_budget(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    evict = EvictionParams(budget_tokens=80, pin=[(0, 120)])
    with pytest.raises(CapacityError, match=r"need a budget of 152 .* and it is 80; pin less, or"):
        engine.generate([Request(list(range(3, 300)), eviction=evict)])
