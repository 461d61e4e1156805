r"""A parser of answers in LaTeX or plain text: expressions, sets, intervals, matrices, relations.

It is a recursive descent over at most a few hundred tokens and a bounded depth, and computes
nothing. What it does not know it does not read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from posttrain.rewards.math_units import parse_unit

MAX_DEPTH = 40  # of brackets in brackets, exponents in exponents
MAX_TOKENS = 1000
MAX_ITEMS = 64

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc asin acos atan sinh cosh tanh "
    "coth arcsinh arccosh arctanh asinh acosh atanh ln log exp lg gcd lcm max min abs floor ceil "
    "sqrt Re Im arg det cis sgn".split()
)
_COMMANDS_OF_ONE = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}
_ACCENTS = frozenset(
    "vec hat bar overline tilde dot ddot mathbf mathbb mathcal mathit mathfrak mathscr bm "
    "boldsymbol underline widehat overrightarrow overleftrightarrow check pmb".split()
)
_PREFIXES = frozenset({"angle", "triangle", "measuredangle", "odot", "operatorname"})
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\in": "in", "\\approx": "≈",
    "\\equiv": "≡", "\\sim": "~", "\\to": "→", "\\rightarrow": "→", "\\notin": "notin",
    "\\subset": "⊂", "\\subseteq": "⊆", "\\iff": "⇔", "\\implies": "⇒", "\\propto": "∝", "\\mid": "|",
    "\\simeq": "≈", "\\cong": "≅", "\\parallel": "∥", "\\perp": "⊥", ":": ":",
}  # fmt: skip
_MATRICES = frozenset("pmatrix bmatrix matrix array Bmatrix smallmatrix vmatrix".split())
_BEGINS = frozenset({"number", "based", "letter", "word", "function", "text"})
_SETS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference"}
_SEPARATORS = {",": "and", ";": "and", "\\text{and}": "and", "\\text{or}": "or", "\\lor": "or",
               "\\land": "and", "\\vee": "or", "\\wedge": "and"}  # fmt: skip
_OPEN = {"(": ")", "[": "]", "\\{": "}", "\\langle": ")"}
_CLOSE = {")": ")", "]": "]", "\\}": "}", "\\rangle": ")"}
_NOT_SYMBOLS = frozenset(
    "sum prod int iint oint lim limsup liminf begin end ldots cdots dots vdots substack over atop "
    "partial nabla bmod mod pmod pm mp frac sqrt forall exists infty text overset underset not to "
    "right left big hline tag label ref because therefore cases stackrel xrightarrow".split()
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
          "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_TOKEN = re.compile(
    r"(?P<based>\(?(?:\\text\s?\{)?(?=[A-F]*[0-9])[0-9A-F]+(?:,[0-9]{3})*\}?\)?_(?:\{\s?(?:\\text\s?\{)?[a-z0-9]+\}?\s?\}|[0-9]+))"
    r"|(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,4}(?![0-9a-zA-Z.]))?)"
    r"|(?P<text>\\text\s?\{[^{}]*\})"
    r"|(?P<command>\\[a-zA-Z]+|\\.)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<sign>\*\*|[^\s])"
)
_JOINED = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9])")


class Unreadable(Exception):
    """The text is no mathematics that this parser knows, or more of it than it takes."""


@dataclass(frozen=True)
class Node:
    """A part of an answer: what it is, and of what it is made."""

    kind: str
    args: tuple[Any, ...] = ()

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """The names of the free symbols in it."""
        if self.kind == "symbol":
            return frozenset({self.args[0]})
        return frozenset().union(*(arg.symbols for arg in self.nodes))

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of all its parts, and the names of the functions."""
        own = {self.kind, self.args[0]} if self.kind == "call" else {self.kind}
        return frozenset(own).union(*(arg.kinds for arg in self.nodes))

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The parts that are nodes."""
        return tuple(arg for arg in _flat(self.args) if isinstance(arg, Node))


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [one for arg in args for one in (_flat(arg) if isinstance(arg, tuple) else [arg])]


@dataclass(frozen=True)
class Token:
    """A piece of text: a number, a letter, a word, a text in roman, a command or a sign."""

    kind: str
    text: str
    start: int


@functools.lru_cache(maxsize=4096)
def parse(text: str, *, loose_units: bool = False) -> Node | None:
    r"""The answer that a cleaned text is; None where it cannot be read.

    With ``loose_units`` also the m of ``5m`` is taken for a unit.

    >>> parse("2x").symbols, parse("(1, 2]").args[:2], parse(r"\frac{1}{") is None
    (frozenset({'x'}), ('(', ']'), True)
    """
    try:
        return _Parser(text, loose_units=loose_units).answer()
    except Unreadable:
        return None


def number(value: Fraction | int) -> Node:
    """A number as a part of an answer."""
    return Node("number", (Fraction(value),))


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    depth = 0
    place = 0
    while match := _TOKEN.search(text, place):
        kind, found = str(match.lastgroup), match[0]
        place = match.end()
        if kind == "based":
            if _based(found) is None:
                raise Unreadable
            tokens.append(Token(kind, found, match.start()))
            continue
        if kind == "number" and "," in found and depth:
            found = found.partition(",")[0]  # in brackets a comma divides
            place = match.start() + len(found)
        if kind == "word":
            pieces = _split_word(found)
            starts = [match.start() + sum(map(len, pieces[:at])) for at in range(len(pieces))]
            tokens += [Token(_word_kind(p), p, s) for p, s in zip(pieces, starts, strict=True)]
            continue
        if kind == "text":
            found = " ".join(found.partition("{")[2][:-1].split())
            kind = "function" if found in FUNCTIONS else "text"
            if found.lower() in ("and", "or", "if", "where", "for", "with"):
                kind, found = "sign", f"\\text{{{found.lower()}}}"
        if kind == "command" and found[1:] in FUNCTIONS and found != "\\sqrt":
            kind, found = "function", found[1:]
        depth += (found in _OPEN) - (found in _CLOSE)
        tokens.append(Token(kind, found, match.start()))
        if len(tokens) > MAX_TOKENS:
            raise Unreadable
    return tokens


def _split_word(run: str) -> list[str]:
    """A run of letters: a word, a function with its argument, or symbols side by side."""
    if run in FUNCTIONS or run.lower() in ("and", "or", "pi", "infinity", "inf"):
        return [run]
    for size in (6, 5, 4, 3, 2):
        if run[:size] in FUNCTIONS and 0 < len(run) - size <= 2:
            return [run[:size], *run[size:]]
    return [run] if len(run) > 3 else list(run)


def _word_kind(piece: str) -> str:
    if piece in FUNCTIONS:
        return "function"
    if piece.lower() in ("and", "or"):
        return "sign"
    return "letter" if len(piece) == 1 else "word"


class _Parser:
    def __init__(self, text: str, *, loose_units: bool) -> None:
        self.text = _JOINED.sub(lambda match: match[0].replace(" ", ","), text)
        self.tokens = _tokens(self.text)
        self.loose_units = loose_units
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.in_function = 0

    # ------------------------------------------------------------------ tokens

    @property
    def here(self) -> str:
        """The text of the next token; empty at the end."""
        if self.at >= len(self.tokens):
            return ""
        token = self.tokens[self.at]
        if token.kind == "sign" and token.text.lower() in ("and", "or"):
            return f"\\text{{{token.text.lower()}}}"
        return "" if token.kind == "text" else token.text

    @property
    def kind(self) -> str:
        """The kind of the next token; empty at the end."""
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ""

    def take(self, text: str) -> None:
        if self.here != text:
            raise Unreadable
        self.at += 1

    def found(self, text: str) -> bool:
        if self.here != text:
            return False
        self.at += 1
        return True

    def source(self, start: int, end: int) -> str:
        begin = self.tokens[start].start
        return self.text[begin : self.tokens[end].start if end < len(self.tokens) else None].strip()

    def deeper(self, parse_inner: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        bars, self.bars = self.bars, 0
        node = parse_inner()
        self.bars = bars
        self.depth -= 1
        return node

    # ------------------------------------------------------------------ lists and relations

    def answer(self) -> Node:
        if not self.tokens:
            raise Unreadable
        node = self.listing("")
        if self.at < len(self.tokens):
            raise Unreadable
        return node

    def listing(self, opened: str) -> Node:
        """Items between brackets, or bare ones; a single one in round brackets is itself."""
        self.bars = int(opened == "{")  # there a bar divides: {x | x > 2}
        items, joins = [self.chain()], []
        if opened == "{" and (self.found("|") or _is_condition(items[0])):
            return self.condition(items[0])
        while self.here in _SEPARATORS:
            join = _SEPARATORS[self.here]
            self.at += 1
            if join == "and" and _SEPARATORS.get(self.here):  # ", and"
                join = _SEPARATORS[self.here]
                self.at += 1
            joins.append(join)
            items.append(self.chain())
            if len(items) > MAX_ITEMS:
                raise Unreadable
        closed = ""
        if opened:
            closed = _CLOSE.get(self.here, "")
            self.at += 1
            if not closed or (opened == "{") != (closed == "}"):
                raise Unreadable
        if len(items) == 1 and opened != "{" and (opened, closed) in (("", ""), ("(", ")"), ("[", "]")):
            return items[0]
        join = "or" if "or" in joins else "and"
        return Node("sequence", (opened, closed, tuple(items), join))

    def condition(self, head: Node) -> Node:
        """What holds of the elements of a set: ``{x | x > 2}`` or ``{x : x > 2}``."""
        if head.kind == "chain" and ":" in head.args[1]:
            sides, relations, sources = head.args
            node = Node("chain", (sides[1:], relations[1:], sources[1:]))
        else:
            node = self.listing("")
        self.take("\\}")
        return node

    def chain(self) -> Node:
        """Sides with relations between them: ``a < x <= b``."""
        if self.here in ("=", "\\approx"):  # = 5
            self.at += 1
        start = self.at
        sides, sources, relations = [self.union()], [], []
        while self.here in _RELATIONS and not (self.here == "|" and self.bars):
            sources.append(self.source(start, self.at))
            relations.append(_RELATIONS[self.here])
            self.at += 1
            start = self.at
            sides.append(self.union())
        if not relations:
            return sides[0]
        sources.append(self.source(start, self.at))
        return Node("chain", (tuple(sides), tuple(relations), tuple(sources)))

    def union(self) -> Node:
        node = self.sum()
        while self.here in _SETS:
            kind = _SETS[self.here]
            self.at += 1
            node = Node(kind, (node, self.sum()))
        return node

    # ------------------------------------------------------------------ arithmetic

    def sum(self) -> Node:
        node = self.term()
        while self.here in ("+", "-", "\\pm", "\\mp"):
            sign = self.here
            self.at += 1
            node = Node("add", (node, _signed(sign, self.term())))
        return node

    def term(self) -> Node:
        node = self.factor()
        while True:
            if unit := self.unit(node):
                return unit
            if self.here in ("*", "/", "\\bmod"):
                kind = {"*": "multiply", "/": "divide", "\\bmod": "modulo"}[self.here]
                self.at += 1
                node = Node(kind, (node, self.factor()))
            elif self.starts_factor():
                node = self.juxtaposed(node)
            else:
                return node

    def juxtaposed(self, node: Node) -> Node:
        """The product of two that stand side by side, or a mixed number."""
        last = self.tokens[self.at - 1]
        is_fraction = self.here == "\\frac" or (self.kind == "number" and last.kind == "number")
        if node.kind == "negate" and is_fraction:
            return Node("negate", (self.juxtaposed(node.args[0]),))
        right = self.power()
        whole = _integer(node)
        if is_fraction and whole is not None and last.kind == "number":
            if right.kind == "number" and self.found("/"):  # 2 1/3
                right = Node("divide", (right, self.power()))
            parts = [_integer(part) for part in right.nodes] if right.kind == "divide" else [None]
            if len(parts) == 2 and None not in parts and 0 < (parts[0] or 0) < (parts[1] or 0):
                return Node("add", (node, right))
            if right.kind == "number":
                raise Unreadable  # 1 2
        if right.kind == "number" and last.kind == "number":
            raise Unreadable
        return Node("multiply", (node, right))

    def starts_factor(self) -> bool:
        here = self.here
        if self.kind in _BEGINS or here in _OPEN:
            return True
        if here == "|":
            return not self.bars
        return (here[:1] == "\\" and here[1:].isalpha() and here not in _RELATIONS
                and here not in _SETS and here not in _SEPARATORS
                and here[1:] not in ("pm", "mp", "bmod", "rfloor", "rceil", "rangle", "end")
                ) or here == "{"  # fmt: skip

    def factor(self) -> Node:
        signs = []
        while self.here in ("+", "-", "\\pm", "\\mp"):
            signs.append(self.here)
            self.at += 1
        node = self.power()
        for sign in reversed(signs):
            node = _signed(sign, node)
        return node

    def power(self) -> Node:
        node = self.primary()
        while True:
            if self.found("!"):
                double = self.found("!")
                node = Node("call", ("double_factorial" if double else "factorial", node))
                if self.here == "!":
                    raise Unreadable
            elif self.here in ("^", "**"):
                self.at += 1
                node = Node("power", (node, self.deeper(self.exponent)))
            elif self.here == "°" and (self.in_function or not self.unit_ahead()):
                self.at += 1
                node = Node("multiply", (node, Node("call", ("degree", number(1)))))
            else:
                return node

    def exponent(self) -> Node:
        if self.here in ("+", "-"):
            sign = self.here
            self.at += 1
            return _signed(sign, self.deeper(self.exponent))
        node = self.primary()
        if self.found("!"):
            node = Node("call", ("factorial", node))
        if self.here in ("^", "**"):
            self.at += 1
            return Node("power", (node, self.deeper(self.exponent)))
        return node

    # ------------------------------------------------------------------ units

    def unit_ahead(self) -> Any:
        """The unit that stands from here to the end of the item, and where it ends; else None."""
        end, depth = self.at, 0
        while end < len(self.tokens):
            token = self.tokens[end]
            depth += (token.text == "{") - (token.text == "}")
            text = f"\\text{{{token.text.lower()}}}" if token.text.lower() in ("and", "or") else token.text
            is_end = token.kind != "text" and (
                text in _SEPARATORS or text in _RELATIONS or text in _CLOSE
            )
            if depth < 0 or is_end or end - self.at > 24:
                break
            end += 1
        start = self.tokens[self.at].start if self.at < len(self.tokens) else 0
        spaced = start > 0 and self.text[start - 1] == " "
        source = self.source(self.at, end) if end > self.at else ""
        unit = parse_unit(" " * spaced + source.replace("\\%", "%").replace("\\$", "$")) if source else None
        return (unit, end) if unit else None

    def unit(self, node: Node) -> Node | None:
        if self.in_function or self.depth and self.kind not in ("text", "word", "letter"):
            if not (self.depth and self.here in ("%", "\\%", "°")):
                return None
        if self.kind not in ("text", "word", "letter") and self.here not in ("°", "%", "\\%", "\\$", "$", "\\mu", "\\Omega", "€", "£", "¢", "Å"):
            return None
        if node.symbols and self.kind != "text":
            return None
        found = self.unit_ahead()
        if found is None or not (found[0].certain or self.loose_units):
            return None
        unit, self.at = found
        value = node if unit.scale == 1 else Node("multiply", (node, number(unit.scale)))
        if unit.is_none:
            return value
        if node.kind == "quantity":
            raise Unreadable
        return Node("quantity", (value, unit))

    # ------------------------------------------------------------------ primaries

    def primary(self) -> Node:
        if self.at >= len(self.tokens):
            raise Unreadable
        token = self.tokens[self.at]
        self.at += 1
        if token.kind == "number":
            return self.number(token.text)
        if token.kind == "based":
            return Node("based", _based(token.text) or ())
        if token.kind == "function":
            return self.function(token.text)
        if token.kind in ("letter", "word", "text"):
            return self.symbol(token.text)
        if token.text in _OPEN:
            opened = {"\\{": "{", "\\langle": "("}.get(token.text, token.text)
            return self.deeper(lambda: self.listing(opened))
        if token.text == "{":
            return self.deeper(self.group)
        if token.text == "|":
            return self.deeper(self.absolute)
        if token.text in ("\\$", "$", "€", "£", "¥", "₹"):
            return self.money(token.text.lstrip("\\"))
        if token.text[:1] == "\\":
            return self.command(token.text[1:])
        raise Unreadable

    def number(self, text: str) -> Node:
        digits = text.replace(",", "")
        if self.here == "\\overline" and "." in digits:
            self.at += 1
            self.take("{")
            repeated = self.tokens[self.at].text if self.kind == "number" else ""
            self.at += 1
            self.take("}")
            if not repeated.isdigit():
                raise Unreadable
            return number(_repeating(digits, repeated))
        return number(Fraction(digits.rstrip(".") if digits[-1] == "." else digits))

    def group(self) -> Node:
        node = self.listing("")
        self.take("}")
        return node

    def absolute(self) -> Node:
        self.bars = 1
        node = self.sum()
        self.take("|")
        return Node("call", ("abs", node))

    def money(self, sign: str) -> Node:
        value = self.factor()
        unit = parse_unit(sign)
        assert unit is not None
        found = self.unit_ahead() if self.kind in ("text", "word", "letter") else None
        if found and found[0].scale != 1:  # $2 million
            extra, self.at = found
            value = Node("multiply", (value, number(extra.scale)))
        return Node("quantity", (value, unit))

    def symbol(self, name: str) -> Node:
        if name in ("e", "i"):
            if self.here != "_":
                return Node("constant", (name,))
        elif name == "pi":
            return Node("constant", ("pi",))
        elif name.lower() in ("infinity", "inf"):
            return Node("constant", ("inf",))
        while self.here == "'":
            self.at += 1
            name += "'"
        if self.found("_"):
            name += "_" + self.subscript()
        return Node("symbol", (name,))

    def subscript(self) -> str:
        if not self.found("{"):
            self.at += 1
            return self.tokens[self.at - 1].text if self.at <= len(self.tokens) else ""
        start, depth = self.at, 1
        while self.at < len(self.tokens) and depth:
            depth += (self.here == "{") - (self.here == "}")
            self.at += 1
        if depth:
            raise Unreadable
        return "".join(token.text for token in self.tokens[start : self.at - 1])

    def function(self, name: str) -> Node:
        base = None
        if name in ("log", "lg") and self.found("_"):
            base = self.deeper(self.primary)
        power = self.deeper(self.exponent) if self.found("^") else None
        if base is None and name == "log" and self.found("_"):
            base = self.deeper(self.primary)
        self.in_function += 1
        arguments = self.deeper(self.arguments)
        self.in_function -= 1
        items = arguments.args[2] if arguments.kind == "sequence" else (arguments,)
        if power == _signed("-", number(1)) and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None
        node = Node("call", (name, *((base,) if base else ()), *items))
        return Node("power", (node, power)) if power else node

    def arguments(self) -> Node:
        """What a function is of: a group, or the factors that follow it."""
        if self.here in _OPEN or self.here == "{":
            return self.power()
        if self.here == "\\text{of}":
            self.at += 1
        node = self.factor()
        while self.starts_factor() and self.kind != "function" and self.here not in _OPEN:
            node = Node("multiply", (node, self.power()))
        return node

    def command(self, name: str) -> Node:
        simple = {"pi": ("constant", "pi"), "infty": ("constant", "inf"), "emptyset": ("set", "")}
        if name in simple:
            kind, value = simple[name]
            return Node(kind, (value,)) if kind == "constant" else Node("sequence", ("{", "}", (), "and"))
        if name in ("frac", "binom"):
            pair = self.deeper(self.primary), self.deeper(self.primary)
            return Node("divide", pair) if name == "frac" else Node("call", ("binomial", *pair))
        if name in ("sqrt", "surd"):
            return self.root()
        if name in _COMMANDS_OF_ONE:
            closing, kind = _COMMANDS_OF_ONE[name]
            node = self.deeper(self.sum)
            self.take(f"\\{closing}")
            return Node("call", (kind, node))
        if name == "begin":
            return self.deeper(self.matrix)
        if name in _ACCENTS:
            return self.accented(name)
        if name in _PREFIXES:
            return Node("symbol", (f"{name} {self.subscript_like()}",))
        if name in _NOT_SYMBOLS or not name.isalpha() or name in ("rfloor", "rceil", "rangle"):
            raise Unreadable
        return self.symbol(f"\\{name}")

    def subscript_like(self) -> str:
        letters = ""
        while self.kind in ("letter", "word"):
            letters += self.here
            self.at += 1
        return letters

    def accented(self, name: str) -> Node:
        if name in ("mathbf", "underline", "boldsymbol", "bm") and not self.one_letter():
            return self.primary()
        inner = self.subscript() if self.here == "{" else self.subscript_like()[:1]
        if not inner:
            raise Unreadable
        if name in ("mathbf", "bm", "boldsymbol", "mathit", "pmb"):
            name = "vec" if name in ("mathbf", "bm", "boldsymbol", "pmb") else ""
        return self.symbol(f"{name}:{inner}" if name else inner)

    def one_letter(self) -> bool:
        inside = self.tokens[self.at : self.at + 3]
        return len(inside) == 3 and inside[1].kind == "letter" and inside[2].text == "}"

    def root(self) -> Node:
        index = number(2)
        if self.found("["):
            index = self.deeper(self.sum)
            self.take("]")
        return Node("call", ("root", index, self.deeper(self.primary)))

    def matrix(self) -> Node:
        environment = self.subscript()
        if environment not in _MATRICES:
            raise Unreadable
        if environment == "array":
            self.subscript()
        rows: list[tuple[Node, ...]] = []
        row = [self.sum()]
        while not self.found("\\end"):
            if self.found("&"):
                row.append(self.sum())
            elif self.found("\\\\"):
                rows.append(tuple(row))
                if self.found("\\end"):
                    row = []
                    break
                row = [self.sum()]
            else:
                raise Unreadable
        self.subscript()
        rows += [tuple(row)] if row else []
        if environment != "vmatrix":
            return Node("matrix", tuple(rows))
        if len(rows) > 4 or any(len(row) != len(rows) for row in rows):
            raise Unreadable
        return _determinant(rows)


def _based(text: str) -> tuple[int, int, str] | None:
    """The value, the base and the digits of ``1010_2``."""
    digits, _, base = re.sub(r"\\text|[{}(), ]", "", text).partition("_")
    number_of_base = int(base) if base.isdigit() else _BASES.get(base, 0)
    try:
        return int(digits, number_of_base), number_of_base, digits
    except ValueError:
        return None


def _is_condition(node: Node) -> bool:
    return node.kind == "chain" and node.args[1][0] == ":" and len(node.args[1]) > 1


def _determinant(rows: Sequence[Sequence[Node]]) -> Node:
    """The _determinant of a small matrix, by its first row."""
    if len(rows) == 1:
        return rows[0][0]
    terms = []
    for place, entry in enumerate(rows[0]):
        minor = _determinant([[*row[:place], *row[place + 1 :]] for row in rows[1:]])
        term = Node("multiply", (entry, minor))
        terms.append(Node("negate", (term,)) if place % 2 else term)
    return functools.reduce(lambda one, two: Node("add", (one, two)), terms)


def _signed(sign: str, node: Node) -> Node:
    if sign == "+":
        return node
    if node.kind == "quantity":
        return Node("quantity", (_signed(sign, node.args[0]), node.args[1]))
    kind = {"-": "negate", "\\pm": "plus_minus", "\\mp": "minus_plus"}[sign]
    return Node(kind, (node,))


def _integer(node: Node) -> int | None:
    whole = node.kind == "number" and node.args[0].denominator == 1
    return int(node.args[0]) if whole else None


def _repeating(digits: str, repeated: str) -> Fraction:
    """``0.1`` with ``6`` repeated is 1/6."""
    places = len(digits) - digits.index(".") - 1
    return Fraction(digits.rstrip(".") or "0") + Fraction(int(repeated), 10**places * (10 ** len(repeated) - 1))
