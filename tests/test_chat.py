import json
import re
from datetime import datetime

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvsift.builder.errors import ModelError, UsageError
from kvsift.runtime.chat import ChatTemplate, encode_chat

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<s>system
be kind</s>
    {% endif %}
<s>{{ message['role'] }}
{{ message['content'] }}</s>
{% endfor %}
{% if add_generation_prompt %}
<s>assistant
{% endif %}
"""
USER = [{"role": "user", "content": "Hi <b> & é"}]


def save(directory, template=None, **config):
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_text_template_with_trimmed_blocks(tmp_path):
    template = ChatTemplate.load(save(tmp_path, CHATML))
    text = "<s>system\nbe kind</s>\n<s>user\nHi <b> & é</s>\n"
    assert template.render(USER, add_generation_prompt=False) == text
    assert template.render(USER) == text + "<s>assistant\n"


def test_file_wins_and_keeps_the_special_tokens(tmp_path):
    save(tmp_path, "from config", bos_token="<bos>", eos_token={"content": "<eos>"}, pad_token=None)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}file{{ eos_token }}{{ pad_token }}"
    )
    assert ChatTemplate.load(tmp_path).render(USER) == "<bos>file<eos>"
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.load(tmp_path).render(USER) == "file"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    save(tmp_path, named)
    assert ChatTemplate.load(tmp_path).render(USER) == "d"
    assert ChatTemplate.load(tmp_path, "tool_use").render(USER) == "t"
    with pytest.raises(UsageError, match=r"unknown chat template 'tool'.*did you mean 'tool_use'"):
        ChatTemplate.load(tmp_path, "tool")


def test_helpers_of_templates(tmp_path):
    source = (
        "{{ tools | tojson }}|{{ tools | tojson(indent=1) }}|{{ strftime_now('%Y') }}|"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    out = ChatTemplate(source).render([*USER, *USER], tools={"a": "<é>"})
    assert out == '{"a": "<é>"}|{\n "a": "<é>"\n}|' + f"{datetime.now().year}|Hi <b> & é"


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": []}, None])
def test_no_template_names_the_fix(tmp_path, config):
    if config is not None:
        save(tmp_path, **config)
    with pytest.raises(UsageError, match=r"^no chat template in .*; use a plain prompt, or put"):
        ChatTemplate.load(tmp_path)


def test_the_template_may_refuse():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match=r"refuses these messages: roles must alternate \(roles"):
        template.render(USER)
    with pytest.raises(UsageError, match="refuses these messages"):
        ChatTemplate("{{ messages[0]['content'] + 1 }}").render(USER)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "x"}], [{"role": 1}]])
def test_bad_messages(messages):
    with pytest.raises(UsageError, match=r"no messages|has no role"):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set _ = cycler.__init__.__globals__.os.system('true') %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source):
    with pytest.raises(UsageError):
        ChatTemplate(source).render(USER)


def test_messages_are_left_alone():
    messages = [dict(USER[0])]
    with pytest.raises(UsageError):
        ChatTemplate("{{ messages.clear() }}").render(messages)
    assert messages == USER


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "must hold a JSON object"),
        ('{"chat_template": [{"name": "x"}]}', "must be a text or a list of"),
        ('{"chat_template": "{% if %}"}', "is not valid"),
    ],
)
def test_damaged_config(tmp_path, content, message):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        ChatTemplate.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_template_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot read"):
        ChatTemplate.load(tmp_path)


def test_templated_text_gets_no_second_bos():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "hi": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer.encode("<s> hi").ids == [0, 0, 1]
    assert encode_chat(tokenizer, "<s> hi") == [0, 1]
