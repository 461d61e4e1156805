"""Finds the answer in a completion, in time linear in the length of the text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Literal

from posttrain.rewards.math.latex import fraction

Extract = Literal["whole", "tag", "hashes", "boxed", "last_number", "auto", "answer", "expression"]

MARKS = {"boxed": ("\\boxed", "\\fbox"), "tag": ("<answer>",), "hashes": ("####",)}
_ANNOUNCED = re.compile(  # phrases before an answer: The answer is 18; \\text{Answer: }18
    r"(\\text\s?\{)?\s*(?:so,? )?(?:the |my )?(?:final |correct )?answer[*_]*\s*(?:is\b|:)"
    r"[\s:*_]*(\})?",
    re.IGNORECASE,
)
_AFTER = " *_`,;\ufe0f" + "".join(map(chr, [*range(0x2600, 0x27C0), *range(0x1F300, 0x1FB00)]))
_UNBRACED = re.compile(r"[^\s{}$]+?(?=[.,;]?(?:[\s{}$]|\\[)\]]|$))")

# Digits as in 1,000 or 1000, then a fraction, an exponent, a denominator; 3 1/2 is one number, and
# 3:30 one that no reward takes for 30. A sign counts as one only where nothing stands before it
# that it could be subtracted from: the last number of 10-4 is 4.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[+-])?[$€£¥₹]?"
    r"(?:[0-9]+(?::[0-9]+)+|[0-9]+ [0-9]+/[0-9]+"
    r"|(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?(?:/[0-9]+)?)"
    r"(?:\s?\{?\s?(?i:thousand|million|billion)\b\}?)?"
)
# Several numbers where one is asked for, none of which then is the answer: 72 or 73; 70, 71 and 72
# with nothing after; 5 hours 30 minutes.
_IN_PARTS = "|".join(
    rf"(?:{large}),? (?:and )?[0-9]+ ?(?:{small})\b"
    for large, small in {
        "hours?|hrs?|h": "minutes?|mins?|m", "minutes?|mins?": "seconds?|secs?",
        "years?": "months?", "weeks?": "days?", "days?": "hours?|hrs?|h",
        "feet|foot|ft": "inch|inches", "pounds?|lbs?": "ounces?|oz", "dollars?": "cents?",
    }.items()
)  # fmt: skip
_SEVERAL = re.compile(
    rf"{_NUMBER.pattern}(?: ?(?:{_IN_PARTS})"
    rf"|[*_$)}}\\]*(?: ?(?P<unit>[a-z]+))?,? or (?:[a-z]+ (?:= )?)?[*_$({{\\]*{_NUMBER.pattern}"
    rf"(?(unit) ?(?P=unit)\b)"
    rf"|(?:(?:,|,? and) {_NUMBER.pattern})+(?= *[.!]?\s*(?:\n|$)))"
)
# Where a sentence states the answer: four hashes, "answer is", "answer =", "Answer:".
_STATES = re.compile(
    r"(?P<hashes>####)|\banswers?[*_]*\s?"
    r"(?:(?:is|are|=)(?: (?:thus|therefore|hence|then)\b)?|(?P<colon>:))",
    re.IGNORECASE,
)
_FIRST = re.compile(rf"[\s:=*_`~$({{}}\[\\]*({_NUMBER.pattern})")
# A minus with a space is a sign only where the answer begins; at a line's start it marks a list.
_SIGN = re.compile(r"([ :=*_`~$({}\[\\]*)- +(?=[$€£¥₹]?[.0-9])")
_GOES_ON = re.compile(  # an equation after a number: 2 * 4 = 8, 2^3 = 8, 2³ = 8, 2 plus 3 = 5
    r"[a-zA-Z%*_ !¹²³⁰⁴-⁹]{0,40}(?:[-+*/=%]|[)}]*\^|[)}]* ?=|\b(?:x|plus|minus|times|divided by))"
    r" ?[-$({\[]*[0-9]"
)
_REASON = re.compile(r", (?:as|since|because|which)\b.*", re.DOTALL)  # what follows an answer
_SENTENCE = re.compile(r"(?:[^.!?\n]|[.!?](?!\s|$))*")
_ITEM = re.compile(r"[.):]\s*[^\W_]")
_BULLET = re.compile(r"^[ \t]*[-−–‑] +(?=[0-9(])", re.MULTILINE)
_NUMBERING = re.compile(r"\A(?:[0-9]+\) *|\([0-9]+\) +)+(?=[0-9(])")  # a number in a list: "2) 25"
_RUN = re.compile(r"[-0-9(][-+*/()0-9= ]*")
_OPERATION = re.compile(r"[0-9)] *[-+*/] *[-(]*[0-9]")
_MOST = 300  # characters of a sentence that are read: a bound on the work
_NEAR = 60  # characters beside a number where another candidate may stand
_POWER = r"10\s?\^\s?(?:\{([+-]?[0-9]{1,2})\}|([+-]?[0-9]{1,2}))"  # a power of ten
_FRACTION = r"\\[dt]?frac\s?(?:\{([0-9]+)\}|([0-9]))\s?(?:\{([0-9]+)\}|([0-9]))"
_PLAIN: list[
    tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
] = [  # LaTeX that stands around numbers, in the order in which it is replaced
    (re.compile("[−–‑]"), "-"),
    (re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mathit|mbox)\s?\{"), "{"),
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!] ?|,\\ )(?=[0-9]{3})"), ","),
    (re.compile(r"(?<=[a-zA-Z}])\^(?:[0-9]|\{[0-9]\})"), ""),  # 5 m^2 has one number
    (re.compile("[¼-¾⅐-⅞]"), lambda match: fraction(match[0])),
    (re.compile(rf"(?<=[0-9])\s?{_FRACTION}"), r" \1\2/\3\4"),
    (re.compile(_FRACTION), r"\1\2/\3\4"),
    (re.compile(rf"(?<=[0-9])\s?(?:\\times|\\cdot|[×·*x])\s?{_POWER}"), r"e\1\2"),
    (re.compile(rf"(?<![\w.)}}^]){_POWER}"), r"1e\1\2"),
    (re.compile(r"\\(?:times|cdot)\b|[×·]"), "*"),
    (re.compile(r"\\div\b|÷"), "/"),
    (re.compile(r"\\(?:left|right)(?=[()])"), ""),
    (re.compile(r"\\approx\b|≈"), "="),
    (re.compile(r"\\[,;: ]|[\u00a0\u202f\u2009]"), " "),
    # "= - 5": a minus with nothing before it to subtract from is a sign.
    (re.compile(r"(?<==) ?- (?=[0-9])"), " -"),
    (  # digits grouped by spaces: 1 200
        re.compile(r"(?<![0-9.,/:])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9/])"),
        lambda match: match[0].replace(" ", ","),
    ),
]


def extract_answer(text: str, how: Extract) -> str | None:
    r"""The answer in a completion, stripped; None where there is none.

    ===============  =====================================================================
    ``whole``        the whole text
    ``tag``          what the last complete ``<answer>…</answer>`` holds
    ``hashes``       what follows the last ``####`` on its line or the next (as in GSM8K)
    ``boxed``        what the last ``\boxed{…}`` or ``\boxed …`` holds, braces balanced
    ``last_number``  the last number in the text
    ``auto``         ``boxed``, ``tag`` or ``hashes``, whichever mark comes last; else the rest of
                     the last sentence with "the answer is" or "Answer:"; else the whole text
    ``answer``       the number that is stated last as the answer, in a box, a tag, after hashes or
                     after "the answer is"; else the last number
    ``expression``   the last arithmetic in what ``auto`` finds, else in the text, without what it
                     equals
    ===============  =====================================================================

    Only what is :func:`answered` counts. At a mark "The answer is" is left out, and after
    hashes also a comma, a star or an emoji at the end.

    >>> extract_answer("<think>2+2</think><answer> 4 </answer>", "tag")
    '4'
    >>> extract_answer("it costs $1,200.50 in all", "last_number")
    '$1,200.50'
    >>> extract_answer("no tag here", "tag") is None
    True
    >>> extract_answer("So the answer is **$18** a day, for all 9 eggs.", "answer")
    '18'
    """
    return EXTRACTORS[how](answered(text))


def answered(text: str) -> str:
    """What a completion says after its reasoning: nothing, while a ``<think>`` is still open.

    >>> answered("<think>4?</think> It is 5."), answered("5, or <think>is it 4?")
    (' It is 5.', '')
    """
    said = text.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def _whole(text: str) -> str | None:
    return text.strip() or None


def _bare(text: str) -> str | None:
    """The text at a mark, without a phrase such as "The answer is"."""
    text = text.strip()
    found = _ANNOUNCED.match(text)
    if found:
        text = ("" if found[2] else found[1] or "") + text[found.end() :]
    return text.strip() or None


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return _bare(text[start + len("<answer>") : end]) if start >= 0 else None


def _hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    line = rest.lstrip().partition("\n")[0]
    return _bare(line.lstrip(" *_`").rstrip(_AFTER)) if mark else None


def _boxed(text: str) -> str | None:
    start = max(_ends(text, mark) for mark in MARKS["boxed"])
    rest = text[start:].lstrip() if start >= 0 else ""
    if rest[:1] != "{":
        bare = _UNBRACED.match(rest)
        return bare[0] if bare else None
    depth = 0
    escaped = False
    for place, character in enumerate(rest):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return _bare(rest[1:place])
    return None


def _ends(text: str, mark: str) -> int:
    """Where the last occurrence of a mark ends; -1 without one."""
    place = text.rfind(mark)
    return place + len(mark) if place >= 0 else -1


def _last_number(text: str) -> str | None:
    last = _last_match(plain(text))
    return last and last[0]


def _last_match(text: str) -> re.Match[str] | None:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return last[0] if last else None


def _answer(text: str) -> str | None:
    r"""The number that a model gives as its answer, however it writes that.

    1. The last statement of an answer: a complete ``\boxed{…}`` or ``<answer>…</answer>``, or the
       number that follows ``####``, "answer is" or, on the same line, "Answer:". One statement
       counts and not the best of several, so that there is nothing to gain by making many.
    2. Without one, the last number, as in lm-evaluation-harness's flexible-extract and in verl:
       also where the text was cut at the limit.

    A box or a tag holds one number, with words beside it, or an equation that ends in it: with two
    numbers it is no number. After hashes and phrases the first number counts, or where an equation
    begins there, what it ends in. A heading (``#### Step 2``, ``#### 2. Costs``) states nothing,
    nor does "Answer:" that begins the text before a line of several numbers, which is a solution.
    """
    text = plain(text)
    found: dict[int, str] = {}
    boxes = max(text.rfind(mark) for mark in MARKS["boxed"])
    for place, held in ((boxes, _boxed(text)), (text.rfind("</answer>"), _tag(text))):
        if held is not None:
            found[place] = _only_number(held)
    for match in reversed(list(_STATES.finditer(text))):
        stated = _stated(text[match.end() : match.end() + _MOST], match)
        if stated is not None:
            found[match.start()] = stated
            break
    return found[max(found)] if found else _last_alone(text)


def _last_alone(text: str) -> str | None:
    """The last number; where several are offered ("72 or 73"), all of them."""
    last = _last_match(text)
    if last is None or len(last[0]) > _NEAR:
        return last and last[0]
    near = _SEVERAL.finditer(text, max(0, last.start() - _NEAR), last.end() + _NEAR)
    return next((match[0] for match in near if match.end() > last.start()), last[0])


def _only_number(held: str) -> str:
    """The number that a box holds, maybe after ``=``; all of it where that is not one number."""
    for side in reversed(held.split("=")):
        numbers: list[str] = _NUMBER.findall(_signed(side))
        if numbers:
            return numbers[0] if len(numbers) == 1 else held
    return held


def _stated(rest: str, match: re.Match[str]) -> str | None:
    """The number that follows a mark or a phrase; None where what follows is no answer."""
    rest = _signed(rest)
    first = _FIRST.match(rest)
    if first is None:
        return None
    several = _SEVERAL.match(rest, first.start(1))
    if several is not None:
        return several[0]
    next_line = "\n" in rest[: first.start(1)]
    line = rest[first.end() :].partition("\n")[0]
    if match["colon"]:
        begins = not match.string[: min(match.start(), 20)].strip(" *_#\n")
        if next_line or (begins and re.search("[0-9]", line.partition("(")[0])):
            return None
    if (next_line or match["hashes"]) and _ITEM.match(line):
        return None
    if not _GOES_ON.match(line):
        return first[1]
    sentence = _SENTENCE.match(rest, first.end())
    _, equals, value = sentence[0].rpartition("=") if sentence else ("", "", "")
    result = _FIRST.match(_signed(value)) if equals else None
    return result[1] if result else None


def _signed(text: str) -> str:
    """A text that holds an answer, with ``- 5`` at its beginning written as ``-5``."""
    begins = _SIGN.match(text)
    return f"{begins[1]}-{text[begins.end() :]}" if begins else text


def _expression(text: str) -> str | None:
    """The last run of numbers with operators; of an equation, the first side that has one.

    Where a box holds none, as in ``2*3 = \\boxed{6}``, that of the text. What marks the place in a
    list, a dash or ``2)``, is no part of it.
    """
    text = _BULLET.sub("", text)
    for part in (_auto(text) or "", text):
        runs = [run[0] for run in _RUN.finditer(plain(part))]
        equations = [_NUMBERING.sub("", run).split("=") for run in runs]
        sides = [[s.strip() for s in sides if _OPERATION.search(s)] for sides in equations]
        found = [first[0] for first in sides if first]
        if found:
            return found[-1]
    return None


def plain(text: str) -> str:
    """A text with the LaTeX around its numbers replaced, and every minus a hyphen."""
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text


def _auto(text: str) -> str | None:
    places = {name: max(_ends(text, mark) for mark in marks) for name, marks in MARKS.items()}
    found = None
    # By where they stand in the text, the last mark first.
    for name in sorted(places, key=lambda name: -places[name]):
        found = EXTRACTORS[name](text) if places[name] >= 0 else None
        if found is not None:
            return found
    said = [match.end() for match in _STATES.finditer(text) if not match["hashes"]]
    if said:
        sentence = _SENTENCE.match(text[said[-1] :].lstrip(" \n:*_`"))
        found = _whole(_REASON.sub("", sentence[0]).rstrip(" *_`")) if sentence else None
    return found or _whole(text)


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "whole": _whole,
    "tag": _tag,
    "hashes": _hashes,
    "boxed": _boxed,
    "last_number": _last_number,
    "auto": _auto,
    "answer": _answer,
    "expression": _expression,
}
