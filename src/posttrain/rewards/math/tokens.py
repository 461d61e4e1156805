"""The tokens that an answer is written with, and the tree that it is parsed to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.rewards.math.nodes import SIGNS, Node, UnreadableError
from posttrain.rewards.math.units import Unit, parse_unit
from posttrain.rewards.math.words import NUMBERS

MAX_TOKENS = 1000
MAX_DEPTH = 30  # nested brackets and exponents
MAX_UNIT_TOKENS = 24

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec",
    "arccsc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "coth", "arcsinh", "arccosh",
    "arctanh", "asinh", "acosh", "atanh", "ln", "log", "lg", "exp", "gcd", "lcm", "max", "min",
    "abs", "floor", "ceil", "sqrt", "cbrt", "Re", "Im", "arg", "cis", "sgn",
})  # fmt: skip
RELATIONS = {
    "=": "=", "<": "<", ">": ">", ":": ":", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\in": "in",
    "\\approx": "≈", "\\simeq": "≈", "\\equiv": "≡", "\\sim": "~", "\\to": "→", "\\rightarrow": "→",
    "\\notin": "notin", "\\subset": "⊂", "\\subseteq": "⊆", "\\iff": "⇔", "\\implies": "⇒",
    "\\propto": "∝", "\\cong": "≅", "\\parallel": "∥", "\\perp": "⊥",
}  # fmt: skip
RELATIONS |= {
    f"\\{name}": name
    for name in (
        "Rightarrow", "Leftarrow", "Leftrightarrow", "leftarrow", "leftrightarrow", "mapsto",
        "longrightarrow", "oplus", "otimes", "supset", "supseteq", "prec", "succ", "models",
        "vdash",
    )
}  # fmt: skip
SETS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference"}
SEPARATORS = {
    ",": "and", ";": "and", "and": "and", "or": "or", "\\land": "both", "\\wedge": "both",
    "\\lor": "or", "\\vee": "or",
}  # fmt: skip
OPEN = {"(": "(", "[": "[", "\\{": "{", "\\langle": "("}
CLOSE = {")": ")", "]": "]", "\\}": "}", "\\rangle": ")"}

# Commands: accents and typefaces of letters, objects named by letters, and unsupported ones.
WEIGHTS = frozenset({"mathbf", "bm", "boldsymbol", "pmb", "underline"})
ACCENTS = WEIGHTS | {
    "vec", "hat", "bar", "overline", "tilde", "dot", "ddot", "mathbb", "mathcal",
    "mathfrak", "mathscr", "widehat", "overrightarrow", "overleftrightarrow",
}  # fmt: skip
OF_LETTERS = frozenset({"angle", "triangle", "measuredangle"})
MATRICES = frozenset({
    "pmatrix", "bmatrix", "matrix", "array", "Bmatrix", "smallmatrix", "vmatrix", "cases"
})  # fmt: skip
UNKNOWN = frozenset({  # commands that are no symbols
    "sum", "prod", "int", "iint", "oint", "lim", "limsup", "liminf", "end", "ldots", "vdots",
    "over", "choose", "substack", "atop", "partial", "nabla", "pmod", "mod", "forall", "exists",
    "text", "overset", "underset", "not", "hline", "tag", "rfloor", "rceil", "rangle", "stackrel",
})  # fmt: skip

_FACTORS = frozenset({"number", "based", "letter", "word", "function", "text"})
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
_WORD = re.compile(r"(?=.{4})[A-Z]?[a-z]+")
_GROUPED = re.compile(r"(?<![0-9.,_^])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9])")


@dataclass(frozen=True)
class Token:
    """A number, a letter, a word, text in roman, a function, a command or a sign."""

    kind: str
    text: str
    start: int
    end: int


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
            piece = piece.partition(",")[0]  # in brackets a comma separates items, not digits
        place = start + len(piece)
        if kind == "word":
            glued = bool(found) and found[-1].kind == "number" and found[-1].end == start
            found += _of_word(piece, start, glued=glued or text[place : place + 1] in ("^", "_"))
        else:
            found.append(_token(kind, piece, start=start))
        depth += (piece in OPEN) - (piece in CLOSE)
        if len(found) > MAX_TOKENS:
            raise UnreadableError
    return found


def based(text: str) -> Node:
    """The value, the base and the digits of ``1010_2``."""
    digits, _, base = re.sub(r"\\text|[{}(), ]", "", text).partition("_")
    try:
        size = int(base) if base.isdigit() else NUMBERS.get(base, 0)
        return Node("based", (int(digits, size), size, digits))
    except ValueError:
        raise UnreadableError from None


def _token(kind: str, piece: str, *, start: int) -> Token:
    end = start + len(piece)
    if kind == "text":
        piece = " ".join(piece.partition("{")[2][:-1].split())
        if not piece:
            raise UnreadableError
    elif kind == "command" and piece != "\\sqrt" and piece[1:] in FUNCTIONS:
        piece = piece[1:]
    if kind in ("text", "word") and piece.lower() in ("and", "or"):
        return Token("sign", piece.lower(), start, end)
    return Token("function" if piece in FUNCTIONS else kind, piece, start, end)


def _of_word(run: str, start: int, *, glued: bool) -> list[Token]:
    """A run of letters: a word, a function with its argument, or symbols side by side."""
    pieces = [run] if _WORD.fullmatch(run) and not glued else list(run)
    sizes = [size for size in (6, 5, 4, 3, 2) if run[:size] in FUNCTIONS and len(run) - size <= 2]
    if run in FUNCTIONS or run.lower() in _NAMES:
        pieces = [run]
    elif sizes:
        pieces = [run[: sizes[0]], *run[sizes[0] :]]
    found = []
    for piece in pieces:
        found.append(_token("letter" if len(piece) == 1 else "word", piece, start=start))
        start += len(piece)
    return found


class Cursor:
    """A place in the tokens of a text, and how deep it is in brackets."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [*tokens(text), Token("end", "", len(text), len(text))]
        self.at = 0
        self.depth = 0
        self.bars = 0  # open vertical bars: the next one closes

    @property
    def kind(self) -> str:
        """The kind of the next token."""
        return self.tokens[self.at].kind

    @property
    def here(self) -> str:
        """The next token, where it is more than text."""
        return "" if self.kind == "text" else self.tokens[self.at].text

    def next(self) -> Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise UnreadableError
        self.at += 1
        return token

    def found(self, text: str) -> bool:
        """Whether the next token is this one; if so, it is taken."""
        if self.here != text:
            return False
        self.at += 1
        return True

    def take(self, text: str) -> None:
        if not self.found(text):
            raise UnreadableError

    def source(self, start: int, end: int) -> str:
        return self.text[self.tokens[start].start : self.tokens[end].start].strip()

    def deeper(self, inner: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError
        bars, self.bars = self.bars, 0
        node = inner()
        self.bars = bars
        self.depth -= 1
        return node

    def name(self) -> str:
        """What stands in braces, or the next token, as it is written."""
        if not self.found("{"):
            return self.next().text
        start, depth = self.at, 1
        while depth:
            text = self.next().text
            depth += (text == "{") - (text == "}")
        return "".join(token.text for token in self.tokens[start : self.at - 1])

    def is_next_quantity(self, place: int) -> bool:
        """Whether a number stands after a word: ``5 feet 6 inches``."""
        token, before = self.tokens[place], self.tokens[place - 1]
        is_apart = before.kind == "text" or self.text[token.start - 1] == " "
        return token.kind == "number" and is_apart and before.kind in ("text", "word", "letter")

    def begins_factor(self) -> bool:
        """Whether a factor stands next, so that it is multiplied without a sign."""
        here = self.here
        if self.kind in _FACTORS or here in OPEN or here == "{":
            return True
        if here == "|":
            return not self.bars
        known = here in RELATIONS or here in SETS or here in SEPARATORS or here in SIGNS
        return self.kind == "command" and not known and here[1:] not in UNKNOWN

    def unit_ahead(self) -> tuple[Unit | None, int]:
        end, depth = self.at, 0
        while self.tokens[end].kind != "end" and end - self.at <= MAX_UNIT_TOKENS:
            token = self.tokens[end]
            depth += (token.text == "{") - (token.text == "}")
            divides = token.text in SEPARATORS or token.text in RELATIONS or token.text in CLOSE
            if depth < 0 or (divides and token.kind != "text") or self.is_next_quantity(end):
                break
            end += 1
        spaced = self.text[: self.tokens[self.at].start].endswith(" ")
        return parse_unit(" " * spaced + self.source(self.at, end)), end
