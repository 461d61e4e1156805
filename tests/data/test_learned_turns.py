"""What SFT learns of whole conversations, for the chat templates of model families."""

import itertools
from typing import Any

import pytest
from chat_families import FAMILIES, end_tokens, family_tokenizer

from posttrain.data.learned_turns import pieces
from posttrain.data.template import Template
from posttrain.data.tool_formats import SAMPLE
from posttrain.types import Prompt

NO_SYSTEM = {"gemma2"}  # refused
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be the sun."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Ab, a user."},
    {"role": "user", "content": "And <|im_end|> who?"},
    {"role": "assistant", "content": "The other."},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Add them."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "callaaaa1",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 3}},
            }
        ],
    },
    {"role": "tool", "content": "it is 7", "name": "add", "tool_call_id": "callaaaa1"},
    {"role": "assistant", "content": "Seven."},
]


def template_of(family: str, *, tools: bool = False) -> Template:
    tokenizer = family_tokenizer(family)
    ends = end_tokens(family, tokenizer)
    return Template(tokenizer, chat=True, end_tokens=ends, tools=[SAMPLE] if tools else ())


def split(template: Template, row: Any) -> list[tuple[bool, str]]:
    """The texts that are learned and those that are only read, in turn."""
    pairs = itertools.groupby(zip(*row, strict=True), key=lambda each: each[1])
    return [
        (own, template.tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        for own, run in pairs
    ]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_turns_of_the_assistant_are_learned_and_nothing_else(family: str) -> None:
    """Each with the token that ends it, and behind the very tokens of the prompt that asks."""
    template, end = template_of(family), FAMILIES[family].end
    chat = CHAT[1:] if family in NO_SYSTEM else CHAT
    rows = template.render_conversation(chat)
    assert len(rows) == (2 if family in ("qwen3", "mistral") else 1)  # old turns are rewritten
    learned = [text for row in rows for own, text in split(template, row) if own]
    thought = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    assert [text.strip() for text in learned] == [
        f"{thought}{said}{end}" for said in ("Ab, a user.", "The other.")
    ]
    read = "".join(text for row in rows for own, text in split(template, row) if not own)
    assert all(each in read for each in ("Who?", "And <|im_end|> who?"))
    if family == "mistral":
        assert read.count("[INST] Be the sun.\n\n") == len(rows)  # each prompt has the system's
    for (tokens, mask), last in zip(rows, (-3, -1), strict=False):  # what asks first in a row
        prompt = template.render(Prompt(id="", text="", messages=tuple(chat[:last]))).tokens
        assert tokens[: len(prompt)] == prompt
        assert mask.index(True) == len(prompt)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_calls_of_tools_are_learned_and_their_answers_are_not(family: str) -> None:
    """As often as they stand there, with their end tokens: so the model learns to wait."""
    template = template_of(family, tools=True)
    ends = {template.tokenizer.decode([token]) for token in template.end_tokens}
    rows = template.render_conversation(TOOLS)
    learned = [text for row in rows for own, text in split(template, row) if own]
    assert len(learned) == 2
    assert "add" in learned[0]
    assert "Seven." in learned[1]
    assert all(any(text.endswith(end) for end in ends) for text in learned)
    assert not any("it is 7" in text or "Add them." in text for text in learned)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_last_turn_alone_and_every_token(family: str) -> None:
    template = template_of(family)
    chat = CHAT[1:] if family in NO_SYSTEM else CHAT
    [row] = template.render_conversation(chat, learn="last")
    assert [own for own, _ in split(template, row)][:2] == [False, True]
    assert "The other." in split(template, row)[1][1]
    assert "Ab, a user." in split(template, row)[0][1]
    [(tokens, mask)] = template.render_conversation(chat, learn="all")
    assert mask == (False, *[True] * (len(tokens) - 1))
    text = template.tokenizer.decode(tokens, skip_special_tokens=False)
    assert all(message["content"] in text for message in chat)
    asked = Prompt(id="", text="", messages=tuple(chat[:-1]))
    read = template.tokenizer.decode(template.encode_exchange(asked, chat[-1]["content"]))
    assert all(message["content"] in read for message in chat)  # by a reward model


def test_a_long_text_is_cut_and_every_token_learned_once() -> None:
    tokens = tuple(range(10, 31))
    for most in (2, 3, 7, 20, 21, 22, None):
        rows = pieces(tokens, most)
        assert all(len(row) <= (most or 99) for row, _ in rows)
        learned = [t for row, mask in rows for t, own in zip(row, mask, strict=True) if own]
        assert learned == list(tokens[1:])
    assert pieces((5,), 4) == [((5,), (False,))]
