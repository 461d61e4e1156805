"""The tree that an answer is parsed to, and how its parts are made."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
SIGNS = {"+": "plus", "-": "negate", "\\pm": "plus_minus", "\\mp": "minus_plus"}


class UnreadableError(Exception):
    """The text is no mathematics that the parser knows, or more of it than it takes."""


@dataclass(frozen=True)
class Node:
    """A part of an answer: what it is, and of what it is made.

    ================================  ==========================================================
    kind                              args
    ================================  ==========================================================
    number                            a Fraction
    based                             value, base, digits as written
    symbol, constant                  its name (of a constant: pi, e, i or inf)
    negate, plus_minus, minus_plus    one node
    signed                            1 or -1 for every ± inside, node
    add, multiply                     two nodes or more
    divide, power, modulo             two nodes
    call                              name of the function, argument nodes
    apply                             symbol of an unknown function, argument nodes
    quantity                          value, Unit
    chain                             sides, relations between them, each side as written
    sequence                          opening and closing bracket, items, "and", "both" or "or"
    matrix                            a tuple of nodes for each row
    union, intersection, difference   two sets
    reals                             nothing
    ================================  ==========================================================
    """

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


def number(value: Fraction | int) -> Node:
    """A number as a part of an answer."""
    return Node("number", (Fraction(value),))


def recurring(digits: str, repeated: str) -> Node:
    """A decimal whose last digits go on for ever: ``0.1`` with ``6`` repeated is 1/6."""
    if not repeated.isdigit():
        raise UnreadableError
    places = len(digits) - digits.index(".") - 1
    rest = Fraction(int(repeated), 10**places * (10 ** len(repeated) - 1))
    return number(Fraction(digits.removesuffix(".") or "0") + rest)


def signed(sign: str, node: Node) -> Node:
    """A part with a sign before it."""
    if sign == "+":
        return node
    if node.kind == "quantity":
        return Node("quantity", (signed(sign, node.args[0]), node.args[1]))
    return Node(SIGNS[sign], (node,))


def quotient(above: Sequence[Node], below: Sequence[Node]) -> Node:
    """The product of the first over the product of the others."""
    if below:
        return Node("divide", (quotient(above, ()), quotient(below, ())))
    return above[0] if len(above) == 1 else Node("multiply", tuple(above))


def with_items(node: Node, items: Iterable[Node]) -> Node:
    """A sequence in the same brackets, of other items."""
    opened, closed, _, join = node.args
    return Node("sequence", (opened, closed, tuple(items), join))


def is_proper(node: Node) -> bool:
    """Whether it is a fraction of whole numbers between 0 and 1."""
    if node.kind != "divide" or any(part.kind != "number" for part in node.args):
        return False
    above, below = (part.args[0] for part in node.args)
    return above.denominator == below.denominator == 1 and 0 < above < below


def condition(node: Node) -> Node | None:
    """What a set's ``x : x > 2`` says after the colon; None where there is none."""
    if node.kind != "chain" or ":" not in node.args[1][:-1]:
        return None
    place = node.args[1].index(":") + 1
    return Node("chain", tuple(part[place:] for part in node.args))


def divides_by_symbols(node: Node) -> bool:
    """Whether there is a symbol below a bar in it."""
    here = node.kind == "divide" and bool(node.args[1].symbols)
    return here or any(map(divides_by_symbols, node.nodes))


def determinant(rows: Sequence[Sequence[Node]]) -> Node:
    """The determinant of a small matrix, by its first row."""
    if len(rows) > 4 or any(len(row) != len(rows) for row in rows):
        raise UnreadableError
    if len(rows) == 1:
        return rows[0][0]
    terms = []
    for place, entry in enumerate(rows[0]):
        minor = determinant([[*row[:place], *row[place + 1 :]] for row in rows[1:]])
        terms.append(signed("-+"[place % 2 == 0], Node("multiply", (entry, minor))))
    return functools.reduce(lambda one, two: Node("add", (one, two)), terms)


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [one for arg in args for one in (_flat(arg) if isinstance(arg, tuple) else [arg])]
