"""Rewards of texts: tables of (completion, what the prompt knows) → value, written by hand."""

import time
from fractions import Fraction

import pytest
import sorting_lists
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards import (
    countdown_expression,
    exact_answer,
    length_penalty,
    numeric_answer,
    sorted_numbers,
    think_answer_format,
)
from posttrain.rewards.format import think_answer
from posttrain.rewards.numeric import parse_number
from posttrain.rewards.sorting import parse_numbers


@pytest.mark.parametrize(
    ("completion", "answer", "options", "value"),
    [
        ("Paris", "Paris", {}, 1),
        ("  New \n York ", "New York", {}, 1),
        ("cafe\u0301", "caf\u00e9", {}, 1),  # two spellings of é
        ("paris", "Paris", {}, 0),
        ("STRASSE", "straße", {"ignore_case": True}, 1),
        ("It is Paris", "Paris", {}, 0),
        ("<answer>Paris</answer>", "Paris", {"extract": "tag"}, 1),
        ("Paris", "Paris", {"extract": "tag"}, 0),
        ("", "Paris", {}, 0),
    ],
)
def test_exact(completion, answer, options, value):
    assert exact_answer(completion, answer, **options) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5),
        ("5.", 5),
        ("+5", 5),
        ("-5", -5),
        ("−5", -5),
        ("1,000", 1000),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1.0", 1),
        (".5", Fraction(1, 2)),
        ("007", 7),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        (r"\$5", 5),
        ("50%", 50),
        (r"50\%", 50),
        ("9" * 100, int("9" * 100)),
        # no numbers
        ("9" * 101, None),
        ("1e9999", None),
        ("1/0", None),
        ("", None),
        (".", None),
        ("-", None),
        ("--5", None),
        ("-$-5", None),
        ("5 apples", None),
        ("1,00", None),
        ("1,0000", None),
        ("1_000", None),
        ("0x10", None),
        ("nan", None),
        ("inf", None),
        ("1 000", 1000),
        ("1 00", None),
        ("1 0000", None),
        (r"\frac12", Fraction(1, 2)),
        (r"-3\dfrac34", Fraction(-15, 4)),
        ("3¼", Fraction(13, 4)),
        (r"7.2\times 10^{-1}", Fraction(18, 25)),
        ("-10^2", -100),
        ("$1.5 Million", 1_500_000),
        ("½ million", 500_000),
        ("5 hours 30 minutes", None),
        ("72 or 73", None),
        ("٣", None),
        ("5\n6", None),
        ("2+3", None),
    ],
)
def test_parse_number(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "options", "value"),
    [
        ("The total is $1,000.", "1000", {}, 1),
        ("3 + 4 = 7", "7", {}, 1),
        ("7 is 3 + 4", "7", {}, 0),
        ("0.1", "1/10", {}, 1),
        ("0.3333333333", "1/3", {}, 0),
        ("0.3333", "1/3", {"tolerance": 0.001}, 1),
        ("5.001", 5, {"tolerance": 0.001}, 1),  # the bound itself counts
        ("5.002", 5, {"tolerance": 0.001}, 0),
        ("5.3", 5, {"tolerance": 0.3}, 1),  # the double nearest to 0.3 is less than it
        ("0.1", 0.1, {}, 1),  # one tenth, not the double nearest to it
        ("#### 1,080", "1080", {"extract": "hashes"}, 1),
        ("1080", "1080", {"extract": "hashes"}, 0),
        ("#### 12 apples", "12", {"extract": "hashes"}, 0),
        (r"\boxed{\frac{1}{2}}", "0.5", {"extract": "boxed"}, 1),
        ("22", "22", {"extract": "whole"}, 1),
        ("22 or 23", "22", {"extract": "whole"}, 0),
        ("", "22", {}, 0),
    ],
)
def test_numeric(completion, answer, options, value):
    assert numeric_answer(completion, answer, **options) == value


def test_a_right_answer_that_is_none_is_a_fault_of_the_data():
    for answer in ("many", "", None, True, float("nan")):
        with pytest.raises(
            ValueError, match=r"answer: expected a number.*; use the reward 'exact'"
        ):
            numeric_answer("5", answer)
    with pytest.raises(ValueError, match="put only what follows #### there, or use the task gsm8k"):
        numeric_answer("72", "48 + 24 = 72\n#### 72")
    for answer in ("", " ", None, 5):
        with pytest.raises(ValueError, match="answer: expected text"):
            exact_answer("", answer)
    with pytest.raises(ValueError, match="tolerance"):
        numeric_answer("5", "5", tolerance=-1.0)


@given(st.fractions(), st.booleans())
def test_a_number_is_read_back(number, comma):
    text = f"{number.numerator:,}" if comma else str(number.numerator)
    if len(text) < 40 and number.denominator < 10**40:
        assert parse_number(f" {text}/{number.denominator} ") == number


@pytest.mark.parametrize(
    ("completion", "value", "partial"),
    [
        ("<think>2+3</think><answer>5</answer>", 1, 1),
        (" <think>2+3</think>\n<answer>5</answer>\n", 1, 1),
        ("<think></think><answer>5</answer>", 1, 1),
        ("<think>2+3</think><answer> </answer>", 0, 0.8),  # nothing is answered
        ("<think>2+3</think>so<answer>5</answer>", 0, 0.8),
        ("<think>2+3</think><answer>5</answer>.", 0, 0.8),
        ("well <think>2+3</think><answer>5</answer>", 0, 0.8),
        ("<answer>5</answer><think>2+3</think>", 0, 0.8),
        ("<think><answer>5</think></answer>", 0, 0.8),
        ("</think><think><answer>5</answer>", 0, 0.8),
        ("<think>2</think><think>3</think><answer>5</answer>", 0, 0.4),  # a tag twice earns nothing
        ("<answer>5</answer>", 0, 0.4),
        ("<answer>5", 0, 0.2),
        ("5", 0, 0),
        ("", 0, 0),
        ("<think>" * 4, 0, 0),
    ],
)
def test_format(completion, value, partial):
    assert think_answer_format(completion) == value
    assert think_answer_format(completion, partial=True) == pytest.approx(partial, rel=1e-12)


