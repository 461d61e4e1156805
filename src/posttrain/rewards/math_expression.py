r"""A parser of answers in LaTeX or plain text: expressions, sets, intervals, matrices, relations.

It is a recursive descent over a bounded number of tokens to a bounded depth, and computes nothing.
What it does not know it does not read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from posttrain.rewards.math_tokens import (
    CLOSE,
    OPEN,
    RELATIONS,
    SEPARATORS,
    SETS,
    Node,
    Token,
    Unreadable,
    based,
    grouped,
    number,
    tokens,
)
from posttrain.rewards.math_units import Unit, parse_unit

MAX_DEPTH = 30  # of brackets in brackets, exponents in exponents
MAX_POSTFIXES = 4  # of one factor: powers and factorials
MAX_ITEMS = 64
MAX_UNIT_TOKENS = 24

_BEGINS = frozenset({"number", "based", "letter", "word", "function", "text"})
_SIGNS = {"+": "plus", "-": "negate", "\\pm": "plus_minus", "\\mp": "minus_plus"}
_UNIT_SIGNS = frozenset({"°", "%", "\\%", "€", "£", "¢", "Å", "\\mu", "\\Omega", "\\pmod"})
_CURRENCIES = frozenset({"\\$", "$", "€", "£", "¥", "₹"})
_ROUNDED = {"lfloor": ("\\rfloor", "floor"), "lceil": ("\\rceil", "ceil")}
_WEIGHTS = frozenset({"mathbf", "bm", "boldsymbol", "pmb", "underline"})
_ACCENTS = _WEIGHTS | {
    "vec", "hat", "bar", "overline", "tilde", "dot", "ddot", "mathbb", "mathcal", "mathit",
    "mathfrak", "mathscr", "widehat", "overrightarrow", "overleftrightarrow",
}  # fmt: skip
_OF_LETTERS = frozenset({"angle", "triangle", "measuredangle", "square", "odot"})
_MATRICES = frozenset({
    "pmatrix", "bmatrix", "matrix", "array", "Bmatrix", "smallmatrix", "vmatrix"
})  # fmt: skip
_UNKNOWN = frozenset({  # commands that are no symbols
    "sum", "prod", "int", "iint", "oint", "lim", "limsup", "liminf", "end", "ldots", "cdots", "dots",
    "vdots", "substack", "over", "atop", "partial", "nabla", "pmod", "mod", "forall", "exists", "text",
    "overset", "underset", "not", "hline", "tag", "rfloor", "rceil", "rangle", "stackrel", "cases",
})  # fmt: skip

_RECURRING = re.compile(r"[0-9]*\.[0-9]*?([0-9]{1,6}?)\1{2,}")  # 0.333 before dots


@functools.lru_cache(maxsize=4096)  # a group of completions shares its answer
def parse(text: str, *, loose_units: bool = False) -> Node | None:
    r"""The answer that a cleaned text is; None where it cannot be read.

    With ``loose_units`` also the m of ``5m`` is taken for a unit.

    >>> parse("2x").symbols, parse("(1, 2]").args[:2], parse(r"\frac{1}{") is None
    (frozenset({'x'}), ('(', ']'), True)
    """
    try:
        return _Parser(grouped(text), loose_units=loose_units).answer()
    except Unreadable:
        return None


class _Parser:
    def __init__(self, text: str, *, loose_units: bool) -> None:
        self.text = text
        self.tokens = [*tokens(text), Token("end", "", len(text), len(text))]
        self.loose_units = loose_units
        self.at = 0
        self.depth = 0
        self.bars = 0  # that are open, so that the next one closes
        self.groups = 0  # of LaTeX: what stands in one has no unit
        self.functions = 0  # whose argument is read: there a degree is an angle

    # ------------------------------------------------------------------ tokens

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
            raise Unreadable
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
            raise Unreadable

    def source(self, start: int, end: int) -> str:
        return self.text[self.tokens[start].start : self.tokens[end].start].strip()

    def deeper(self, inner: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        bars, self.bars = self.bars, 0
        node = inner()
        self.bars = bars
        self.depth -= 1
        return node

    def argument(self) -> Node:
        """What a command of LaTeX is given."""
        self.groups += 1
        node = self.deeper(self.primary)
        self.groups -= 1
        return node

    # ------------------------------------------------------------------ lists and relations

    def answer(self) -> Node:
        node = self.listing("")
        if self.kind != "end":
            raise Unreadable
        return node

    def listing(self, opened: str) -> Node:
        """Items in brackets, or bare ones; a single one in like brackets is itself."""
        self.bars = int(opened == "{")  # there a bar divides: {x | x > 2}
        items, joins = [self.chain()], {"and"}
        if opened == "{" and (self.found("|") or _has_condition(items[0])):
            return self.condition(items[0])
        while self.here in SEPARATORS:
            joins.add(SEPARATORS[self.next().text])
            if self.here in ("and", "or"):  # ", and"
                joins.add(SEPARATORS[self.next().text])
            items.append(self.chain())
            if len(items) > MAX_ITEMS:
                raise Unreadable
        closed = CLOSE.get(self.next().text, "") if opened else ""
        if (opened == "{") != (closed == "}") or bool(opened) != bool(closed):
            raise Unreadable
        if len(items) == 1 and opened + closed in ("", "()", "[]"):
            return items[0]
        return Node("sequence", (opened, closed, tuple(items), "or" if "or" in joins else "and"))

    def condition(self, head: Node) -> Node:
        """What holds of the elements of a set: ``{x | x > 2}`` or ``{x : x > 2}``."""
        node = self.listing("") if not _has_condition(head) else _without_first(head)
        self.take("\\}")
        return node

    def chain(self) -> Node:
        """Sides with relations between them: ``a < x <= b``."""
        if self.here in ("=", "\\approx"):  # = 5
            self.at += 1
        start = self.at
        sides, sources, relations = [self.union()], [], []
        while self.here in RELATIONS:
            sources.append(self.source(start, self.at))
            relations.append(RELATIONS[self.next().text])
            start = self.at
            sides.append(self.union())
        if not relations:
            return sides[0]
        sources.append(self.source(start, self.at))
        return Node("chain", (tuple(sides), tuple(relations), tuple(sources)))

    def union(self) -> Node:
        node = self.sum()
        for _ in range(MAX_ITEMS):
            if self.here not in SETS:
                return node
            node = Node(SETS[self.next().text], (node, self.sum()))
        raise Unreadable

    # ------------------------------------------------------------------ arithmetic

    def sum(self) -> Node:
        terms = [self.term()]
        while self.here in _SIGNS:
            sign = self.next().text
            terms.append(_signed(sign, self.term()))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def term(self) -> Node:
        """Factors and divisors, in one flat product: a long one is not a deep one."""
        above, below = [self.factor()], list[Node]()
        while True:
            if self.may_be_unit() and (quantity := self.quantity(_quotient(above, below))):
                return quantity
            if self.found("*"):
                above.append(self.factor())
            elif self.found("/"):
                below.append(self.factor())
            elif self.found("\\bmod"):
                return Node("modulo", (_quotient(above, below), self.factor()))
            elif self.begins_factor():
                mixes = not below and self.tokens[self.at - 1].kind == "number"
                above += self.mixed(above.pop()) if mixes else [self.power()]
            else:
                return _quotient(above, below)

    def begins_factor(self) -> bool:
        here = self.here
        if self.kind in _BEGINS or here in OPEN or here == "{":
            return True
        if here == "|":
            return not self.bars
        known = here in RELATIONS or here in SETS or here in SEPARATORS or here in _SIGNS
        return self.kind == "command" and not known and here[1:] not in _UNKNOWN

    def mixed(self, left: Node) -> list[Node]:
        """A mixed number such as ``2 1/3``, or the two factors that stand side by side."""
        if left.kind == "negate":
            first, *rest = self.mixed(left.args[0])
            return [Node("negate", (first,)), *rest]
        may_mix = left.kind == "number" and (self.here == "\\frac" or self.kind == "number")
        right = self.power()
        if may_mix and right.kind == "number" and self.found("/"):
            right = Node("divide", (right, self.power()))
        if may_mix and _is_proper(right):
            return [Node("add", (left, right))]
        if right.kind == "number":
            raise Unreadable  # 1 2
        return [left, right]

    def factor(self) -> Node:
        signs = []
        while self.here in _SIGNS:
            signs.append(self.next().text)
        node = self.power()
        if signs.count("-") % 2:
            node = _signed("-", node)
        both = [sign for sign in signs if sign not in ("+", "-")]
        if len(both) > 1:
            raise Unreadable
        return _signed(both[0], node) if both else node

    def power(self) -> Node:
        node = self.primary()
        for _ in range(MAX_POSTFIXES):
            if self.found("!"):
                node = Node("call", ("double_factorial" if self.found("!") else "factorial", node))
            elif self.here in ("^", "**"):
                self.at += 1
                node = Node("power", (node, self.deeper(self.exponent)))
            elif self.here == "°" and self.functions:
                self.at += 1
                node = Node("call", ("degree", node))
            elif not (self.groups and self.found("°")):
                return node
        raise Unreadable

    def exponent(self) -> Node:
        if self.here in ("+", "-"):
            return _signed(self.next().text, self.deeper(self.exponent))
        self.groups += 1
        node = self.primary()
        self.groups -= 1
        if self.found("!"):
            node = Node("call", ("factorial", node))
        if self.here not in ("^", "**"):
            return node
        self.at += 1
        return Node("power", (node, self.deeper(self.exponent)))

    # ------------------------------------------------------------------ units

    def may_be_unit(self) -> bool:
        if self.functions or (self.groups and self.kind != "text"):
            return False
        return self.kind in ("text", "word", "letter") or self.here in _UNIT_SIGNS

    def quantity(self, node: Node) -> Node | None:
        """A number with the unit that stands from here to the end of the item; None without one."""
        if node.kind == "quantity" or (node.symbols and self.kind != "text"):
            return None
        unit, end = self.unit_ahead()
        if unit is None or not (unit.certain or self.loose_units):
            return None
        self.at = end
        value = node if unit.scale == 1 else Node("multiply", (node, number(unit.scale)))
        return value if unit.is_none else Node("quantity", (value, unit))

    def unit_ahead(self) -> tuple[Unit | None, int]:
        end, depth = self.at, 0
        while self.tokens[end].kind != "end" and end - self.at <= MAX_UNIT_TOKENS:
            token = self.tokens[end]
            depth += (token.text == "{") - (token.text == "}")
            divides = token.text in SEPARATORS or token.text in RELATIONS or token.text in CLOSE
            if depth < 0 or (divides and token.kind != "text"):
                break
            end += 1
        spaced = self.text[: self.tokens[self.at].start].endswith(" ")
        return parse_unit(" " * spaced + self.source(self.at, end)), end

    def money(self, sign: str) -> Node:
        value = self.deeper(self.factor)
        if self.kind in ("text", "word"):
            unit, end = self.unit_ahead()
            if unit is not None and unit.scale != 1:  # $2 million
                value, self.at = Node("multiply", (value, number(unit.scale))), end
        return Node("quantity", (value, parse_unit(f" {sign}")))

    # ------------------------------------------------------------------ primaries

    def primary(self) -> Node:
        token = self.next()
        if token.kind == "number":
            return self.number(token.text.replace(",", ""))
        if token.kind == "based":
            return Node("based", based(token.text))
        if token.kind == "function":
            return self.function(token.text)
        if token.kind in ("letter", "word", "text"):
            return self.symbol(token.text)
        if token.text in OPEN:
            return self.deeper(lambda: self.listing(OPEN[token.text]))
        if token.text == "{":
            return self.deeper(self.group)
        if token.text == "|":
            return self.deeper(self.absolute)
        if token.text in _CURRENCIES:
            return self.money(token.text[-1])
        if token.kind == "command":
            return self.command(token.text[1:])
        raise Unreadable

    def number(self, digits: str) -> Node:
        repeated = ""
        if self.here == "\\overline" and "." in digits:
            self.at += 1
            repeated = self.name()
        elif self.found("\\ldots"):
            match = _RECURRING.fullmatch(digits)
            repeated = match[1] if match else ""
        else:
            return number(Fraction(digits.removesuffix(".")))
        if not repeated.isdigit():
            raise Unreadable
        places = len(digits) - digits.index(".") - 1
        rest = Fraction(int(repeated), 10**places * (10 ** len(repeated) - 1))
        return number(Fraction(digits.removesuffix(".") or "0") + rest)

    def group(self) -> Node:
        node = self.listing("")
        self.take("}")
        return node

    def absolute(self) -> Node:
        self.bars = 1
        node = self.sum()
        self.take("|")
        return Node("call", ("abs", node))

    def symbol(self, name: str) -> Node:
        constant = {"e": "e", "i": "i", "pi": "pi", "infinity": "inf", "inf": "inf"}.get(name.lower())
        if constant and (len(name) > 1 or (name.islower() and self.here != "_")):
            return Node("constant", (constant,))
        while self.found("'"):
            name += "'"
        if self.found("_"):
            name += "_" + self.name()
        return Node("symbol", (name,))

    def name(self) -> str:
        """What stands in braces, or the next token, as it is written."""
        if not self.found("{"):
            return self.next().text
        start, depth = self.at, 1
        while depth:
            text = self.next().text
            depth += (text == "{") - (text == "}")
        return "".join(token.text for token in self.tokens[start : self.at - 1])

    def function(self, name: str) -> Node:
        base = power = None
        for _ in range(2):  # in either order
            if name == "log" and self.found("_"):
                base = self.argument()
            elif self.found("^"):
                power = self.deeper(self.exponent)
        self.functions += 1
        arguments = self.deeper(self.arguments)
        self.functions -= 1
        items = arguments.args[2] if arguments.kind == "sequence" else (arguments,)
        if power == _signed("-", number(1)):
            name, power = f"arc{name}", None
        node = Node("call", (name, *((base,) if base else ()), *items))
        return Node("power", (node, power)) if power else node

    def arguments(self) -> Node:
        """What a function is of: a group, or the factors that follow it."""
        if self.here in OPEN or self.here == "{":
            return self.primary()
        factors = [self.factor()]
        while self.begins_factor() and self.kind != "function" and self.here not in OPEN:
            factors.append(self.power())
        return _quotient(factors, [])

    def command(self, name: str) -> Node:
        if name in ("pi", "infty"):
            return Node("constant", (name[:3],))
        if name == "emptyset":
            return Node("sequence", ("{", "}", (), "and"))
        if name in ("frac", "binom"):
            pair = self.argument(), self.argument()
            return Node("divide", pair) if name == "frac" else Node("call", ("binomial", *pair))
        if name in ("sqrt", "surd"):
            return self.root()
        if name in _ROUNDED:
            closing, function = _ROUNDED[name]
            node = self.deeper(self.sum)
            self.take(closing)
            return Node("call", (function, node))
        if name == "begin":
            return self.deeper(self.matrix)
        if name in _ACCENTS:
            return self.accented(name)
        if name in _OF_LETTERS:
            while self.kind in ("letter", "word"):
                name += " " + self.next().text
            return Node("symbol", (name,))
        if name in _UNKNOWN:
            raise Unreadable
        return self.symbol(f"\\{name}")

    def accented(self, name: str) -> Node:
        is_letter = self.here != "{" or self.tokens[self.at + 1].kind in ("letter", "command")
        if name in _WEIGHTS and not is_letter:
            return self.argument()
        return self.symbol(f"{'vec' if name in _WEIGHTS else name}:{self.name()}")

    def root(self) -> Node:
        index = number(2)
        if self.found("["):
            index = self.deeper(self.sum)
            self.take("]")
        return Node("call", ("root", index, self.argument()))

    def matrix(self) -> Node:
        environment = self.name()
        if environment not in _MATRICES:
            raise Unreadable
        if environment == "array":
            self.name()
        rows: list[list[Node]] = [[self.sum()]]
        while not self.found("\\end"):
            if self.found("&"):
                rows[-1].append(self.sum())
            else:
                self.take("\\\\")
                if self.here != "\\end":
                    rows.append([self.sum()])
        self.name()
        if environment == "vmatrix":
            return _determinant(rows)
        return Node("matrix", tuple(map(tuple, rows)))


def _signed(sign: str, node: Node) -> Node:
    if sign == "+":
        return node
    if node.kind == "quantity":
        return Node("quantity", (_signed(sign, node.args[0]), node.args[1]))
    return Node(_SIGNS[sign], (node,))


def _quotient(above: Sequence[Node], below: Sequence[Node]) -> Node:
    products = [
        nodes[0] if len(nodes) == 1 else Node("multiply", tuple(nodes)) for nodes in (above, below) if nodes
    ]
    return products[0] if len(products) == 1 else Node("divide", tuple(products))


def _is_proper(node: Node) -> bool:
    """Whether it is a fraction of whole numbers between 0 and 1."""
    values = [part.args[0] for part in node.args if part.kind == "number"] if node.kind == "divide" else []
    return len(values) == 2 and all(v.denominator == 1 for v in values) and 0 < values[0] < values[1]


def _has_condition(node: Node) -> bool:
    return node.kind == "chain" and node.args[1][0] == ":" and len(node.args[1]) > 1


def _without_first(chain: Node) -> Node:
    return Node("chain", tuple(part[1:] for part in chain.args))


def _determinant(rows: Sequence[Sequence[Node]]) -> Node:
    """The determinant of a small matrix, by its first row."""
    if len(rows) > 4 or any(len(row) != len(rows) for row in rows):
        raise Unreadable
    if len(rows) == 1:
        return rows[0][0]
    terms = []
    for place, entry in enumerate(rows[0]):
        minor = _determinant([[*row[:place], *row[place + 1 :]] for row in rows[1:]])
        terms.append(_signed("-+"[place % 2 == 0], Node("multiply", (entry, minor))))
    return functools.reduce(lambda one, two: Node("add", (one, two)), terms)
