r"""Mathematics as text, before any parser sees it: cleaned, read where plain, refused where a bomb.

Everything here is linear in the length of the text, and computes with nothing but short numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from posttrain.rewards.numeric import parse_number

MAX_DEPTH = 5  # brackets in brackets; the parser takes exponential time in them
MAX_DIGITS = 100  # of one number
MAX_EXPONENT_DIGITS = 4
MAX_COUNTS = {"|": 4, "=": 3, ",": 60, "&": 60}  # of these, the parser takes more than linear time
MIN_WORD = 4  # letters in a row that are a word; fewer may be a product of symbols

_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "\u00a0": " ", "\u202f": " ",
}  # fmt: skip
_TRANSLATE = str.maketrans(_UNICODE)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))

# Each is tried in order; none can take more than linear time on a line of bounded length.
_CLEANING = [
    (re.compile(r"√\s?(\d+|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"√\s?\("), r"\\sqrt("),
    (re.compile(r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|displaystyle)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<!\\)\\[,;: ]|~"), " "),
    (re.compile(r"(?:\^\s?\{\s?\\circ\s?\}|\^\s?\\circ|\\degree)(?![a-zA-Z])|\s?\bdegrees?$"), ""),
    (re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))"), ","),  # 1 000, and 1\,000
    (re.compile(r"\s?(?:\bpercent|\bper cent|\\text\s?\{\s?percent\s?\})$"), "%"),
    (
        re.compile(r"(?<![0-9.])10\s?\^\s?(?:\{\s?([+-]?[0-9]{1,3})\s?\}|([+-]?[0-9]{1,3}))$"),
        r"1e\1\2",
    ),
    (re.compile(r"\s?(?:\\times|\\cdot|\*|x)\s?1e([+-]?[0-9]{1,3})$"), r"e\1"),
]
_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")
_MIXED = re.compile(r"([+-]?)\s?([0-9]{1,30})\s?(?:\\frac\{([0-9]{1,30})\}\{([0-9]{1,30})\})")
_MIXED_PLAIN = re.compile(r"([+-]?)\s?([0-9]{1,30})(?:\s+|-)([0-9]{1,30})/([0-9]{1,30})")
_SHORT_FRACTION = re.compile(r"\\frac\s?([0-9])\s?([0-9])(?![0-9])")
_SHORT_UNITS = "cm|mm|km|ft|yd|mi|kg|mg|lb|lbs|oz|ml|hr|hrs|min|sec|mph|kph|kmh"
_UNIT = re.compile(
    r"[0-9}]\s*(?:\\(?:text|textrm|mathrm|mbox)\s?\{\s*([a-zA-Z][a-zA-Z ./]*?)\s*\}"
    rf"|({_SHORT_UNITS}|[a-zA-Z]{{4,}}))(?:\s?\^\s?\{{?([0-9])\}}?)?$"
)
_BASE = re.compile(r"[0-9]_\{?([0-9]{1,2})\}?$")
_ASSIGNMENT = re.compile(r"[a-zA-Z](?:_\{?[a-zA-Z0-9]+\}?)?(?:\([a-z]\))?\s?=(?!=)([^=<>]+)")
_WORDS = re.compile(r"[a-zA-Z]{2,}(?:[ -][a-zA-Z]+)*")

# Commands that make the parser compute (and their arguments may be towers), or take a fresh name.
_COMPUTES = re.compile(
    r"\\(?:sum|prod|i+nt|oint|lim|operatorname|det|gcd|lcm|max|min|[gG]amma|xrightarrow|Vert|lVert"
    r"|begin\s?\{[vV]matrix\}|\|)|\|\s?[_^]|\*\*|[-+]\s?[-+]\s?[-+]"
)
_BINOMIAL = re.compile(r"\\[dt]?binom(?!\s?\{\s?[0-9]{1,3}\s?\}\s?\{\s?[0-9]{1,3}\s?\})")
_FACTORIAL = re.compile(r"(?<![0-9])[0-9]{1,3}!(?!\s?!)|(?<![a-zA-Z])[a-zA-Z]!(?!\s?!)")
_OPENED_AT_ONCE = re.compile(r"[(\[{]\s?[(\[{]\s?[(\[{]\s?[(\[{]")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_PROSE = re.compile(r"(?<![a-zA-Z\\])(?!sqrt|infinity)[a-zA-Z]{4,}")
_NAMES = re.compile(_TEXT.pattern + r"|\\(?:begin|end)\s?\{[a-zA-Z*]*\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


@dataclass(frozen=True)
class Plain:
    """A number that needs no algebra; ``percent`` says that a per cent sign followed it."""

    value: Fraction
    percent: bool = False


def clean(text: str) -> str:
    r"""One line of LaTeX without delimiters, spacing, degrees and the like.

    >>> clean(r" $\left(1{,}000\,\right)$. "), clean("30°"), clean(r"1.5 \times 10^{-3}")
    ('(1,000 )', '30', '1.5e-3')
    """
    text = " ".join(text.translate(_TRANSLATE).split())
    text = text.removesuffix(".").strip()
    for _ in _DELIMITERS:
        for start, end in _DELIMITERS:
            inner = text[len(start) : len(text) - len(end)]
            if (
                text.startswith(start)
                and text.endswith(end)
                and inner.strip()
                and start not in inner
            ):
                text = inner.strip()
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text).strip()
    whole = _TEXT.fullmatch(text)
    text = whole[1].strip() if whole else text
    return text.removesuffix(".").strip()


def plain_number(text: str) -> Plain | None:
    r"""The number that a cleaned text is, mixed numbers included; None where it takes algebra.

    >>> plain_number(r"2\frac{1}{3}"), plain_number("50%"), plain_number("x")
    (Plain(value=Fraction(7, 3), percent=False), Plain(value=Fraction(50, 1), percent=True), None)
    """
    percent = text.endswith("%")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    mixed = _MIXED.fullmatch(text) or _MIXED_PLAIN.fullmatch(text)
    if mixed is not None and int(mixed[4]) != 0:
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return Plain(-value if mixed[1] == "-" else value)
    number = parse_number(text)
    return None if number is None else Plain(number, percent)


def unit_of(text: str) -> str:
    r"""The unit after a number, singular and in small letters, or its base; empty without one.

    >>> unit_of(r"5\text{ cm}^2"), unit_of("3 Hours"), unit_of("101_2"), unit_of("7xy")
    ('cm^2', 'hour', 'base 2', '')
    """
    match, base = _UNIT.search(text), _BASE.search(text)
    if match is None:
        return f"base {base[1]}" if base else ""
    name = (match[1] or match[2]).lower().replace(".", "")
    name = name[:-1] if len(name) > 3 and name.endswith("s") else name
    return f"{name}^{match[3]}" if match[3] else name


def without_unit(text: str) -> str:
    """A number without the word that follows it.

    >>> without_unit("12 apples"), without_unit("12 xy")
    ('12', '12 xy')
    """
    match = _UNIT.search(text)
    is_word = match is not None and len(match[2] or "") >= MIN_WORD
    return text[: match.start(2)].rstrip() if match and is_word else text


def assigned(text: str) -> str | None:
    """The right side of ``x = …``; None where the text is anything else.

    >>> assigned("x_1 = 5"), assigned("2x = 5"), assigned("x = y = 5")
    ('5', None, None)
    """
    match = _ASSIGNMENT.fullmatch(text)
    return match[1].strip() if match else None


def words(text: str) -> str | None:
    """A text that is words and no mathematics, folded for comparison; else None.

    >>> words("Evelyn"), words("x"), words("2x")
    ('evelyn', None, None)
    """
    return text.casefold() if _WORDS.fullmatch(text) else None


def refused(text: str) -> str:
    r"""Why a parser must not see a cleaned text: it would not end, or it is prose. Empty if it may.

    >>> refused(r"\frac{\sqrt{3}}{2}"), refused("9^{9^{9}}"), refused("the answer is 5")
    ('', 'a power of a power', 'prose')
    """
    checks = {
        "brackets that are too deep or do not match": _too_deep(text),
        "too many parts": any(text.count(mark) > most for mark, most in MAX_COUNTS.items()),
        "a number of too many digits": bool(_LONG_NUMBER.search(text)),
        "a command that computes": bool(_COMPUTES.search(text) or _BINOMIAL.search(text)),
        "a factorial that is too large": "!" in _FACTORIAL.sub("", text),
        "a power of a power": any(_too_high(text, at) for at in _carets(text)),
        "prose": bool(_PROSE.search(_NAMES.sub(" ", text))),
    }
    return next((reason for reason, found in checks.items() if found), "")


def _too_deep(text: str) -> bool:
    if _OPENED_AT_ONCE.search(text):
        return True
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if not 0 <= depth <= MAX_DEPTH:
            return True
    return depth != 0


def _carets(text: str) -> list[int]:
    return [place for place, character in enumerate(text) if character == "^"]


def _too_high(text: str, caret: int) -> bool:
    """Whether the exponent at a caret is a long number, or a number with a power in it."""
    rest = text[caret + 1 :].lstrip()
    exponent = rest[: _end_of_group(rest)]
    if "^" in rest[len(exponent) :].lstrip()[:1]:
        return True  # a^b^c
    digits = max((len(run) for run in re.findall(r"[0-9]+", exponent)), default=0)
    has_letters = bool(re.search(r"[a-zA-Z]", _COMMAND.sub("", exponent)))
    return digits > MAX_EXPONENT_DIGITS or (
        not has_letters and ("^" in exponent or "!" in exponent)
    )


def _end_of_group(text: str) -> int:
    """Where the group, the command or the single character that begins a text ends."""
    command = _COMMAND.match(text)
    if command:
        return command.end()
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place + 1
    return len(text)