@pytest.mark.parametrize(
    ("completion", "extract", "value"),
    [
        (r"so \boxed{5}", "boxed", 1),
        ("so 5", "boxed", 0),
        (r"so \boxed{}", "boxed", 0),
        ("#### 5", "hashes", 1),
        (r"<think>\boxed{5}</think> 5", "boxed", 0),
        ("5", "answer", 1),
        ("five", "answer", 0),
    ],
)
def test_format_of_a_mark(completion, extract, value):
    assert think_answer_format(completion, extract=extract) == value


@pytest.mark.parametrize("also", [{"partial": True}, {"opened": True}, {"pattern": "5"}])
def test_format_takes_one_form(also):
    with pytest.raises(ValueError, match=r"^format: (extract and pattern take|give extract or)"):
        think_answer_format("5", extract="boxed", **also)


def test_format_opened_by_the_prompt():
    assert think_answer_format("2+3</think><answer>5</answer>", opened=True) == 1
    assert think_answer_format("<think>2+3</think><answer>5</answer>", opened=True) == 0
    assert think_answer_format(think_answer("2+3", "5")) == 1


@pytest.mark.parametrize(
    ("completion", "exact", "positions", "inclusion"),
    [
        # numbers are 3 1 2; inclusion is (numbers found + pairs in order) / 5
        ("1 2 3", 1, 1, 1),
        ("[1, 2, 3]", 1, 1, 1),
        ("(1,2,3)\n", 1, 1, 1),
        ("1 3 2", 0, 1 / 3, 4 / 5),
        ("3 2 1", 0, 1 / 3, 3 / 5),
        ("1 1 1", 0, 1 / 3, 3 / 5),
        ("1 2", 0, 2 / 3, 3 / 5),  # two numbers, one pair
        ("1 2 3 3", 0, 3 / 4, 3 / 4),  # too long: 5/5 of the first three, times 3/4
        ("1", 0, 1 / 3, 1 / 5),
        ("-1 -2", 0, 0, 0),
        ("1 2 3.", 0, 0, 0),
        ("1 2 three", 0, 0, 0),
        ("1 2 3 because", 0, 0, 0),
        ("1,,2 3", 0, 0, 0),
        ("1 - 2", 0, 0, 0),
        ("[1 2 3", 0, 0, 0),
        ("1" * 19, 0, 0, 0),
        ("", 0, 0, 0),
        ("[]", 0, 0, 0),
    ],
)
def test_sorted_text(completion, exact, positions, inclusion):
    values = {"exact": exact, "positions": positions, "inclusion": inclusion}
    for credit, value in values.items():
        given_value = sorted_numbers(completion, [3, 1, 2], credit=credit)
        assert given_value == pytest.approx(value, rel=1e-12), credit


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_sorted_text_agrees_with_the_rewards_of_lists(numbers, data):
    count = len(numbers)
    response = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    text = " ".join(map(str, response))
    pairs = {
        "exact": sorting_lists.exactly_sorted(numbers, response),
        "positions": sorting_lists.position_matches(numbers, response) / count,
        "inclusion": sorting_lists.inclusion_ordering(numbers, response) / (2 * count - 1),
    }
    for credit, expected in pairs.items():
        assert sorted_numbers(text, numbers, credit=credit) == pytest.approx(expected, rel=1e-12)


@given(st.text(alphabet="0123 ,-[]x", max_size=30), st.sampled_from(["positions", "inclusion"]))
def test_sorted_text_is_full_only_for_the_sorted_list(text, credit):
    value = sorted_numbers(text, [3, 1, 2], credit=credit)
    assert 0 <= value <= 1
    assert (value == 1) == (parse_numbers(text) == [1, 2, 3])


def test_nothing_to_sort_is_a_fault_of_the_data():
    with pytest.raises(ValueError, match="at least one number"):
        sorted_numbers("1", [])


@pytest.mark.parametrize(
    ("num_tokens", "options", "value"),
    [
        (0, {}, 0.0),
        (100, {}, 0.0),
        (101, {}, -0.001),
        (600, {"per_token": 0.01}, -1.0),
        (600, {"per_token": 0.01, "maximum": 3.0}, -3.0),
        (600, {"per_token": 0.0}, 0.0),
    ],
)
def test_length(num_tokens, options, value):
    assert length_penalty(num_tokens, target=100, **options) == pytest.approx(value, rel=1e-12)


def test_length_refuses_a_sign_turned_twice():
    with pytest.raises(ValueError, match="subtracted already"):
        length_penalty(5, target=1, per_token=-0.1)


@pytest.mark.parametrize("piece", ["1 ", "1,", " ", "-", "1", "[", "1  ,  ", "(", "9e", "<think>"])
def test_time_is_linear(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    sorted_numbers(text, [3, 1, 2], credit="inclusion")
    sorted_numbers(text + "x", [3, 1, 2], credit="inclusion")
    numeric_answer(text, "5", extract="whole")
    numeric_answer(text, "5")
    exact_answer(text, "5")
    think_answer_format(text, partial=True)
    countdown_expression(text, {"numbers": [1], "target": 1})
    assert time.process_time() - started < 60  # of this process; quadratic would take many minutes
