"""Expressions written by a model: computed exactly or refused, never executed."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards import countdown_expression
from posttrain.rewards.expressions import evaluate


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        # 25, 3, 7, 3 → 46
        ("25+3*7", 1),
        ("25 + (3 × 7)", 1),
        ("(3*7)+25", 1),
        ("-3+7*7", 0),  # the 7 twice
        ("7*3+25+3-3", 0),  # the 3 three times
        ("46", 0),
        ("25+21", 0),
        ("3*7+25=46", 0),
        ("25+3*7;", 0),
        ("2 5+3*7", 0),
        ("(25+3)*7", 0),
        ("", 0),
        ("25+3*7+(3-3)", 0),
        ("__import__('os')", 0),
        ("25+3*7#", 0),
        ("25+3*7 if 1 else 0", 0),
    ],
)
def test_countdown(completion, value):
    puzzle = {"numbers": [25, 3, 7, 3], "target": 46}
    assert countdown_expression(completion, puzzle) == value
    tagged = f"<think>hm</think><answer>{completion}</answer>"
    assert countdown_expression(tagged, puzzle, extract="tag") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/3+1/3+1/3", 1),  # exact, unlike 0.1 + 0.2
        ("8/(3-8/3)", 24),
        ("-(2-5)", 3),
        ("2 - -3", 5),
        ("[1+2]*3", 9),
        ("10 ÷ 4", Fraction(5, 2)),
        ("2**3", None),
        ("7//2", None),
        ("1/(1-1)", None),
        ("1.5*2", None),
        ("1e3", None),
        ("0x10", None),
        ("1_0", None),
        ("007", None),
        ("+5", None),
        ("~5", None),
        ("True", None),
        ("3(4)", None),
        ("(1,2)", None),
        ("()", None),
        ("(", None),
        ("1\n+1", None),
        ("1\x00", None),
        ("１+１", None),
        ("(" * 99 + "1" + ")" * 99, 1),
        ("(" * 150 + "1", None),
        ("-" * 199 + "1", -1),
        ("1+" * 100 + "1", None),  # too long
        ("9" * 150 + "*" + "9" * 40, int("9" * 150) * int("9" * 40)),
    ],
)
def test_expressions(text, value):
    result = evaluate(text)
    assert (None if result is None else result[0]) == value


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
def test_expressions_never_raise(text):
    result = evaluate(text)
    if "**" in text or "//" in text:
        assert result is None
