"""The tokens that an answer is written with, and the tree that it is parsed to."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_TOKENS = 1000

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec",
    "arccsc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "coth", "arcsinh", "arccosh",
    "arctanh", "asinh", "acosh", "atanh", "ln", "log", "lg", "exp", "gcd", "lcm", "max", "min", "abs",
    "floor", "ceil", "sqrt", "Re", "Im", "arg", "cis", "sgn",
})  # fmt: skip
RELATIONS = {
    "=": "=", "<": "<", ">": ">", ":": ":", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\in": "in",
    "\\approx": "≈", "\\simeq": "≈", "\\equiv": "≡", "\\sim": "~", "\\to": "→", "\\rightarrow": "→",
    "\\notin": "notin", "\\subset": "⊂", "\\subseteq": "⊆", "\\iff": "⇔", "\\implies": "⇒",
    "\\propto": "∝", "\\cong": "≅", "\\parallel": "∥", "\\perp": "⊥",
}  # fmt: skip
SETS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference"}
SEPARATORS = {
    ",": "and", ";": "and", "and": "and", "or": "or", "\\land": "and", "\\wedge": "and",
    "\\lor": "or", "\\vee": "or",
}  # fmt: skip
OPEN = {"(": "(", "[": "[", "\\{": "{", "\\langle": "("}
CLOSE = {")": ")", "]": "]", "\\}": "}", "\\rangle": ")"}

_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_NAMES = frozenset({"and", "or", "pi", "infinity", "inf"})
_TOKEN = re.compile(
    r"(?P<based>\(?(?:\\text\s?\{)?(?=[A-F]*[0-9])[0-9A-F]+(?:,[0-9]{3})*\}?\)?"
    r"_(?:\{\s?(?:\\text\s?\{)?[a-z0-9]+\}?\s?\}|[0-9]+))"
    r"|(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
    r"|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9a-zA-Z.]))?)"
    r"|(?P<text>\\text\s?\{[^{}]*\})"
    r"|(?P<command>\\[a-zA-Z]+)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<sign>\*\*|\\.|[^\s])"
)
_GROUPED = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9])")


class Unreadable(Exception):
    """The text is no mathematics that the parser knows, or more of it than it takes."""


@dataclass(frozen=True)
class Node:
    """A part of an answer: what it is, and of what it is made."""

    kind: str
    args: tuple[Any, ...] = ()

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The parts that are nodes."""
        return tuple(arg for arg in _flat(self.args) if isinstance(arg, Node))

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """The names of the free symbols in it."""
        if self.kind == "symbol":
            return frozenset({self.args[0]})
        return frozenset[str]().union(*(node.symbols for node in self.nodes))

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of all its parts, and the names of the functions."""
        own = {self.kind, self.args[0]} if self.kind == "call" else {self.kind}
        return frozenset(own).union(*(node.kinds for node in self.nodes))


@dataclass(frozen=True)
class Token:
    """A number, a letter, a word, text in roman, a function, a command or a sign."""

    kind: str
    text: str
    start: int
    end: int


def number(value: Fraction | int) -> Node:
    """A number as a part of an answer."""
    return Node("number", (Fraction(value),))


def grouped(text: str) -> str:
    """A text in which spaces that group digits are commas.

    >>> grouped("10 000 + 1")
    '10,000 + 1'
    """
    return _GROUPED.sub(lambda match: match[0].replace(" ", ","), text)


def tokens(text: str) -> list[Token]:
    r"""The tokens of a cleaned text.

    >>> [token.text for token in tokens(r"2ab+\sin x")]
    ['2', 'a', 'b', '+', 'sin', 'x']
    """
    found: list[Token] = []
    depth = place = 0
    while match := _TOKEN.search(text, place):
        kind, piece, start = str(match.lastgroup), match[0], match.start()
        if kind == "number" and "," in piece and depth:
            piece = piece.partition(",")[0]  # in brackets a comma divides
        place = start + len(piece)
        if kind == "word":
            found += _of_word(piece, start, glued=bool(found) and _is_glued(found[-1], start))
        else:
            found.append(_token(kind, piece, start))
        depth += (piece in OPEN) - (piece in CLOSE)
        if len(found) > MAX_TOKENS:
            raise Unreadable
    return found


def based(text: str) -> tuple[int, int, str]:
    """The value, the base and the digits of ``1010_2``."""
    digits, _, base = re.sub(r"\\text|[{}(), ]", "", text).partition("_")
    try:
        size = int(base) if base.isdigit() else _BASES.get(base, 0)
        return int(digits, size), size, digits
    except ValueError:
        raise Unreadable from None


def _token(kind: str, piece: str, start: int) -> Token:
    end = start + len(piece)
    if kind == "text":
        piece = " ".join(piece.partition("{")[2][:-1].split())
        if piece.lower() in ("and", "or"):
            kind, piece = "sign", piece.lower()
    elif kind == "command" and piece != "\\sqrt" and piece[1:] in FUNCTIONS:
        piece = piece[1:]
    return Token("function" if piece in FUNCTIONS else kind, piece, start, end)


def _is_glued(token: Token, start: int) -> bool:
    return token.kind == "number" and token.end == start


def _of_word(run: str, start: int, *, glued: bool) -> list[Token]:
    """A run of letters: a word, a function with its argument, or symbols side by side."""
    pieces = list(run) if len(run) <= 3 or glued else [run]
    if run in FUNCTIONS or run.lower() in _NAMES:
        pieces = [run]
    for size in (6, 5, 4, 3, 2):
        if run[:size] in FUNCTIONS and 0 < len(run) - size <= 2:
            pieces = [run[:size], *run[size:]]
            break
    found = []
    for piece in pieces:
        kind = "letter" if len(piece) == 1 else "word"
        if piece.lower() in ("and", "or"):
            kind, piece = "sign", piece.lower()
        elif piece in FUNCTIONS:
            kind = "function"
        found.append(Token(kind, piece, start, start + len(piece)))
        start += len(piece)
    return found


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [one for arg in args for one in (_flat(arg) if isinstance(arg, tuple) else [arg])]
