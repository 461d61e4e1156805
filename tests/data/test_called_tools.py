"""Demonstrations with tools: calls are learned in the form in which an environment reads them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, end_tokens, family_tokenizer

from posttrain.data.sources import read_demonstrations
from posttrain.data.template import Template
from posttrain.envs.tool_calls import FORMATS
from posttrain.envs.tool_schemas import tool_schema


def switch(on: bool) -> str:
    """Switch the lamp.

    Args:
        on: Whether it shall burn.
    """
    return "on" if on else "off"


def chat(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "switch", "arguments": arguments}}
    return [
        {"role": "user", "content": "Light, please."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "switch", "content": "burning"},
        {"role": "assistant", "content": "Done."},
    ]


@pytest.mark.parametrize("arguments", [{"on": True}, '{"on": true}'], ids=["object", "text"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3"}))  # it rewrites old turns
def test_a_call_is_learned_as_it_is_read(tmp_path: Path, family: str, arguments: Any) -> None:
    """What is trained on is the call, in the format of the model, and the last answer alone."""
    file = tmp_path / "demonstrations.jsonl"
    file.write_text(json.dumps({"messages": chat(arguments)}) + "\n")
    (row,) = read_demonstrations(file)
    tokenizer = family_tokenizer(family)
    ends = end_tokens(family, tokenizer)
    template = Template(tokenizer, chat=True, end_tokens=ends, tools=[tool_schema(switch)])
    [(tokens, mask)] = template.render_conversation(row["messages"])
    runs = [
        (own, [token for token, _ in run])
        for own, run in itertools.groupby(zip(tokens, mask, strict=True), key=lambda each: each[1])
    ]
    assert [own for own, _ in runs[:4]] == [False, True, False, True]
    (_, call), (_, between), (_, last) = runs[1:4]
    found = FORMATS[template.tool_format].parse(template.decode(call))
    assert [(each.name, each.arguments) for each in found] == [("switch", {"on": True})]
    assert template.decode(last).strip() == "Done."
    assert tuple(between) == template.encode_reply([row["messages"][2]])


@pytest.mark.parametrize("wrong", ["switch", [3], [{"name": "switch"}], [{"function": "switch"}]])
def test_what_is_no_call_is_refused(tmp_path: Path, wrong: Any) -> None:
    rows = chat({})
    rows[1]["tool_calls"] = wrong
    file = tmp_path / "demonstrations.jsonl"
    file.write_text(json.dumps({"messages": rows}) + "\n")
    with pytest.raises(ValueError, match=r"jsonl:1: message 2: tool_calls: expected \{\"function"):
        read_demonstrations(file)


def test_a_call_may_stand_alone_and_a_tool_may_say_nothing() -> None:
    """As some data sets have them: a name and arguments with nothing around, an empty result."""
    rows = chat({})
    rows[1]["tool_calls"] = [{"name": "switch", "arguments": {"on": True}}]
    rows[2]["content"] = ""
    [read] = read_demonstrations([{"messages": rows}])
    [call] = read["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "switch", "arguments": {"on": True}}
    assert read["messages"][2]["content"] == ""
