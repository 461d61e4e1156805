"""Repetition, overlong answers, and formats given as patterns."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algorithms.shaping import overlong
from posttrain.rewards.format import _compiled, think_answer_format
from posttrain.rewards.penalties import overlong_penalty, repetition_penalty
from posttrain.types import Batch


@pytest.mark.parametrize(
    ("completion", "options", "value"),
    [
        ("", {}, 0),
        ("a b c", {}, 0),  # shorter than one 4-gram
        ("a b c d", {}, 0),
        ("a b c d a b c d", {}, -1 / 5),  # 4 distinct of 5
        ("a b a b a b", {"n": 2}, -3 / 5),  # a b and b a, of 5
        ("no no no no", {"n": 1}, -3 / 4),
        ("no no no no", {"n": 1, "maximum": 0.2}, -0.15),
        ("no no no no", {"n": 1, "maximum": 0.0}, 0),
        ("aaaa", {"n": 2, "by": "characters"}, -2 / 3),
        ("abcd", {"n": 2, "by": "characters"}, 0),
        ("一二一二一二", {"n": 2, "by": "characters"}, -3 / 5),
    ],
)
def test_repetition(completion, options, value):
    assert repetition_penalty(completion, **options) == pytest.approx(value, rel=1e-12)


def test_repetition_refuses_what_makes_no_sense():
    for options in ({"n": 0}, {"maximum": -1.0}):
        with pytest.raises(ValueError, match="at least"):
            repetition_penalty("a", **options)


@given(
    num_tokens=st.integers(0, 40),
    limit=st.integers(1, 30),
    share=st.floats(0.01, 1),
    factor=st.floats(0, 3),
)
def test_overlong_is_the_formula_of_the_algorithms(num_tokens, limit, share, factor):
    buffer = max(1, int(share * limit))
    batch = Batch.from_rewards([0.0]).replace(
        tokens=torch.zeros(1, 40), mask=torch.arange(40)[None] < num_tokens
    )
    shaped = overlong(batch, limit=limit, buffer=buffer, factor=factor)
    expected = shaped.need("rewards").item()
    value = overlong_penalty(num_tokens, limit=limit, buffer=buffer, factor=factor)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_overlong_refuses_what_makes_no_sense():
    for options in ({"buffer": 0}, {"buffer": 11}, {"buffer": 4, "factor": -1.0}):
        with pytest.raises(ValueError, match="subtracted already"):
            overlong_penalty(5, limit=10, **options)


@pytest.mark.parametrize(
    ("completion", "pattern", "value"),
    [
        ("Answer: 5", r"Answer: \d+", 1),
        ("Answer: 5.", r"Answer: \d+", 0),  # the whole text, or nothing
        ("so\nAnswer: 5", r"(?s).*Answer: \d+", 1),
        ("so\nAnswer: 5", r".*Answer: \d+", 0),
        ("¬ ∀x", r"¬ ∀\w", 1),
        ("", r"a*", 1),
    ],
)
def test_pattern(completion, pattern, value):
    assert think_answer_format(completion, pattern=pattern) == value


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+$", "a" * 30 + "!"),
        (r"(a+)+$", "a" * 200_000 + "!"),
        (r"(a|aa)+b", "a" * 100_000),
        (r"(.*,){20}x", "1," * 50_000),
        (r"(\w+\s?)*:", "word " * 40_000),
        (r"([a-z]*)*\d", "x" * 100_000),
    ],
)
def test_no_pattern_backtracks(pattern, text):
    assert think_answer_format(text, pattern=pattern) == 0  # backtracking would never end


def test_a_pattern_that_is_none_says_so():
    for pattern in ("(", r"(?=a)b", r"(a)\1"):
        with pytest.raises(ValueError, match="neither look-around nor back-references"):
            think_answer_format("a", pattern=pattern)
    with pytest.raises(ValueError, match="drop partial"):
        think_answer_format("a", pattern="a", partial=True)


def test_without_re2_the_error_says_what_to_install(monkeypatch):
    _compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(ModuleNotFoundError, match=r"posttrain\[re2\]"):
        think_answer_format("a", pattern="a")
