"""Turns of a chat, token by token, for the chat templates of model families.

A rollout is what was sampled and what the template wrote, in turn: nothing lost at a border,
nothing encoded again, and the mask true on exactly what was sampled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from chat_families import FAMILIES, LONGER, end_tokens, family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.collate import collate
from posttrain.data.template import Template
from posttrain.data.tool_formats import CALL, SAMPLE, describe_tools
from posttrain.envs import ScriptedEnv
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.types import Prompt, Rollout, Sampling, Score, Turn

QUESTION = "2+3=?"
LOOKALIKES = sorted(
    {
        *(text for family in FAMILIES.values() for text in (*family.special, *family.plain)),
        "<tool>{}</tool>",
        "[/INST",
        "<|im_",
        "what0was0sampled",
        '"}',
        "<think>why</think>\n\n",
    }
)
EDGES = [
    " ",
    "\n",
    "\n\n",
    "\t",
    "\u00a0",
    "\u200b",
    "\r\n",
    "é",
    "e\u0301",
    "日本",
    "🙂",
    "\U00100000",
]
texts = st.lists(
    st.one_of(st.sampled_from(LOOKALIKES), st.sampled_from(EDGES), st.text(max_size=4)), max_size=5
).map("".join)


@functools.cache
def template_of(name: str, *, tools: bool = False) -> Template:
    tokenizer = family_tokenizer(name)
    ends = end_tokens(name, tokenizer)
    return Template(tokenizer, chat=True, end_tokens=ends, tools=[SAMPLE] if tools else ())


def spell(text: str, template: Template, *, whole: bool) -> list[int]:
    """The tokens of a text as a policy may sample it: byte by byte, or with longer tokens."""
    tokens = list(template.control.encode(text))
    if whole:
        return tokens
    pieces = template.tokenizer.convert_ids_to_tokens(tokens)
    longer = {piece for piece in pieces if piece in LONGER}
    split = [list(piece) if piece in longer else [piece] for piece in pieces]
    return template.tokenizer.convert_tokens_to_ids([piece for each in split for piece in each])


def decoded(template: Template, tokens: Sequence[int]) -> str:
    return template.tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@st.composite
def sampled_turns(draw: st.DrawFn, template: Template) -> Turn:
    """A turn of the policy: any tokens, special ones among them, ended in any way."""
    tokens: list[int] = []
    ends = sorted(template.end_tokens)
    special = [n for n in template.tokenizer.added_tokens_decoder if n not in ends]
    for _ in range(draw(st.integers(1, 3))):
        tokens += spell(draw(texts), template, whole=draw(st.booleans()))
        tokens += draw(st.lists(st.sampled_from(special), max_size=1))
    reason = draw(st.sampled_from(["stop", "length", "stop_string"]))
    if reason == "stop":
        tokens.append(draw(st.sampled_from(ends)))
    tokens = tokens or spell("x", template, whole=True)
    logprobs = tuple(-0.5 - place / 7 for place in range(len(tokens)))
    text = decoded(template, tokens)
    return Turn(tokens=tuple(tokens), text=text, logprobs=logprobs, stop_reason=reason)


def messages(role: str) -> st.SearchStrategy[list[dict[str, str]]]:
    said = st.builds(lambda text: {"role": role, "content": text}, texts)
    return st.lists(said, min_size=1, max_size=3)


replies = st.one_of(texts.filter(bool), messages("user"), messages("tool"))


class Zero:
    """Scores everything 0."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


def talked(
    template: Template, scripts: Sequence[Sequence[Turn]], *, said: Sequence[Any]
) -> list[Rollout]:
    """The rollouts in which the policy has these turns, one script each, and the env says these."""
    left: list[Iterator[Turn]] = [iter(script) for script in scripts]
    engine = ScriptedEngine(
        lambda prompt, sample: next(left[sample]), decode=functools.partial(decoded, template)
    )
    found = collect_scored(
        [template.render(Prompt(id="0", text=QUESTION))],
        Sampling(),
        engine=engine,
        scorer=Zero(),
        num_samples=len(scripts),
        seed=0,
        env=ScriptedEnv(replies=said, score=1.0),
        encode=template.encode_reply,
    )
    assert [r.score for r in found.rollouts] == [Score(value=1.0, parts={"env": 1.0})] * len(left)
    return list(found.rollouts)


def ended(turn: Turn, template: Template) -> bool:
    return turn.tokens[-1] in template.end_tokens


