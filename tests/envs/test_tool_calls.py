"""Whatever a model writes is a list of calls and of malformed calls, in time that is linear."""

import json
import random
from typing import Any

import pytest

from posttrain.envs.tool_calls import (
    FORMATS,
    MAX_CALLS,
    MAX_CHARACTERS,
    SHOWN,
    Call,
    Malformed,
    Parsed,
)

TAGS = {"hermes": ("<tool_call>", "</tool_call>"), "json_tags": ("<tool>", "</tool>")}
CALL = Call("add", {"a": 1, "b": [2, {"c": "}"}]})


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=TAGS)
def tagged(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def parse(text: str, name: str) -> Parsed:
    return FORMATS[name].parse(text)


def reasons(text: str, name: str) -> list[str]:
    found = parse(text, name)
    assert all(isinstance(each, Malformed) for each in found)
    return [each.reason for each in found if isinstance(each, Malformed)]


def test_what_a_format_writes_it_reads(name: str) -> None:
    assert parse(FORMATS[name].write(CALL.name, CALL.arguments), name) == [CALL]


def test_a_text_without_a_call_has_none(name: str) -> None:
    for text in ("", "The answer is 5.", '{"answer": 5}', "{x} + {y}", "</tool></tool_call>"):
        assert parse(text, name) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "</tool_call></tool><tool><tool_call>"},
        {"text": '{"name": "x"}; {{{ " \\ \n'},
        {"deep": {"a": [{"b": {"c": [[[]]]}}]}},
        {"text": "é 漢 \U0001f600", "é": None},
        {"n": -1.5e3, "t": True, "big": 10**40},
        {},
    ],
)
def test_arguments_come_back_as_they_were(name: str, arguments: dict[str, Any]) -> None:
    assert parse(FORMATS[name].write("f", arguments), name) == [Call("f", arguments)]


def test_several_calls_with_text_around_them(tagged: str) -> None:
    one, two = (FORMATS[tagged].write("f", {"n": n}) for n in (1, 2))
    assert parse(f"First {one} then\n{two} done.", tagged) == [
        Call("f", {"n": 1}),
        Call("f", {"n": 2}),
    ]


def test_a_malformed_call_hides_no_other(tagged: str) -> None:
    opening, closing = TAGS[tagged]
    good = FORMATS[tagged].write("f", {})
    for bad in (f"{opening}f(1){closing}", f'{opening}{{"name": ', f"{opening}{closing}"):
        found = parse(f"{good}{bad}{good}", tagged)
        assert [type(each) for each in found] == [Call, Malformed, Call], bad


def test_the_last_call_needs_no_closing_tag(tagged: str) -> None:
    """A stop string, or an end token in the place of the tag, takes it away."""
    opening, _ = TAGS[tagged]
    assert parse(f'{opening}{{"name": "f", "arguments": {{}}}}\n', tagged) == [Call("f", {})]
    assert reasons(f'{opening}{{"name": "f", "argum', tagged)
    assert reasons(f'{opening}{{"name": "f"}} and so on', tagged)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("[]", "expected a JSON object, got an array"),
        ('"f"', "expected a JSON object, got a text"),
        ("null", "expected a JSON object, got null"),
        ("true", "expected a JSON object, got a boolean"),
        ('{"arguments": {}}', 'the object has no "name" that is a text'),
        ('{"name": 3}', 'the object has no "name" that is a text'),
        ('{"name": ""}', 'the object has no "name" that is a text'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be an object, got an array'),
        ('{"name": "f", "arguments": "{}"}', '"arguments" must be an object, got a text'),
        ('{"name": "f", "name": "g"}', 'no JSON that can be read: the key "name" stands twice'),
        ('{"name": "f", "arguments": {"a": NaN}}', "no JSON that can be read: NaN is not JSON"),
        (
            '{"name": "f", "arguments": {"a": 1e999}}',
            "no JSON that can be read: a number that is too",
        ),
        ('{"name": "\\ud800"}', "no JSON that can be read: half of a surrogate pair"),
        ("{'name': 'f'}", "no JSON that can be read: Expecting property name"),
        ('{"name": "f",}', "no JSON that can be read: "),
        (
            "__import__('os').system('true')",
            "no JSON that can be read: Expecting value at character 0",
        ),
        ("[" * 100_000, "no JSON that can be read: nested too deeply"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "no JSON that can be read: "),
    ],
)
def test_the_reason_says_what_is_wrong(tagged: str, written: str, reason: str) -> None:
    opening, closing = TAGS[tagged]
    [found] = parse(f"{opening}{written}{closing}", tagged)
    assert isinstance(found, Malformed)
    assert found.reason.startswith(reason)
    assert len(found.text) <= SHOWN


@pytest.mark.parametrize("around", ["{}", "\n {}\nSo.", "```json\n{}\n```", "``` {}"])
def test_a_turn_that_begins_with_a_call_without_tags_is_told_of_them(
    tagged: str, around: str
) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    (found,) = FORMATS[tagged].parse(around.replace("{}", call))
    assert isinstance(found, Malformed)
    assert found.reason == f"a call without its tags: write it as {'{…}'.join(TAGS[tagged])}"


