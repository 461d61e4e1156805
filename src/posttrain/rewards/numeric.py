"""Is the answer, as text or as a number, the right one?"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import Extract, extract_answer, plain
from posttrain.rewards.math.words import scale_of


@declare(checks_answer=True)
def exact_answer(
    completion: str, answer: str, *, extract: Extract = "whole", ignore_case: bool = False
) -> float:
    """1 where the extracted answer equals ``answer`` up to spaces and Unicode form, else 0.

    >>> exact_answer("<answer>Paris </answer>", "Paris", extract="tag")
    1.0
    >>> exact_answer("paris", "Paris"), exact_answer("paris", "Paris", ignore_case=True)
    (0.0, 1.0)
    """
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"answer: expected text that is not empty, got {answer!r}")
    given = extract_answer(completion, extract)
    same = given is not None and _normal(given, ignore_case) == _normal(answer, ignore_case)
    return float(same)


@declare(checks_answer=True)
def one_of_answers(completion: str, answers: Sequence[str], *, extract: Extract = "whole") -> float:
    """1 where the extracted answer is one of ``answers``, as :func:`exact_answer` compares, else 0.

    >>> one_of_answers(" 3", ["1", "3"]), one_of_answers("2", ["1", "3"])
    (1.0, 0.0)
    """
    if not answers or isinstance(answers, str):
        raise ValueError(f"answers: expected a list of texts that is not empty, got {answers!r}")
    return max(exact_answer(completion, answer, extract=extract) for answer in answers)


def _normal(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text


MAX_NUMBER_LENGTH = 100  # characters; more is no answer, and costs time to compute with

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_NUMBER = re.compile(
    rf"([+-]?)\s?(?:\\?[$€£¥₹])?([+-]?)(?:([0-9]+) (?=[0-9]+/[0-9]))?"
    rf"({_PLAIN})(?:\s?/\s?({_PLAIN}))?\s?(?:\\?%)?"
    r"(?:\s?\{?\s?((?i:thousand|million|billion))\}?)?"
)


@declare(checks_answer=True)
def numeric_answer(
    completion: str, answer: str | float, *, extract: Extract = "answer", tolerance: float = 0.0
) -> float:
    """1 where the extracted number x is the right one: ``|x − answer| ≤ tolerance``, else 0.

    Numbers are compared as exact fractions, so 0.1 is 1/10 and 1,000 is 1e3.

    >>> numeric_answer("so it is $1,000.", "1000"), numeric_answer("1/3", "0.33", tolerance=0.01)
    (1.0, 1.0)
    >>> numeric_answer("#### 12", "12", extract="hashes"), numeric_answer("I do not know", "12")
    (1.0, 0.0)
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance: must be at least 0, got {tolerance}")
    expected = _expected(answer)
    given = extract_answer(completion, extract)
    numbers = {parse_number(stated) for stated in given.split(" or ")} if given else {None}
    number = numbers.pop()
    # Several numbers are an answer only if all are equal: 1/2 or 0.5, not 72 or 73.
    if number is None or numbers:
        return 0.0
    return float(abs(number - expected) <= Fraction(str(tolerance)))


def parse_number(text: str) -> Fraction | None:
    r"""The number that a text is, exactly; None where it is none.

    Reads 1,000 and 1 000 and 1000, 1.0 and 5. and .5, +5 and −5, 1e3, 10^3 and 2 \times 10^3,
    2 million, 3/4, 3 1/2, ¾, \frac{3}{4} and \frac34, $5 and 5% (the sign of a currency and the per
    cent are dropped, not computed with).

    >>> parse_number("-1,250.50"), parse_number("3/4"), parse_number("4 apples")
    (Fraction(-2501, 2), Fraction(3, 4), None)
    """
    text = text.strip()
    return _parsed(text) if len(text) <= MAX_NUMBER_LENGTH else None


@functools.lru_cache(maxsize=4096)  # a group of completions shares its answer
def _parsed(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(plain(text))
    if match is None or (match[1] and match[2]):
        return None
    numerator = Fraction(match[4].replace(",", "").rstrip("."))
    denominator = Fraction(match[5].replace(",", "").rstrip(".")) if match[5] else Fraction(1)
    if denominator == 0:
        return None
    value = (int(match[3] or 0) + numerator / denominator) * (scale_of(match[6] or "") or 1)
    return -value if "-" in (match[1], match[2]) else value


def _expected(answer: str | float) -> Fraction:
    """The right answer. One that is no number is an error of the data, not a wrong answer."""
    expected = None
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        expected = Fraction(str(answer))  # 0.1 is one tenth, not the double nearest to it
    elif isinstance(answer, str):
        expected = parse_number(answer)
    if expected is None:
        mend = "use the reward 'exact'"
        if "####" in str(answer):
            mend = "put only what follows #### there, or use the task gsm8k"
        raise ValueError(f"answer: expected a number, got {answer!r}; {mend}")
    return expected
