"""Is the answer, as mathematics, the right one?"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import Extract, extract_answer
from posttrain.rewards.math_expression import equivalent, number_expression, parse_expression
from posttrain.rewards.math_text import (
    Plain,
    assigned,
    clean,
    plain_number,
    unit_of,
    without_unit,
    words,
)


@dataclass(frozen=True)
class Reading:
    """A text as mathematics: a plain number, words, or an expression that takes algebra."""

    text: str
    number: Plain | None
    words: str | None
    expression: Any = None

    @property
    def is_nothing(self) -> bool:
        """Whether the text could not be read at all."""
        return self.number is None and self.words is None and self.expression is None


@declare(checks_answer=True)
def math_answer(
    completion: str,
    answer: str | float,
    *,
    extract: Extract = "auto",
    tolerance: float = 0.0,
    max_characters: int = 500,
) -> float:
    r"""1 where the extracted answer equals ``answer`` as mathematics, else 0.

    Plain numbers are compared as exact fractions; all else is parsed by math-verify and compared by
    value: LaTeX, roots, sets, intervals, matrices, equations. 50% equals 50 and 0.5; a unit may be
    left out, but not be another. What is too large to compute with is wrong, and quickly so.

    >>> math_answer(r"so \boxed{\frac{2}{4}}", "0.5"), math_answer(r"\boxed{x=\sqrt{8}}", "2√2")
    (1.0, 1.0)
    >>> math_answer("9**9**9**9", "1"), math_answer("#### 1,080", "1080")
    (0.0, 1.0)
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance: must be at least 0, got {tolerance}")
    expected = _expected(answer)
    given = extract_answer(completion, extract)
    if given is None or len(given) > max_characters:
        return 0.0
    return float(_is_right(expected, clean(given), tolerance=tolerance))


def _expected(answer: str | float) -> Reading:
    """The right answer. One that cannot be read is a fault of the data, not a wrong answer."""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return Reading(str(answer), Plain(Fraction(str(answer))), None)
    if isinstance(answer, str) and not (reading := _read(_unboxed(answer))).is_nothing:
        return reading
    raise ValueError(
        f"answer: cannot be read as mathematics: {answer!r}; mend the data, or use the reward "
        "'exact' where the answers are text"
    )


def _unboxed(text: str) -> str:
    text = clean(text)
    return clean(extract_answer(text, "boxed") or text)


@functools.lru_cache(maxsize=4096)  # a group of completions shares its answer
def _read(text: str) -> Reading:
    bare = without_unit(text)
    number, word = plain_number(bare), words(text)
    if number is not None or word is not None:
        return Reading(text, number, word)
    return Reading(text, None, None, parse_expression(bare))


def _is_right(expected: Reading, given: str, *, tolerance: float) -> bool:
    if given == expected.text:
        return True
    if expected.words is not None:
        return words(given) == expected.words
    if "=" not in expected.text:
        given = assigned(given) or given  # x = 5 answers 5
    elif "=" not in given:
        expected = _read(assigned(expected.text) or expected.text)
    units = unit_of(expected.text), unit_of(given)
    if all(units) and units[0] != units[1]:
        return False
    if {expected.text[:2] == "\\{", given[:2] == "\\{"} == {True, False} and (
        expected.text[:1] in "([" or given[:1] in "(["
    ):
        return False  # the parser takes (1, 2) and {1, 2} for the same
    given = without_unit(given)
    number = plain_number(given)
    if expected.number is not None and number is not None:
        return _same_number(expected.number, number, tolerance=tolerance)
    one, two = _expression(expected), parse_expression(given)
    return one is not None and two is not None and equivalent(one, two, tolerance=tolerance)


def _same_number(expected: Plain, given: Plain, *, tolerance: float) -> bool:
    values = [given.value]
    if expected.percent != given.percent:  # 50% may be asked for as 50 or as 0.5
        values.append(given.value / 100 if given.percent else given.value * 100)
    return any(abs(value - expected.value) <= Fraction(str(tolerance)) for value in values)


def _expression(reading: Reading) -> Any:
    if reading.number is None:
        return reading.expression
    return number_expression(reading.number.value)
