"""A chat template is a program: what it may take is bounded, and what it wrote is looked at."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.data import chats
from posttrain.data.chats import TemplateLimit, TemplateRefusal, write_chats
from posttrain.data.template import Template
from posttrain.models.tiny import CHAT_TEMPLATE, build_tokenizer
from posttrain.types import Prompt

ONE = [([{"role": "user", "content": "hi"}], True)]
NESTED = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = (
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
RECURSIVE = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
# What templates of models use: blocks, loop controls, filters, special tokens, generation marks.
USUAL = (
    CHAT_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{% continue %}{% endif %}"
    "{%- generation %}{{ m | tojson }}{% endgeneration %}{{ eos_token }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n ~ m['content'].strip() | upper }}{% endfor %}{{ messages | length }}"
    "{% if not tools %}-{% endif %}",
)
CHAT = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "é <b>\n2+3="},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "and?"},
]


def write(template: str, asked: Sequence[Any] = ONE) -> list[str]:
    return write_chats(template, asked, names={})


@pytest.mark.parametrize("template", USUAL)
def test_chats_are_written_as_transformers_writes_them(template: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template
    asked = [(CHAT, True), (CHAT[:3], False)]
    expected = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)
        for messages, reply in asked
    ]
    assert write_chats(template, asked, names=tokenizer.special_tokens_map) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'a' * 10**10 }}", r"takes more than 1,024 MiB of memory"),
        (DOUBLED, r"takes more than 1,024 MiB of memory"),
        ("{{ '%9999999999d' % 1 }}", r"takes more than 1,024 MiB of memory"),
        ("{{ 'a' * 2**25 }}", r"writes 33,554,432 characters for one chat, more than 16,777,216"),
        (RECURSIVE, r"calls itself without end"),
    ],
)
def test_a_template_that_wants_too_much_is_ended(template: str, says: str) -> None:
    with pytest.raises(TemplateLimit, match=says):
        write(template)
    assert write("{{ messages[0].content }}") == ["hi"]  # the next one is written


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "MAX_SECONDS", 1)
    with pytest.raises(TemplateLimit, match=r"takes more than 1 s of processor time"):
        write(NESTED)
    assert write("{{ messages[0].content }}") == ["hi"]


def test_an_error_of_a_template_names_the_chat() -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('too many') }}{% endif %}a"
    many = [(CHAT[:1], True)] * 300 + [(CHAT, True), (CHAT[:1], True)]
    with pytest.raises(TemplateRefusal, match="too many") as raised:
        write(template, many)
    assert raised.value.number == 300


def test_a_writer_that_was_killed_is_replaced() -> None:
    assert write("{{ messages[0].content }}") == ["hi"]
    process = chats._writer._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert write("{{ messages[0].content }}") == ["hi"]


def saved(folder: Path, template: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_limit_names_the_file(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, "{{ 'a' * 10**10 }}")
    file = str(tmp_path / "chat_template.jinja")
    with pytest.raises(ValueError, match=rf"{file}\) takes more than 1,024 MiB .*; fix it, or"):
        Template(tokenizer, chat=True)


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_template_that_leaves_out_a_message_is_refused(tmp_path: Path, role: str) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] != '" + role + "' %}{{ m['content'] }}"
        "{% endif %}<|{{ m['role'] }}|>{% endfor %}"
    )
    tokenizer = saved(tmp_path, template)
    says = rf"chat_template.jinja\) leaves out the {role}'s message: of a chat of system, user it"
    with pytest.raises(ValueError, match=says + r" writes '.*message \d of 2.*'; .*fix"):
        Template(tokenizer, chat=True, system="be brief")


def test_one_that_leaves_out_an_earlier_turn_is_refused_when_there_is_one() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "<|user|>{{ messages[-1]['content'] }}<|end|><|assistant|>"
    template = Template(tokenizer, chat=True)
    template.render(Prompt(id="a", text="2+3="))
    with pytest.raises(ValueError, match="leaves out the user's message: of a chat of user, assis"):
        template.render(Prompt(id="a", text="", messages=tuple(CHAT[1:])))


def test_one_that_drops_roles_is_said() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    with pytest.warns(UserWarning, match=r"the system's messages like the user's.*message 1 of 2"):
        Template(tokenizer, chat=True, system="be brief")


def test_chats_that_were_prepared_are_the_same() -> None:
    rows = [json.loads(json.dumps(CHAT[:3])) for _ in range(3)]
    prompts = [Prompt(id=str(n), text=f"{n}+1=<|end|>") for n in range(3)]
    plain, ahead = (Template(build_tokenizer(), chat=True) for _ in range(2))
    ahead.prepare(prompts, conversations=rows)
    written = chats._writer.write
    chats._writer.write = None  # type: ignore[assignment,method-assign]
    try:
        rendered = [ahead.render(prompt) for prompt in prompts]
        learned = [ahead.render_conversation(row) for row in rows]  # the same one three times
    finally:
        chats._writer.write = written  # type: ignore[method-assign]
    assert rendered == [plain.render(prompt) for prompt in prompts]
    assert learned == [plain.render_conversation(row) for row in rows]
