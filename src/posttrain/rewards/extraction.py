"""Where in a completion the answer stands. Every way is linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

Extract = Literal["whole", "tag", "hashes", "boxed", "last_number", "auto"]

_MARKS = {"boxed": ("\\boxed", "\\fbox"), "tag": ("<answer>",), "hashes": ("####",)}
_ANNOUNCED = re.compile(  # The answer is 18; \\text{Answer: }18
    r"(\\text\s?\{)?\s*(?:so,? )?(?:the |my )?(?:final |correct )?answer[*_]*\s*(?:is\b|:)"
    r"[\s:*_]*(\})?",
    re.IGNORECASE,
)
_AFTER = " *_`,;\ufe0f" + "".join(map(chr, [*range(0x2600, 0x27C0), *range(0x1F300, 0x1FB00)]))
_UNBRACED = re.compile(r"[^\s{}$]+?(?=[.,;]?(?:[\s{}$]|\\[)\]]|$))")

# Digits as in 1,000 or 1000, then a fraction, an exponent, a denominator. A sign counts as one only
# where nothing stands before it that it could be subtracted from: the last number of 10-4 is 4.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[+-])?[$€£]?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?(?:/[0-9]+)?"
)


def extract_answer(text: str, how: Extract) -> str | None:
    r"""The answer in a completion, stripped; None where there is none.

    ===============  =====================================================================
    ``whole``        the whole text
    ``tag``          what the last complete ``<answer>…</answer>`` holds
    ``hashes``       what follows the last ``####`` on its line or the next (as in GSM8K)
    ``boxed``        what the last ``\boxed{…}`` or ``\boxed …`` holds, braces balanced
    ``last_number``  the last number in the text
    ``auto``         ``boxed``, ``tag`` or ``hashes``, whichever mark comes last; else the whole
    ===============  =====================================================================

    Only what is :func:`answered` counts. At a mark "The answer is" is left out, and after
    hashes also a comma, a star or an emoji at the end.

    >>> extract_answer("<think>2+2</think><answer> 4 </answer>", "tag")
    '4'
    >>> extract_answer("it costs $1,200.50 in all", "last_number")
    '$1,200.50'
    >>> extract_answer("no tag here", "tag") is None
    True
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
    """What stands at a mark, without what announces it."""
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
    start = max(_ends(text, mark) for mark in _MARKS["boxed"])
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
    """Where the last of a mark ends; -1 without one."""
    place = text.rfind(mark)
    return place + len(mark) if place >= 0 else -1


def _last_number(text: str) -> str | None:
    last = None
    for match in _NUMBER.finditer(text.replace("−", "-")):  # the typographic minus
        last = match.group()
    return last


def _auto(text: str) -> str | None:
    places = {name: max(_ends(text, mark) for mark in marks) for name, marks in _MARKS.items()}
    for name in sorted(places, key=lambda name: -places[name]):  # the mark that comes last
        found = EXTRACTORS[name](text) if places[name] >= 0 else None
        if found is not None:
            return found
    return _whole(text)


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "whole": _whole,
    "tag": _tag,
    "hashes": _hashes,
    "boxed": _boxed,
    "last_number": _last_number,
    "auto": _auto,
}
