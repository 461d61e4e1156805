"""Words that are numbers, or act on one: no such word only says what a number counts."""

from __future__ import annotations

import re
from fractions import Fraction

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = {word: value for value, word in enumerate(_SMALL.split())}
NUMBERS |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "lakh": 10**5, "million": 10**6,
    "crore": 10**7, "billion": 10**9, "trillion": 10**12,
    "quadrillion": 10**15, "quintillion": 10**18,
}  # fmt: skip
_ORDINALS = {"five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
_ORDINALS |= {word: f"{word[:-1]}ieth" for word in _TENS.split()}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4} | {
    _ORDINALS.get(word, f"{word}th"): value
    for word, value in (NUMBERS | _SCALES).items()
    if value > 3 and word != "dozen"
}
_SIGNS = frozenset({"negative", "minus"})
_ACTING = frozenset({
    # words that multiply, divide, raise, add to, or continue a number
    "double", "doubled", "twice", "triple", "tripled", "thrice", "quadruple", "quadrupled",
    "halved", "times", "multiplied", "squared", "cubed", "percent", "percentage", "over", "divided",
    "plus", "added", "subtracted", "mod", "modulo", "base", "power", "factorial", "gross", "grand",
    "couple", "several", "inverse", "reciprocal", "inverted", "reversed", "backwards", "repeating",
    "recurring", "point", "decimal", "rounded", "halfway", "score", "myriad", "googol",
    # words that negate a number, or make it a bound
    "negative", "negated", "minus", "opposite", "below", "beneath", "under", "lower", "down",
    "less", "fewer", "short", "owed", "overdrawn", "overdraft", "loss", "deficit", "debt",
    "without", "except", "not", "no", "never", "none", "nothing", "neither", "nor", "least", "most",
    # words of another guess, or of doubt
    "or", "else", "either", "maybe", "perhaps", "probably", "possibly", "alternatively", "versus",
    "otherwise", "unless", "instead", "rather", "actually", "wait", "sorry", "oops", "something",
    "anything", "unknown", "unsure", "guess", "about", "around", "approximately", "roughly",
    "approx", "circa", "estimated", "ish", "almost", "nearly",
    # words of a sentence: "5 is wrong" does not count things
    "is", "isn", "are", "was", "were", "be", "if", "then", "than", "but", "because", "since", "for",
    "so", "as", "with", "when", "where", "which", "that", "this", "the", "it", "its", "and", "at",
    "in", "on", "to", "from", "by", "also", "only", "answer", "solution", "wrong", "right",
    "correct", "incorrect", "false", "true", "number", "equals",
})  # fmt: skip
_RUNS = re.compile("[a-z]+")
_SPOKEN = re.compile("[a-zA-Z]{3,}[a-zA-Z -]*|an? [a-zA-Z]+")


def acts_on_number(word: str) -> bool:
    """Whether a word after a number changes it, denies it or is another one.

    >>> acts_on_number("quarters"), acts_on_number("twice"), acts_on_number("apples")
    (True, True, False)
    """
    singular = word.removesuffix("s")
    if word in _ACTING or word.endswith("fold"):
        return True
    return any(singular in table for table in (NUMBERS, _SCALES, _PARTS))


def scale_of(word: str) -> Fraction | None:
    """What a word after a number multiplies it by: ``million``, ``dozen``, ``thirds``; else None.

    >>> scale_of("lakh"), scale_of("quarters"), scale_of("apples")
    (Fraction(100000, 1), Fraction(1, 4), None)
    """
    singular = word.lower().removesuffix("s")
    if singular in _PARTS:
        return Fraction(1, _PARTS[singular])
    return Fraction(_SCALES[singular]) if singular in _SCALES else None


def number_in_words(text: str) -> str | None:
    """The number that words are: ``thirty-six``, ``minus two``, ``two thirds``; else None.

    >>> number_in_words("Thirty-six"), number_in_words("two thirds"), number_in_words("north")
    ('36', '2/3', None)
    >>> number_in_words("one thousand two hundred"), number_in_words("a dozen")
    ('1200', '12')
    """
    runs = _RUNS.findall(text.lower())
    if not _SPOKEN.fullmatch(text):
        return None
    if runs[-1] == "half" and (runs == ["half"] or runs[-3:-1] in (["and", "a"], ["and", "one"])):
        whole = _whole(runs[:-3]) if runs[:-3] else 0
        return None if whole is None else f"{2 * whole + 1}/2"
    sign = "-" if runs[0] in _SIGNS else ""
    runs = runs[1:] if sign else runs
    if len(runs) > 1 and runs[0] in ("a", "an"):
        runs = ["one", *runs[1:]]
    below = _PARTS.get(runs[-1].removesuffix("s"), 0) if len(runs) > 1 else 0
    value = _whole(runs[:-1] if below else runs)
    # An ordinal is the denominator: twenty-fourth.
    is_ordinal = below and value != 1 and not runs[-1].endswith("s")
    if value is None or is_ordinal:
        return None
    return f"{sign}{value}/{below}" if below else f"{sign}{value}"


def _whole(runs: list[str]) -> int | None:
    """The value of a whole number's words, in the order in which they are said; else None."""
    total, group, last = 0, -1, 10**30  # a group is the number before thousand, million, …
    for place, run in enumerate(runs):
        value = NUMBERS.get(run, -1)
        if run == "and" and 0 < place < len(runs) - 1:
            continue
        if run == "hundred" and group < 100:
            group = 100 * (group if group > 0 else 1)
        elif run in _SCALES and run != "hundred" and _SCALES[run] < last:
            last = _SCALES[run]
            total, group = total + last * (group if group > 0 else 1), -1
        elif value >= 0 and (group < 0 or (value and _may_follow(group, value))):
            group = max(group, 0) + value
        else:
            return None
    return total + max(group, 0) if runs else None


def _may_follow(group: int, value: int) -> bool:
    """Whether a number is said after this one: four after twenty, and not twenty after four."""
    rest = group % 100
    return group > 0 and (rest == 0 or (rest >= 20 and rest % 10 == 0 and value < 10))
