"""The reward `math` on the corpus, and what must hold of any two answers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewards.math_corpus_rows import GOLD_SETS, golds, rows, themes

from posttrain.rewards.math.answer import math_answer
from posttrain.rewards.math.compare import same
from posttrain.rewards.math.parser import parse
from posttrain.rewards.math.units import parse_unit


@pytest.mark.parametrize("theme", themes())
def test_every_pair_is_judged_as_written(theme):
    mistaken = [
        (row.gold, completion, row.why)
        for row in rows(theme)
        for completion in row.completions
        if math_answer(completion, row.gold) != float(row.equal)
    ]
    assert mistaken == []


def test_pairs_that_were_held_out_while_it_was_written():
    """None is right that should be wrong; of the others it misses sums, integrals and the like."""
    wrong = [
        row
        for row in rows("heldout")
        if any(
            math_answer(completion, row.gold) != float(row.equal) for completion in row.completions
        )
    ]
    assert [row for row in wrong if not row.equal] == []
    assert len(wrong) <= 8


@pytest.mark.parametrize("name", GOLD_SETS)
def test_a_right_answer_is_itself(name):
    failed = [
        gold
        for gold in golds(name)
        if any(math_answer(text, gold) != 1 for text in (gold, f"so $\\boxed{{{gold}}}$."))
    ]
    assert failed == []


def test_a_right_answer_that_is_none_is_broken_and_not_wrong():
    for row in rows("unreadable"):
        for completion in row.completions:
            with pytest.raises(ValueError, match="answer: cannot be read as mathematics"):
                math_answer(completion, row.gold)


def test_the_corpus_is_large_and_of_both_verdicts():
    verdicts = [row.equal for theme in themes() for row in rows(theme)]
    assert len(verdicts) >= 500
    assert min(verdicts.count(True), verdicts.count(False)) >= 200


# ---------------------------------------------------------------------------- what must hold of any

NUMBERS = st.fractions(max_denominator=10**6).filter(bool)
ATOMS = st.one_of(
    st.sampled_from(["x", "y", "n", "a_1", r"\theta", r"\pi", "e", "5 m", "3 km", "50\\%", "2ab"]),
    st.integers(0, 10**12).map(str),
    st.decimals(0, 1000, places=3).map(str),
)


def _larger(inner):
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"),
        pair.map(lambda p: rf"{p[0]} + {p[1]}"),
        pair.map(lambda p: rf"({p[0]})({p[1]})"),
        pair.map(lambda p: rf"({p[0]}, {p[1]})"),
        pair.map(lambda p: rf"[{p[0]}, {p[1]})"),
        pair.map(lambda p: rf"\left\{{{p[0]}, {p[1]}\right\}}"),
        pair.map(lambda p: rf"{p[0]} \text{{ or }} {p[1]}"),
        pair.map(lambda p: rf"{p[0]} < {p[1]}"),
        inner.map(lambda p: rf"\sqrt{{{p}}}"),
        inner.map(lambda p: f"({p})^{{2}}"),
        inner.map(lambda p: rf"\sin({p})"),
        inner.map(lambda p: f"x = {p}"),
    )


ANSWERS = st.recursive(ATOMS, _larger, max_leaves=5)


def _shown(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@given(ANSWERS)
def test_an_answer_equals_itself(answer):
    assert math_answer(f"\\boxed{{{answer}}}", answer) == 1


@given(ANSWERS, ANSWERS)
def test_equality_has_no_direction(one, two):
    assert math_answer(one, two, max_characters=10_000) == math_answer(
        two, one, max_characters=10_000
    )


@given(NUMBERS)
def test_a_number_is_never_its_double_nor_its_opposite(value):
    for other in (2 * value, -value, value + 1):
        assert math_answer(_shown(other), _shown(value)) == 0


@given(NUMBERS, NUMBERS)
def test_numbers_are_equal_where_their_fractions_are(one, two):
    assert math_answer(f"{one}", _shown(two)) == float(one == two)


@given(ATOMS.filter(str.isdigit), ANSWERS)
def test_a_number_never_equals_what_has_symbols(number, answer):
    node = parse(answer)
    if node is not None and node.symbols and "chain" not in node.kinds:
        assert math_answer(answer, number) == 0


@given(
    st.text(alphabet="0123456789.,:/%$^_{}()[]|\\+-*=<> abcdefmnxyABCtextfracsqrt°'!", max_size=60)
)
def test_any_text_is_right_or_wrong_and_nothing_else(text):
    for answer in ("5", "x+1", "(1,2)", "5 m", r"\{1,2\}"):
        assert math_answer(text, answer, extract="whole") in (0.0, 1.0)


# ---------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("one", "two", "factor"),
    [
        ("km", "m", 1000),
        ("m/s", "km/h", Fraction(18, 5)),
        ("square feet", "in^2", 144),
        ("mL", "cm^3", 1),
        ("J", "kg m^2/s^2", 1),
        ("kW h", "J", 3_600_000),
        ("dollars", "cents", 100),
        ("N/m^2", "Pa", 1),
        ("miles per hour", "mph", 1),
        ("Hz", "1/s", None),  # what is no name is no unit
        ("kg", "m", None),
        ("°C", "K", None),
    ],
)
def test_units_are_converted_by_their_factors(one, two, factor):
    first, second = parse_unit(one), parse_unit(two)
    agree = first is not None and second is not None and first.agrees(second)
    assert agree == (factor is not None)
    assert not agree or first.factor / second.factor == factor


@pytest.mark.parametrize("letters", ["xy", "ab", "k", "t", "is wrong", "or 6"])
def test_letters_and_prose_are_no_units(letters):
    assert parse_unit(f" {letters}") is None


def test_counted_work_ends_a_comparison(monkeypatch):
    one, two = parse("(x+1)^2+(x+2)^2"), parse("2x^2+6x+5")
    assert same(one, two)
    monkeypatch.setattr("posttrain.rewards.math.evaluator.MAX_OPERATIONS", 50)
    assert not same(one, two)