@pytest.mark.parametrize(
    "text", ['{"name": "Ada", "age": 36}', 'So: {"name": "add", "arguments": {}}', "{}", "[1]"]
)
def test_other_json_is_no_call(tagged: str, text: str) -> None:
    assert FORMATS[tagged].parse(text) == []


def test_a_call_without_arguments_has_none(tagged: str) -> None:
    opening, closing = TAGS[tagged]
    assert parse(f'{opening}{{"name": "f"}}{closing}', tagged) == [Call("f", {})]


def test_the_name_of_a_call_is_kept(tagged: str) -> None:
    opening, closing = TAGS[tagged]
    written = f'{opening}{{"id": "c1", "name": "f", "arguments": {{}}}}{closing}'
    assert parse(written, tagged) == [Call("f", {}, "c1")]


def test_thoughts_hold_no_calls(name: str) -> None:
    call = FORMATS[name].write("f", {})
    assert parse(f"<think>maybe {call}</think>", name) == []
    assert parse(f"<think>maybe {call}", name) == []
    assert parse(f"so {call}</think>\n\n{call}", name) == [Call("f", {})]


class TestLlama:
    def test_alone_or_behind_the_tag(self) -> None:
        call = '{"name": "f", "parameters": {"x": 1}}'
        for text in (call, f" \n{call}\n", f"<|python_tag|>{call}", f"Well.<|python_tag|>{call}"):
            assert parse(text, "llama") == [Call("f", {"x": 1})]

    def test_as_a_function_and_with_arguments(self) -> None:
        text = '{"type": "function", "name": "f", "arguments": {"x": 1}}'
        assert parse(text, "llama") == [Call("f", {"x": 1})]

    def test_several_are_separated_by_semicolons(self) -> None:
        calls = '{"name": "f", "parameters": {"x": "a;b"}}; {"name": "g", "parameters": {}}'
        for text in (calls, f"<|python_tag|>{calls};"):
            assert parse(text, "llama") == [Call("f", {"x": "a;b"}), Call("g", {})]

    def test_text_before_or_behind_a_call(self) -> None:
        call = '{"name": "f", "parameters": {}}'
        assert parse(f"I call {call}", "llama") == []  # what it is without a tag, nobody knows
        assert reasons(f"{call} for you", "llama") == ["text behind the call; write the call alone"]

    def test_python_behind_the_tag_is_malformed(self) -> None:
        assert reasons('<|python_tag|>search.call(query="x")', "llama")

    def test_one_that_breaks_off_is_malformed(self) -> None:
        assert reasons('{"name": "f", "parameters": {"x": ', "llama")
        one, *rest = parse('{"name": "f", "parameters": {}}; {"name"', "llama")
        assert one == Call("f", {})
        assert [type(each) for each in rest] == [Malformed]


def repeated(name: str, times: int) -> str:
    if name == "mistral":
        return "[TOOL_CALLS]" + json.dumps([{"name": "f"}] * times)
    return ";".join([FORMATS[name].write("f", {})] * times)


class TestMistral:
    def test_an_array_behind_the_tag(self) -> None:
        text = (
            'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abc"}, {"name": "g"}]'
        )
        assert parse(text, "mistral") == [Call("f", {"x": 1}, "abc"), Call("g", {})]

    def test_what_is_no_array_of_calls(self) -> None:
        for behind in ("", "f(1)", "{}", "[]", "3", '[{"name": "f"}] and so on', "[1]"):
            assert len(reasons(f"[TOOL_CALLS]{behind}", "mistral")) == 1, behind


def test_too_much_is_one_malformed_call(name: str) -> None:
    assert reasons(" " * (MAX_CHARACTERS + 1), name) == ["more than 200,000 characters"]
    assert reasons(repeated(name, MAX_CALLS + 1), name) == ["more than 32 calls in one turn"]
    assert len(parse(repeated(name, MAX_CALLS), name)) == MAX_CALLS


def test_the_work_does_not_grow_with_the_number_of_tags(
    tagged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tag may make the decoder read to the end: it is asked a fixed number of times."""
    asked: list[int] = []
    decode = json.JSONDecoder.raw_decode

    def counted(self: json.JSONDecoder, text: str, begin: int = 0) -> Any:
        asked.append(begin)
        return decode(self, text, begin)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    opening, _ = TAGS[tagged]
    assert reasons(opening * 10_000, tagged) == ["more than 32 calls in one turn"]
    assert len(asked) == MAX_CALLS + 1


def test_random_text_never_raises(name: str) -> None:
    pieces = [
        "<tool>",
        "</tool>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "{",
        "}",
        '"',
    ]
    pieces += ["[", "]", "name", ":", ",", ";", "\\", "\\u", "d800", "1e9", " ", "\n", "</think>"]
    pieces += ['{"name": "f", "arguments": {"a": "', '{"name": "f", "parameters": {}}', "é", "\0"]
    draw = random.Random(0)
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randrange(30)))
        for each in parse(text, name):
            assert isinstance(each, Call | Malformed)
            str(each).encode()
