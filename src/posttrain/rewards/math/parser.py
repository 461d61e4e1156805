r"""A parser of answers in LaTeX or plain text: expressions, sets, intervals, matrices, relations.

It is a recursive descent over a bounded number of tokens to a bounded depth, and computes nothing.
What it does not know it does not read.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from posttrain.rewards.math.nodes import (
    SIGNS,
    Node,
    UnreadableError,
    condition,
    determinant,
    is_proper,
    number,
    quotient,
    recurring,
    signed,
)
from posttrain.rewards.math.tokens import (
    ACCENTS,
    CLOSE,
    MATRICES,
    OF_LETTERS,
    OPEN,
    RELATIONS,
    SEPARATORS,
    SETS,
    UNKNOWN,
    WEIGHTS,
    Cursor,
    based,
    grouped,
)
from posttrain.rewards.math.units import Unit, parse_unit

MAX_POSTFIXES = 4  # powers and factorials of one factor
MAX_ITEMS = 64

_UNIT_SIGNS = frozenset({"°", "%", "\\%", "€", "£", "¢", "Å", "\\mu", "\\Omega", "\\pmod", "min"})
_CURRENCIES = frozenset({"\\$", "$", "€", "£", "¥", "₹"})
_CONSTANTS = {
    "pi": Node("constant", ("pi",)), "infty": Node("constant", ("inf",)),
    "emptyset": Node("sequence", ("{", "}", (), "and")),
}  # fmt: skip
_ROUNDED = {"lfloor": "floor", "lceil": "ceil"}
_NAMED = {"e": "e", "i": "i", "pi": "pi", "infinity": "inf", "inf": "inf"}
_DERIVATIVE = re.compile(r"\{d[^{}]*\}\{d[a-zA-Z](?:\^[0-9])?\}")
_ONE_NAME = re.compile(r"\{\s?\\?[a-zA-Z]+\s?\}")
_RECURRING = re.compile(r"[0-9]*\.[0-9]*?([0-9]{1,6}?)\1{2,}")  # recurs: 0.333…


@functools.lru_cache(maxsize=4096)  # a group of completions shares its answer
def parse(text: str, *, loose_units: bool = False) -> Node | None:
    r"""The answer that a cleaned text is; None where it cannot be read.

    With ``loose_units`` also the m of ``5m`` is taken for a unit.

    >>> parse("2x").symbols, parse("(1, 2]").args[:2], parse(r"\frac{1}{") is None
    (frozenset({'x'}), ('(', ']'), True)
    """
    try:
        return _Parser(text, loose_units=loose_units).answer()
    except UnreadableError:
        return None


class _Parser(Cursor):
    def __init__(self, text: str, *, loose_units: bool) -> None:
        super().__init__(grouped(text))
        self.loose_units = loose_units
        self.groups = 0  # depth of LaTeX groups: inside one, letters are no unit
        self.functions = 0  # depth of function arguments: there a degree sign is an angle

    def argument(self) -> Node:
        """The argument of a LaTeX command."""
        self.groups += 1
        node = self.deeper(self.primary)
        self.groups -= 1
        return node

    # ------------------------------------------------------------------ lists and relations

    def answer(self) -> Node:
        node = self.listing("")
        if self.kind != "end":
            raise UnreadableError
        return node

    def listing(self, opened: str) -> Node:
        """Items in brackets, or bare ones; a single one in like brackets is itself."""
        self.bars = int(opened == "{")  # in braces a bar is no absolute value: {x | x > 2}
        items, joins = [self.chain()], {"and"}
        if opened == "{" and (
            held := condition(items[0]) or (self.found("|") and self.listing(""))
        ):
            self.take("\\}")
            return held
        while self.here in SEPARATORS:
            joins.add(SEPARATORS[self.next().text])
            if self.here in ("and", "or"):  # a comma before the conjunction: ", and"
                joins.add(SEPARATORS[self.next().text])
            items.append(self.chain())
            if len(items) > MAX_ITEMS:
                raise UnreadableError
        closed = CLOSE.get(self.next().text, "") if opened else ""
        if (opened == "{") != (closed == "}") or bool(opened) != bool(closed):
            raise UnreadableError
        if len(items) == 1 and opened + closed in ("", "()", "[]"):
            return items[0]
        return Node("sequence", (opened, closed, tuple(items), max(joins)))  # and < both < or

    def chain(self) -> Node:
        """Sides with relations between them: ``a < x <= b``."""
        if self.here in ("=", "\\approx"):  # an answer may begin with the sign: = 5
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
        raise UnreadableError

    # ------------------------------------------------------------------ arithmetic

    def sum(self) -> Node:
        terms = [self.term()]
        while self.here in SIGNS:
            sign, term = self.next().text, self.term()
            if sign == "-" and term.kind == "sequence" and term.args[0] == "{":
                return Node("difference", (terms[0], term))
            terms.append(signed(sign, term))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def term(self) -> Node:
        """Factors and divisors, in one flat product: a long one is not a deep one."""
        above, below = [self.factor()], list[Node]()
        while True:
            if self.may_be_unit() and (quantity := self.quantity(quotient(above, below))):
                return quantity
            if self.found("*"):
                above.append(self.factor())
            elif self.found("/"):
                below.append(self.factor())
            elif self.found("\\bmod"):
                return Node("modulo", (quotient(above, below), self.factor()))
            elif self.begins_factor():
                mixes = not below and self.tokens[self.at - 1].kind == "number"
                above += self.mixed(above.pop()) if mixes else [self.power()]
            else:
                return quotient(above, below)

    def mixed(self, left: Node) -> list[Node]:
        """A mixed number such as ``2 1/3``, or the two factors that stand side by side."""
        if left.kind == "negate":
            first, *rest = self.mixed(left.args[0])
            return [Node("negate", (first,)), *rest]
        may_mix = left.kind == "number" and (self.here == "\\frac" or self.kind == "number")
        bracketed = self.here in OPEN and self.tokens[self.at - 1].text.isdigit()  # 6(7)
        right = self.power()
        if may_mix and right.kind == "number" and self.found("/"):
            right = Node("divide", (right, self.power()))
        if may_mix and is_proper(right):
            return [Node("add", (left, right))]
        if right.kind == "number" and not bracketed:
            raise UnreadableError  # two numbers side by side: 1 2
        return [left, right]

    def factor(self) -> Node:
        signs = []
        while self.here in SIGNS:
            signs.append(self.next().text)
        node = signed("-" if signs.count("-") % 2 else "+", self.power())
        both = [sign for sign in signs if sign not in ("+", "-")]
        if len(both) > 1:
            raise UnreadableError
        return signed(both[0], node) if both else node

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
        raise UnreadableError

    def exponent(self) -> Node:
        sign = self.next().text if self.here in ("+", "-") else "+"
        self.groups += 1
        node = self.power()
        self.groups -= 1
        return signed(sign, node)

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
        if not unit.dimension and not unit.label:
            return value
        if self.kind != "number":
            return Node("quantity", (value, unit))
        rest = self.deeper(self.term)  # a smaller unit follows: 5 feet 6 inches
        if rest.kind != "quantity" or not rest.args[1].is_part_of(unit):
            raise UnreadableError
        parts = ((value, unit.factor), (rest.args[0], rest.args[1].factor))
        total = Node("add", tuple(Node("multiply", (n, number(f))) for n, f in parts))
        return Node("quantity", (total, Unit(dimension=unit.dimension)))

    def money(self, sign: str) -> Node:
        value = self.deeper(self.factor)
        if self.kind in ("text", "word"):
            unit, end = self.unit_ahead()
            if unit is not None and unit.scale != 1:  # a scale belongs to the number: $2 million
                value, self.at = Node("multiply", (value, number(unit.scale))), end
        return Node("quantity", (value, parse_unit(f" {sign}")))

    def primary(self) -> Node:
        token = self.next()
        if token.text in OPEN and token.kind != "text":
            return self.deeper(lambda: self.listing(OPEN[token.text]))
        if token.text in ("{", "|"):
            return self.deeper(self.group if token.text == "{" else self.absolute)
        if token.text in _CURRENCIES:
            return self.money(token.text[-1])
        readers = {
            "number": self.number, "based": based, "letter": self.symbol, "word": self.symbol,
            "text": self.symbol, "function": self.function, "command": self.command,
        }  # fmt: skip
        if token.kind not in readers:
            raise UnreadableError
        return readers[token.kind](token.text)

    def number(self, text: str) -> Node:
        digits = text.replace(",", "")
        if "." in digits and self.found("\\overline"):
            return recurring(digits, self.name())
        if self.found("\\ldots"):
            match = _RECURRING.fullmatch(digits)
            return recurring(digits, match[1] if match else "")
        return number(Fraction(digits.removesuffix(".")))

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
        constant = _NAMED.get(name if len(name) == 1 else name.lower())
        if constant and self.here != "_":
            return Node("constant", (constant,))
        while self.found("'"):
            name += "'"
        if self.found("_"):
            name += "_" + self.name()
        return self.applied(Node("symbol", (name,)))

    def applied(self, symbol: Node) -> Node:
        """A function that has no definition here: f(…), g(x), I(0). But h(a+b) is a product."""
        after = [token for token in self.tokens[self.at : self.at + 3] if token.kind != "end"]
        if self.here != "(" or len(after) < 3:
            return symbol
        letter = symbol.args[0][0]
        simple = after[1].kind == "letter" and after[2].text in (")", "(", ",")
        number_alone = after[1].kind == "number" and after[2].text == ")"
        if not (letter in "fF" or (letter in "ghGHP\\" and simple) or number_alone):
            return symbol
        inner = self.deeper(self.primary)
        items = inner.args[2] if inner.kind == "sequence" else (inner,)
        return Node("apply", (symbol, *items))

    def function(self, name: str) -> Node:
        base = power = None
        for _ in range(2):  # subscript and superscript, in either order
            if name == "log" and self.found("_"):
                base = self.argument()
            elif self.found("^"):
                power = self.deeper(self.exponent)
        self.functions += 1
        arguments = self.deeper(self.arguments)
        self.functions -= 1
        items = arguments.args[2] if arguments.kind == "sequence" else (arguments,)
        if power == signed("-", number(1)):
            name, power = f"arc{name}", None
        node = Node("call", (name, *((base,) if base else ()), *items))
        return Node("power", (node, power)) if power else node

    def arguments(self) -> Node:
        """The argument of a function: a group, or the factors that follow it."""
        if self.here in OPEN or self.here == "{":
            return self.primary()
        factors = [self.factor()]
        while self.begins_factor() and self.kind != "function" and self.here not in OPEN:
            factors.append(self.power())
        return quotient(factors, [])

    def command(self, text: str) -> Node:
        name = text[1:]
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in ("frac", "binom"):
            start = self.at
            pair = self.argument(), self.argument()
            source = self.source(start, self.at).replace(" ", "")
            if _DERIVATIVE.fullmatch(source):
                return Node("symbol", (source,))
            return Node("divide", pair) if name == "frac" else Node("call", ("binomial", *pair))
        if name in ("sqrt", "surd", "begin"):
            return self.deeper(self.matrix if name == "begin" else self.root)
        if name in _ROUNDED:
            inner = self.deeper(self.sum)
            self.take(f"\\r{name[1:]}")
            return Node("call", (_ROUNDED[name], inner))
        if name in UNKNOWN:
            raise UnreadableError
        return self.accented(name) if name in ACCENTS | OF_LETTERS else self.symbol(text)

    def accented(self, name: str) -> Node:
        """A symbol with a mark over it, or what is named by letters: an angle."""
        if name in OF_LETTERS:
            while self.kind in ("letter", "word"):
                name += " " + self.next().text
            return Node("symbol", (name,))
        named = self.here != "{" or _ONE_NAME.match(self.text, self.tokens[self.at].start)
        if not named and (name in WEIGHTS or name == "overline"):
            inner = self.argument()
            return inner if name in WEIGHTS else Node("call", ("conj", inner))
        letter = self.name()
        if (name, letter) == ("mathbb", "R"):
            return Node("reals")
        return self.symbol(f"{'vec' if name in WEIGHTS else name}:{letter}")

    def root(self) -> Node:
        index = number(2)
        if self.found("["):
            index = self.deeper(self.sum)
            self.take("]")
        return Node("call", ("root", index, self.argument()))

    def matrix(self) -> Node:
        environment = self.name()
        if environment not in MATRICES:
            raise UnreadableError
        if environment == "array":
            self.name()
        rows: list[list[Node]] = [[]]
        while True:
            rows[-1].append(self.chain())
            if not self.found("&") and self.found("\\\\"):
                rows.append([])
            if self.found("\\end"):
                break
        rows = [row for row in rows if row]
        self.name()
        if all(len(row) == 1 and row[0].kind == "chain" for row in rows):  # a system of equations
            return Node("sequence", ("", "", tuple(row[0] for row in rows), "and"))
        if environment == "vmatrix":
            return determinant(rows)
        return Node("matrix", tuple(map(tuple, rows)))
