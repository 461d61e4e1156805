"""Is the answer, as mathematics, the right one?"""

from __future__ import annotations

import math
import re

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import Extract, extract_answer
from posttrain.rewards.math.compare import same
from posttrain.rewards.math.latex import clean, is_balanced, key, unwrapped, words
from posttrain.rewards.math.nodes import Node
from posttrain.rewards.math.parser import parse
from posttrain.rewards.math.units import parse_unit
from posttrain.rewards.math.words import number_in_words

_CLOCK = re.compile(
    r"([0-9]{1,2})(?::([0-5][0-9]))?(?::([0-5][0-9]))?\s?(?:([ap])\.?\s?m\.?)?", re.IGNORECASE
)
_IN_WORDS = {
    "empty set": r"\emptyset", "no solution": r"\emptyset", "no solutions": r"\emptyset",
    "all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "infinity": r"\infty",
    "negative infinity": r"-\infty", "all positive real numbers": r"(0,\infty)",
}  # fmt: skip
_NAMED_TIMES = {"noon": "12:00 pm", "midnight": "12:00 am"}
_CHOICE = re.compile(
    r"\(?([A-H])(?:\)|[.:](?=\s))\s?((?!.*\b[A-H]\b)\S.*)?|(?:Option |Choice )?\(?([A-H])\)?"
)
_CONDITION = re.compile(
    r",?\s?(?:\\text\s?\{\s?(?:for|where)\b.*|\bfor\s.*|\\forall.*"
    r"|(?:\\text\s?\{\s?where\s?\})?\s?[kmn]\s?\\in\s?\\mathbb\{[NZ]\})$"
)
_EXCEPTION = re.compile(r"((?:(?!\\[lgn]e\b)[^<>])*),\s?[a-z]\s?\\ne\b[^,]*")
_TWO_UNITS = re.compile(r"([0-9][0-9.,]*)\s?([a-zA-Z]+),?\sand\s([0-9][0-9.,]*)\s?([a-zA-Z]+)")
_VALUE_OF = re.compile(r"\\(?:lim|sum|int|prod).*=([^=]+)")


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

    Rational numbers are compared exactly, other values to sixty digits, expressions in symbols at
    a few points: LaTeX, roots, sets, intervals, matrices, equations, quantities with units. 50%
    equals 50 and 0.5; a unit may be left out, but not be another. What is too large to compute with
    is wrong, and quickly so.

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


def _expected(answer: str | float) -> str:
    """The right answer, cleaned. An unusable one is an error of the data, not a wrong answer."""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(answer)
    if isinstance(answer, str) and is_balanced(answer):
        text = clean(extract_answer(answer, "boxed") or answer)
        if re.search("[0-9a-zA-Z]", text.replace("\\boxed", "")):
            return text
    raise ValueError(
        f"answer: cannot be read as mathematics: {answer!r}; fix the data, or use the reward "
        "'exact' where the answers are text"
    )


def _is_right(expected: str, given: str, *, tolerance: float) -> bool:
    heads = _without_condition(expected), _without_condition(given)
    if (heads[0] == expected) != (heads[1] == given):  # an answer may leave out its condition
        expected, given = heads
    if (limit := _VALUE_OF.fullmatch(given)) and "=" not in expected:
        given = limit[1].strip()
    expected, given = _in_figures(expected), _in_figures(given)
    if key(given) == key(expected):
        return True
    if given.isdecimal() and _clock(expected) and expected.rstrip(".}) ").lower().endswith("m"):
        given += ":00"  # the hour alone, of 7 am
    times = _clock(expected), _clock(given)
    if any(times) and (all(times) or ":" in expected + given):
        return _same_time(*times)
    choices = [_CHOICE.fullmatch(unwrapped(text)) for text in (expected, given)]
    if choices[0] and choices[1]:
        return (choices[0][1] or choices[0][3]) == (choices[1][1] or choices[1][3])
    if choices[1] and choices[1][2]:  # a choice with its text: (B) 12
        return _is_right(expected, clean(choices[1][2]), tolerance=tolerance)
    if words(expected) is not None:
        return words(given) == words(expected)
    return any(
        one is not None and two is not None and same(one, two, tolerance=tolerance)
        for one, two in _readings(expected, given)
    )


def _in_figures(text: str) -> str:
    """Numbers in words as figures: ``fifty percent``, ``1 hour and 30 minutes``."""
    said = _IN_WORDS.get(words(text) or "") or number_in_words(text)
    if said:
        return said
    bare = unwrapped(text)
    number, _, name = bare.rpartition(" ")
    unit, figures = parse_unit(f" {name}"), number_in_words(number)
    if unit and unit.dimension and figures:
        return f"{figures} {name}"
    if parts := _TWO_UNITS.fullmatch(bare):
        larger, smaller = parse_unit(f" {parts[2]}"), parse_unit(f" {parts[4]}")
        if larger and smaller and smaller.is_part_of(larger):
            return " ".join(parts.groups())
    return text


def _without_condition(text: str) -> str:
    """An answer without the numbers that it holds for: ``2k+1, k ∈ ℤ``, ``1/x, x ≠ 0``."""
    exception = _EXCEPTION.fullmatch(text)
    return exception[1] if exception else _CONDITION.sub("", text).strip()


def _readings(expected: str, given: str) -> list[tuple[Node | None, Node | None]]:
    """Both texts as expressions, and as quantities, for a letter may be a symbol or a unit."""
    plain = parse(expected), parse(given)
    loose = parse(expected, loose_units=True), parse(given, loose_units=True)
    if loose != plain and all(node is not None and node.kind == "quantity" for node in loose):
        return [plain, loose]
    return [plain]


def _clock(text: str) -> tuple[int, int, str] | None:
    """A time of day: seconds since midnight or noon, the hour as written, and which half."""
    match = _CLOCK.fullmatch(_NAMED_TIMES.get(text.lower(), unwrapped(text)))
    if match is None or not (match[2] or match[4]):
        return None
    hour, minute, second = (int(match[group] or 0) for group in (1, 2, 3))
    if hour > 24 or (match[4] and not 1 <= hour <= 12):
        return None
    half = (match[4] or "").lower() or {0: "a"}.get(hour, "p" if hour > 12 else "")
    return (hour % 12) * 3600 + minute * 60 + second, hour, half


def _same_time(one: tuple[int, int, str] | None, two: tuple[int, int, str] | None) -> bool:
    if one is None or two is None or one[0] != two[0]:
        return False
    return one[2] == two[2] or "" in (one[2], two[2])  # one may not say which half of the day
