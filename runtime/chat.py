"""Chat templates: from messages to the one text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from kvsift.builder.errors import ModelError, UsageError, unknown_name

Message = Mapping[str, Any]
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class _GenerationTag(jinja2.ext.Extension):
    """Renders {% generation %} blocks, which mark the answers for training, as their content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON without HTML escapes: the text is for a model, not for a page."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment that templates of models expect; a model cannot reach out of it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's chat template with its special tokens; ModelError if it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"the chat template is not valid: {_line(error)}; mend chat_template in "
                f"{CONFIG_FILE} or put a {TEMPLATE_FILE} beside it"
            ) from error

    @classmethod
    def load(cls, directory: Path, name: str = "default") -> ChatTemplate:
        """Return the template of a model or package directory.

        chat_template.jinja wins over tokenizer_config.json, whose chat_template is a text or a
        list of named ones (of which `name` is taken). UsageError if there is none or no such
        name, ModelError if a file cannot be read.
        """
        config = _read_config(directory / CONFIG_FILE)
        tokens = {key: _token_text(config.get(key)) for key in config if key.endswith("_token")}
        special = {key: text for key, text in tokens.items() if text is not None}
        file = directory / TEMPLATE_FILE
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), special)
            except (OSError, UnicodeError) as error:
                raise ModelError(f"cannot read {file}: {_line(error)}; copy it again") from error
        return cls(_pick(config.get("chat_template"), name, directory), special)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text for `messages`, each with "role" and "content".

        `variables` (tools, documents, enable_thinking ...) go to the template as they are.
        UsageError if a message has no role or the template refuses the messages.
        """
        if not messages or not isinstance(messages, Sequence):
            raise UsageError(
                f"no messages in {messages!r:.60}; give a list with at least one: "
                '[{"role": "user", "content": "..."}]'
            )
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UsageError(
                    f"message {number} has no role, got {message!r:.60}; "
                    'write {"role": "user", "content": "..."}'
                )
        values = {**self.special_tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **values
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UsageError(
                f"the chat template refuses these messages: {_line(error)} (roles: {roles}); "
                "change the messages or use a plain prompt"
            ) from error


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a rendered template, special tokens its own: no second BOS."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _read_config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, empty if there is none; ModelError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {_line(error)}; copy it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _pick(template: object, name: str, directory: Path) -> str:
    """Return the template text out of tokenizer_config.json's chat_template."""
    if isinstance(template, str):
        return template
    if isinstance(template, list) and template:
        try:
            named = {str(entry["name"]): str(entry["template"]) for entry in template}
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"chat_template in {directory / CONFIG_FILE} must be a text or a list of "
                '{"name", "template"}'
            ) from error
        if name not in named:
            raise unknown_name("chat template", name, named)
        return named[name]
    raise UsageError(
        f"no chat template in {directory}; use a plain prompt, or put the model's "
        f"{TEMPLATE_FILE} there"
    )


def _token_text(value: object) -> str | None:
    """Return a special token's text; older files wrap it in an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _line(error: Exception) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