def whole_text(name: str, template: Template, *, turns: Sequence[Turn], said: Sequence[Any]) -> str:
    """What the template writes for the conversation up to the last turn, given the sampled texts.

    Each turn stands as a mark in the chat; what the template writes between the beginning of that
    turn and its end token gives way to what was sampled.
    """
    family, filled = FAMILIES[name], [""]
    asked = QUESTION
    if template.tools and family.tools == "json_tags":
        asked = f"{describe_tools(template.tools)}\n\n{QUESTION}"
    chat: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    for turn, reply in zip(turns, said, strict=False):
        closed = ended(turn, template)
        filled[-1] += decoded(template, turn.tokens[:-1] if closed else turn.tokens)
        if isinstance(reply, str) and turn.stop_reason == "stop_string":
            filled[-1] += reply
            continue
        mark = f"turn {len(filled)} of the policy"
        told = [{"role": "user", "content": reply}] if isinstance(reply, str) else list(reply)
        calls = told[0]["role"] == "tool"
        answer: dict[str, Any] = {"role": "assistant", "content": mark}
        if calls and family.tools == "json_tags":
            results = [f"<tool_result>{message['content']}</tool_result>" for message in told]
            told = [{"role": "user", "content": "\n".join(results)}]
        elif calls:
            function = {"name": CALL, "arguments": {"word": mark}}
            answer = {**answer, "tool_calls": [{"id": "call00000", "function": function}]}
            told = [{**m, "tool_call_id": f"call{n:05d}"} for n, m in enumerate(told)]
        elif "gemma" in name or name == "mistral":  # one turn of each side after the other
            told = [{"role": "user", "content": "\n".join(m["content"] for m in told)}]
        chat += [answer, *told]
        filled.append("")
    text = template.tokenizer.apply_chat_template(
        chat, tools=list(template.tools) or None, tokenize=False, add_generation_prompt=True
    )
    pieces, place = [], 0
    for number, end in enumerate(end_texts(template, turns, said=said)):
        mark = text.index(f"turn {number + 1} of the policy", place)
        headers = [text.rfind(header, 0, mark) + len(header) for header in family.headers]
        pieces += [text[place : max(headers)], filled[number], end]
        place = text.index(family.end, mark) + len(family.end)
    return "".join(pieces) + text[place:] + filled[-1]


def end_texts(template: Template, turns: Sequence[Turn], *, said: Sequence[Any]) -> list[str]:
    """The end of each turn of the chat: as it was sampled, else as the template writes it."""
    own = template.tokenizer.eos_token
    return [
        decoded(template, turn.tokens[-1:]) if ended(turn, template) else own
        for turn, reply in zip(turns, said, strict=False)
        if not (isinstance(reply, str) and turn.stop_reason == "stop_string")
    ]


def without_tools(text: str) -> str:
    """Mistral writes tools before the last message of the user: here they stay where they were."""
    written = json.dumps([SAMPLE], ensure_ascii=False)
    return text.replace(f"[AVAILABLE_TOOLS] {written}[/AVAILABLE_TOOLS]", "")


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_rollout_is_what_was_sampled_and_what_was_rendered(
    name: str, data: st.DataObject
) -> None:
    template = template_of(name, tools=data.draw(st.booleans(), label="tools"))
    said = data.draw(st.lists(replies, max_size=3), label="replies")
    count = len(said) + 1
    turn = sampled_turns(template)
    scripts = data.draw(
        st.lists(st.lists(turn, min_size=count, max_size=count), min_size=1, max_size=2),
        label="turns",
    )
    rollouts = talked(template, scripts, said=said)
    batch = collate(rollouts, pad_token=0)
    for row, (rollout, turns) in enumerate(zip(rollouts, scripts, strict=True)):
        # The policy's turns are those that were sampled, the others the replies to each of them.
        assert rollout.turns[::2] == tuple(turns)
        between = [template.encode_reply(s, t) for s, t in zip(said, turns, strict=False)]
        assert [turn.tokens for turn in rollout.turns[1::2]] == between
        parts = [(True, turns[0])]
        for reply, after in zip(rollout.turns[1::2], turns[1:], strict=True):
            parts += [(False, reply), (True, after)]
        tokens = [*rollout.prompt.tokens, *(t for _, part in parts for t in part.tokens)]
        mask = [False] * len(rollout.prompt.tokens)
        mask += [own for own, part in parts for _ in part.tokens]
        length = len(tokens)
        assert batch.tokens[row, :length].tolist() == tokens
        assert batch.mask[row, :length].tolist() == mask
        assert not batch.mask[row, length:].any()
        drawn = [p for turn in turns for p in turn.logprobs or ()]
        assert torch.equal(batch.sampler_logprobs[row][batch.mask[row]], torch.tensor(drawn))
        # Together they are the conversation as the template writes it.
        last = turns[-1].tokens
        text = decoded(template, tokens[: len(tokens) - len(last)])
        expected = whole_text(name, template, turns=turns, said=said)
        assert without_tools(text) == without_tools(expected)
        # Words of the environment are text, whatever they spell.
        for reply, turn in zip(said, turns, strict=False):
            bare = "x" if isinstance(reply, str) else [{**m, "content": "x"} for m in reply]
            control = set(template.tokenizer.all_special_ids)
            found, plain = (
                [token for token in template.encode_reply(each, turn) if token in control]
                for each in (reply, bare)
            )
            assert found == plain
