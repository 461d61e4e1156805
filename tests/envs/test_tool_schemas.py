"""Schemas of tools are those that transformers makes, and arguments are checked against them."""

from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from posttrain.envs.tool_schemas import tool_schema, wrong_arguments


def plain(a: int, b: float, c: str, d: bool = False) -> str:
    """
    Do a thing.

    And say more about it.

    Args:
        a: The first.
        b: The second, which is described
            in two lines.
        c: The third: with a colon.
        d: The last.

    Returns:
        What it is.
    """
    return ""


def nested(
    a: list[int],
    b: dict[str, float],
    c: Optional[str] = None,  # noqa: UP045
    d: list[dict[str, list[bool]]] | None = None,
    e: tuple[int, str] = (1, ""),
    f: Any = None,
    g: list = [],  # noqa: B006
    h: dict = {},  # noqa: B006
) -> None:
    """Take much.

    Args:
        a: Numbers.
        b: By name.
        c: Maybe.
        d: Deep.
        e: Two.
        f: Any.
        g: Some.
        h: More.
    """


def chosen(
    a: Literal["up", "down"],
    b: Literal[1, 2],
    c: Literal["one", 1],
    d: Union[int, str],  # noqa: UP007
    e: int | list[int],
    f: str,
) -> dict[str, int]:
    """Choose.

    Args:
        a: A way.
        b: A number.
        c: Either.
        d: Both.
        e: One or more.
        f: A drink (choices: ["tea", "coffee"])

    Returns:
        Numbers.

    Raises:
        ValueError: Never.
    """
    return {}


def nothing() -> str:
    """Take nothing."""
    return ""


class Tools:
    def look(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word


@pytest.mark.parametrize("function", [plain, nested, chosen, nothing, Tools().look, Tools.look])
def test_schemas_are_those_of_transformers(function: Any) -> None:
    assert tool_schema(function) == get_json_schema(function)


def bare(a: int) -> int:
    return a


def unhinted(a) -> int:
    """Do it.

    Args:
        a: A number.
    """
    return int(a)


def undescribed(a: int) -> int:
    """Do it."""
    return a


def many(*a: int) -> int:
    """Do it.

    Args:
        a: Numbers.
    """
    return sum(a)


def strange(a: set[int]) -> int:
    """Do it.

    Args:
        a: Numbers.
    """
    return sum(a)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (bare, "tool 'bare': it needs a docstring"),
        (unhinted, "tool 'unhinted': parameter 'a' needs a name and a type hint"),
        (many, "tool 'many': parameter 'a' needs a name and a type hint"),
        (undescribed, "tool 'undescribed': its docstring does not describe 'a'"),
        (strange, "tool 'strange': no JSON schema for set"),
    ],
)
def test_what_makes_no_schema_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tool_schema(function)


FULL = {"a": 1, "b": 2, "c": "x"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (FULL, ""),
        ({**FULL, "b": 2.5, "d": True}, ""),
        ({**FULL, "a": "1"}, "argument 'a' must be an integer, got '1'"),
        ({**FULL, "a": True}, "argument 'a' must be an integer, got True"),
        ({**FULL, "a": 1.5}, "argument 'a' must be an integer, got 1.5"),
        ({**FULL, "a": None}, "argument 'a' must be an integer, got None"),
        ({**FULL, "d": 1}, "argument 'd' must be a boolean, got 1"),
        ({"a": 1, "b": 2}, "argument 'c' is missing"),
        ({**FULL, "aa": 2}, "unknown argument 'aa'; did you mean 'a'? Known: a, b, c, d"),
    ],
)
def test_plain_arguments(arguments: dict[str, Any], said: str) -> None:
    assert wrong_arguments(tool_schema(plain), arguments) == said


NESTED = {"a": [1], "b": {"x": 1.5}}
CHOSEN = {"a": "up", "b": 1, "c": 1, "d": "x", "e": [1], "f": "tea"}


@pytest.mark.parametrize(
    ("function", "arguments", "right"),
    [
        (nested, NESTED, True),
        (nested, {**NESTED, "c": None, "d": None, "f": {"any": [None]}, "e": [1, "x"]}, True),
        (nested, {**NESTED, "a": [1, "x"]}, False),
        (nested, {**NESTED, "a": None}, False),
        (nested, {**NESTED, "b": {"x": "y"}}, False),
        (nested, {**NESTED, "d": [{"x": [True]}]}, True),
        (nested, {**NESTED, "d": [{"x": [1]}]}, False),
        (nested, {**NESTED, "e": [1]}, False),
        (nested, {**NESTED, "e": ["x", 1]}, False),
        (chosen, CHOSEN, True),
        (chosen, {**CHOSEN, "a": "left"}, False),
        (chosen, {**CHOSEN, "b": 1.0}, False),
        (chosen, {**CHOSEN, "b": True}, False),
        (chosen, {**CHOSEN, "d": 1.5}, False),
        (chosen, {**CHOSEN, "e": 3}, True),
        (chosen, {**CHOSEN, "e": ["x"]}, False),
        (chosen, {**CHOSEN, "f": "milk"}, False),
    ],
)
def test_nested_and_chosen_arguments(function: Any, arguments: dict[str, Any], right: bool) -> None:
    assert (wrong_arguments(tool_schema(function), arguments) == "") is right
