"""Whether two answers that were read are the same mathematics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from posttrain.rewards.math.evaluator import Evaluator, TooMuchError, UndefinedError, close, points
from posttrain.rewards.math.nodes import (
    FLIPPED,
    Node,
    divides_by_symbols,
    number,
    quotient,
    with_items,
)
from posttrain.rewards.math.sets import same_set

MIN_POINTS = 2  # points at which both expressions must have a value
ROUGH = 0.01  # relative tolerance where an answer says "approximately"

# Names that an answer may be given to: x, x_1, f(x), P(A), \theta, AB, Area, (x, y).
_NAME = re.compile(
    r"(?:[a-zA-Z]|\\[a-zA-Z]+|[A-Z]{2,4}|\\text\{[^{}]*\}|[a-zA-Z ]{4,}|m?\s?\\angle\s?[A-Z]{1,3}"
    r"|\|\s?[A-Z]{2}\s?\||\\overline\{[A-Z]{2}\}|\\(?:vec|mathbf|overrightarrow)\s?\{[^{}]*\})"
    r"(?:_(?:\{[^{}]*\}|.))?'*(?:\^\{-1\})?(?:\s?\(\s?[a-zA-Z0-9]+(?:\s?,\s?[a-zA-Z0-9]+)*\s?\))?"
    r"|\(\s?\\?[a-zA-Z]+(?:_\{?[0-9]\}?)?(?:\s?,\s?\\?[a-zA-Z]+(?:_\{?[0-9]\}?)?)+\s?\)"
)


def same(expected: Node, given: Node, *, tolerance: float = 0.0) -> bool:
    """Whether an answer is the expected one. More work than an answer deserves is a wrong answer.

    >>> from posttrain.rewards.math.parser import parse
    >>> same(parse("(x+1)^2"), parse("x^2+2x+1")), same(parse("5 m"), parse("5 km"))
    (True, False)
    """
    try:
        return _Comparison(tolerance).same(*_without_braces(expected, given))
    except TooMuchError:
        return False


@dataclass
class _Comparison:
    tolerance: float
    operations: list[int] = field(default_factory=lambda: [0])
    values: dict[Any, Any] = field(default_factory=dict)

    def same(self, one: Node, two: Node) -> bool:
        if one == two:
            return True
        one, two = _expanded(one), _expanded(two)
        rules = (
            ("chain", self.chains),
            ("quantity", self.quantities),
            ("matrix", self.matrices),
            ("union", self.sets),
            ("intersection", same_set),
            ("difference", same_set),
            ("reals", same_set),
            ("sequence", self.lists),
            ("based", _same_digits),
        )
        kinds = (one.kind, two.kind)
        return next((rule for kind, rule in rules if kind in kinds), self.expressions)(one, two)

    # ------------------------------------------------------------------ quantities

    def quantities(self, one: Node, two: Node) -> bool:
        """A unit may be left out on either side, but not be another, unless it is converted."""
        if one.kind == two.kind:
            (value, unit), (other, other_unit) = one.args, two.args
            if not unit.agrees(other_unit):
                return False
            if unit.factor == other_unit.factor:
                return self.same(value, other)
            return self.same(_times(value, unit.factor), _times(other, other_unit.factor))
        quantity, plain = (one, two) if one.kind == "quantity" else (two, one)
        value, unit = quantity.args
        if self.same(*((value, plain) if quantity is one else (plain, value))):
            return True
        return unit.is_percent and self.same(_times(value, Fraction(1, 100)), plain)

    # ------------------------------------------------------------------ lists, sets, matrices

    def lists(self, one: Node, two: Node) -> bool:
        """Lists as they are, or inequalities as an interval: x > 1 and x < 2."""
        may_be_set = bool(one.symbols) != bool(two.symbols)
        return self.sequences(one, two) or (may_be_set and same_set(one, two))

    def sequences(self, one: Node, two: Node) -> bool:
        """In brackets order counts, and in braces or in none it does not."""
        if one.kind != two.kind:
            return False
        opened, closed, items, _ = one.args
        other_opened, other_closed, others, _ = two.args
        items, others = _equations(items), _equations(others)
        kinds = {opened, other_opened}
        if {one.args[3], two.args[3]} == {"or", "both"}:
            return False
        if kinds == {"{"}:  # a set holds an element once
            return self.within(items, others) and self.within(others, items)
        choice = "or" in (one.args[3], two.args[3]) and "(" in kinds
        bare = "" in kinds and "[" not in kinds and not choice
        alike = bare or (opened, closed) == (other_opened, other_closed)
        if len(items) != len(others) or not alike:
            return False
        if _names(items) != _names(others):
            items, others = _by_name(items), _by_name(others)
        # Named items have an order: x = 1, y = 2 is 1, 2 and not 2, 1.
        named_apart = len(_names(items) ^ _names(others)) > 1
        if "(" in kinds or "[" in kinds or named_apart:
            return all(map(self.same, items, others))
        return self.unordered(items, others)

    def within(self, items: Sequence[Node], others: Sequence[Node]) -> bool:
        return all(any(self.same(item, other) for other in others) for item in items)

    def unordered(self, items: Sequence[Node], others: Sequence[Node]) -> bool:
        """Whether each has a partner of its own on the other side."""
        left = list(others)
        for item in items:
            partner = next((other for other in left if self.same(item, other)), None)
            if partner is None:
                return False
            left.remove(partner)
        return not left

    def matrices(self, one: Node, two: Node) -> bool:
        """Entry by entry; a single column is also written as a tuple."""
        one, two = (_as_column(node) for node in (one, two))
        if one.kind != two.kind:
            return False
        shapes = [[len(row) for row in matrix.args] for matrix in (one, two)]
        entries = [[entry for row in matrix.args for entry in row] for matrix in (one, two)]
        return shapes[0] == shapes[1] and all(map(self.same, *entries))

    def sets(self, one: Node, two: Node) -> bool:
        if one.kind == two.kind == "union":
            parts, others = _parts(one), _parts(two)
            if len(parts) == len(others) and self.unordered(parts, others):
                return True
        return same_set(one, two)

    # ------------------------------------------------------------------ relations

    def named(self, one: Node, two: Node) -> bool:
        """``x = 5`` answers 5, and so does ``2 + 3 = 5``; ``x > 5`` is an interval."""
        chain, other = (one, two) if one.kind == "chain" else (two, one)
        sides, relations, _ = chain.args
        ratio = Node("divide", sides) if relations == (":",) else None  # a ratio is a quotient: 3:5
        value = ratio or self.assigned(chain)
        if value is None:
            return same_set(one, two)
        if relations[-1] == "in":
            value, other = _without_braces(value, other)
        return self.same(value, other) if chain is one else self.same(other, value)

    def assigned(self, chain: Node) -> Node | None:
        """The common value of the sides of a chain, apart from a name; None where they differ."""
        sides, relations, sources = chain.args
        if not set(relations) <= {"=", "≈", "in"}:
            return None
        named = [_is_name(*pair) for pair in zip(sides, sources, strict=True)]
        start = int(named[0])
        exact = relations.index("≈", start) + 1 if "≈" in relations[start:] else len(sides)
        rest = sides[start:exact] if start or not named[-1] else sides[:-1]
        last = rest[-1]
        about = all(
            _Comparison(ROUGH).expressions(Node("divide", (side, last)), number(1))
            for side in sides[exact:]
        )
        return last if about and all(self.same(side, last) for side in rest[:-1]) else None

    def chains(self, one: Node, two: Node) -> bool:
        if one.kind != two.kind:
            return self.named(one, two)
        sides, relations, _ = one.args
        two = _with_same_argument(one, two)
        if one.symbols != two.symbols:
            return False
        others, other_relations, _ = two.args
        if set(relations) == set(other_relations) == {":"}:
            return self.ratios(sides, others)
        if len(sides) == len(others) == 2 and self.relations(one, two):
            return True
        turned = tuple(FLIPPED.get(relation, relation) for relation in relations[::-1])
        for way, found in ((sides, relations), (sides[::-1], turned)):
            if found == other_relations and len(sides) > 2 and all(map(self.same, way, others)):
                return True
        return bool(one.symbols) and same_set(one, two)

    def ratios(self, sides: Sequence[Node], others: Sequence[Node]) -> bool:
        return len(sides) == len(others) and all(
            self.same(Node("multiply", (side, others[0])), Node("multiply", (other, sides[0])))
            for side, other in zip(sides, others, strict=True)
        )

    def relations(self, one: Node, two: Node) -> bool:
        """Whether the differences of the sides are in a constant ratio, of the right sign."""
        (sides, (relation,), _), (others, (other_relation,), _) = one.args, two.args
        if relation == other_relation and all(map(self.same, sides, others)):
            return True
        if relation not in FLIPPED:
            return False
        differences = [Node("add", (a, Node("negate", (b,)))) for a, b in (sides, others)]
        places = points(one.symbols)
        ratios = [self.ratio(differences, place) for place in places]
        solved = _solved(one) or _solved(two)
        # The sides may differ by a factor without y: y = 1/x is xy = 1.
        if solved and relation == other_relation == "=":
            moved = [{**place, solved: place[solved] + Fraction(1, 3)} for place in places]
            pairs = zip(ratios, (self.ratio(differences, place) for place in moved), strict=True)
            kept = [(a, b) for a, b in pairs if a is not None and b is not None]
            return len(kept) >= MIN_POINTS and all(a != 0 and close(a, b) for a, b in kept)
        ratios = [ratio for ratio in ratios if ratio is not None]
        if len(ratios) < MIN_POINTS or any(not close(ratio, ratios[0]) for ratio in ratios):
            return False
        if ratios[0] == 0 or relation in ("=", "!="):
            return ratios[0] != 0 and relation == other_relation
        return other_relation == (relation if ratios[0] > 0 else FLIPPED[relation])

    def ratio(self, differences: Sequence[Node], place: Mapping[str, Fraction]) -> Any:
        ratio = quotient(differences[:1], differences[1:])
        return _value(Evaluator(place, operations=self.operations), ratio)

    # ------------------------------------------------------------------ expressions

    def expressions(self, one: Node, two: Node) -> bool:
        """Whether both have the same value; a number is never the same as one with symbols."""
        if bool(one.symbols) != bool(two.symbols):
            return False
        bases = (0, 10) if "log" in one.kinds | two.kinds else (0,)
        return any(self.same_value(one, two, log_base=base) for base in bases)

    def same_value(self, one: Node, two: Node, *, log_base: int) -> bool:
        symbols = one.symbols | two.symbols
        places = points(symbols) if symbols else [{}]
        # In real numbers first: points where a side is not real do not count, so ln x² is 2 ln x.
        # In complex numbers only where too few points are left, as for expressions in i.
        for real in (True, False) if symbols else (False,):
            verdicts = []
            for number_of_point, place in enumerate(places):
                evaluator = Evaluator(place, real, log_base, self.operations)
                keys = (number_of_point, real, log_base, tuple(place))
                values = [self.value(evaluator, (node, *keys)) for node in (one, two)]
                if None in values:
                    continue
                tolerance = 0.0 if symbols else self.tolerance
                if not close(values[0], values[1], tolerance=tolerance):
                    return False
                # A value of 0 in symbols says little: many expressions vanish.
                verdicts += [True] if not symbols or values[0] != 0 else []
            if len(verdicts) >= min(MIN_POINTS, len(places)):
                return True
        return False

    def value(self, evaluator: Evaluator, key: tuple[Any, ...]) -> Any:
        """The value of the node that a key begins with, computed once."""
        if key not in self.values:
            self.values[key] = _value(evaluator, key[0])
        return self.values[key]


def _value(evaluator: Evaluator, node: Node) -> Any:
    try:
        return evaluator.value(node)
    except UndefinedError:
        return None


def _expanded(node: Node) -> Node:
    """``a ± b`` as the list of both, also where it stands in a list."""
    if node.kind == "sequence" and node.args[0] in ("", "{"):
        inner = [_expanded(item) for item in node.args[2]]
        lists = [i.args[2] if i.kind == "sequence" and not i.args[0] else (i,) for i in inner]
        return with_items(node, [part for parts in lists for part in parts])
    matrices = [part for part in node.args if isinstance(part, Node) and part.kind == "matrix"]
    if node.kind == "multiply" and len(matrices) == 1:  # a factor before a matrix
        rest = quotient([part for part in node.args if part is not matrices[0]], ())
        rows = (tuple(quotient((rest, entry), ()) for entry in row) for row in matrices[0].args)
        return Node("matrix", tuple(rows))
    whole = node.kind in ("quantity", "signed", "matrix") or node.args[:1] == ("[",)
    if whole or not node.kinds & {"plus_minus", "minus_plus"} or "signed" in node.kinds:
        return node
    both = tuple(_with_sign(node, sign) for sign in (1, -1))
    return Node("sequence", ("", "", both, "and"))


def _with_sign(node: Node, sign: int) -> Node:
    if node.kind == "chain":
        sides, *rest = node.args
        return Node("chain", (tuple(_with_sign(side, sign) for side in sides), *rest))
    if node.kind == "sequence":
        return with_items(node, (_with_sign(item, sign) for item in node.args[2]))
    return Node("signed", (sign, node))


def _is_name(side: Node, source: str) -> bool:
    """Whether a side says only what is asked for: x, f(2), m+n, |z|, but not 2x or x^2."""
    if _NAME.fullmatch(source):
        return True
    plain = bool(side.symbols) and not side.kinds & {"number", "negate", "chain", "sequence"}
    return plain and (side.kind == "call" or len(side.symbols) > 1)


def _without_braces(one: Node, two: Node) -> tuple[Node, Node]:
    """The element of a one-element set, where the other side is written without braces."""
    lists = [node for node in (one, two) if node.kind == "sequence"]
    if len(lists) != 1 or lists[0].args[0] != "{" or len(lists[0].args[2]) != 1:
        return one, two
    (element,) = lists[0].args[2]
    return (element, two) if lists[0] is one else (one, element)


def _equations(items: Sequence[Node]) -> Sequence[Node]:
    """``x = 1, 2`` and ``x_1 = 1, x_2 = 2`` as ``x = 1, x = 2``."""
    names = {re.sub(r"_\{?[0-9]\}?$", "", name) for name in _names(items)}
    if len(names) != 1 or any(i.kind == "chain" and i.args[1] != ("=",) for i in items):
        return items
    (name,) = names
    if not name.isalpha() or items[0].kind != "chain":
        return items
    values = [item.args[0][1] if item.kind == "chain" else item for item in items]
    symbol = Node("symbol", (name,))
    return [Node("chain", ((symbol, value), ("=",), (name, ""))) for value in values]


def _by_name(items: Sequence[Node]) -> Sequence[Node]:
    """Equations in the order of their names, where all are named."""
    named = len(_names(items)) == len(items) and all(item.kind == "chain" for item in items)
    return sorted(items, key=lambda item: item.args[2][0]) if named else items


def _names(items: Sequence[Node]) -> set[str]:
    """The names on the left sides of items that are equations."""
    return {item.args[2][0] for item in items if item.kind == "chain"}


def _with_same_argument(one: Node, two: Node) -> Node:
    """Where f(x) and f(t) are defined, the second in the letter of the first."""
    heads = [node.args[0][0] for node in (one, two)]
    if all(head.kind == "apply" and len(head.symbols) == 2 for head in heads):
        letters = [next(iter(head.args[1].symbols), "") for head in heads]
        bound = all(a in n.args[0][1].symbols for a, n in zip(letters, (one, two), strict=True))
        if bound and letters[0] not in two.symbols:
            two = _renamed(two, {letters[1]: letters[0]})
    return two


def _renamed(part: Any, names: Mapping[str, str]) -> Any:
    if isinstance(part, tuple):
        return tuple(_renamed(inner, names) for inner in part)
    if not isinstance(part, Node):
        return part
    if part.kind == "symbol":
        return Node("symbol", (names.get(part.args[0], part.args[0]),))
    return Node(part.kind, _renamed(part.args, names))


def _parts(node: Node) -> list[Node]:
    return [p for arg in node.args for p in _parts(arg)] if node.kind == "union" else [node]


def _as_column(node: Node) -> Node:
    if node.kind == "sequence" and node.args[:2] == ("(", ")"):
        return Node("matrix", tuple((item,) for item in node.args[2]))
    return node


def _solved(chain: Node) -> str:
    """The symbol that an equation is solved for by a division; empty where it is for none."""
    left, right = chain.args[0]
    alone = left.kind == "symbol" and left.args[0] not in right.symbols
    return str(left.args[0]) if alone and divides_by_symbols(right) else ""


def _times(node: Node, factor: Fraction) -> Node:
    return Node("multiply", (node, number(factor)))


def _same_digits(one: Node, two: Node) -> bool:
    if one.kind == two.kind:
        return one.args[:2] == two.args[:2]
    based, plain = (one, two) if one.kind == "based" else (two, one)
    return plain.kind == "number" and str(plain.args[0]) == based.args[2]
