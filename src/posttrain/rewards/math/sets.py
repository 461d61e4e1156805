"""Sets of real numbers: intervals, finite sets, inequalities, their unions and differences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from posttrain.rewards.math.evaluator import Evaluator, UndefinedError, approximate, close
from posttrain.rewards.math.nodes import FLIPPED, Node

# An interval: its ends, and whether it holds them. A point is an interval with the same end twice.
Interval = tuple[Any, bool, Any, bool]
_INFINITY = float("inf")
_ALL: list[Interval] = [(-_INFINITY, False, _INFINITY, False)]


def same_set(one: Node, two: Node) -> bool:
    """Whether both are sets of real numbers, and the same.

    >>> from posttrain.rewards.math.parser import parse
    >>> same_set(parse("x > 2"), parse(r"(2, \\infty)")), same_set(parse("x > 2"), parse("x < 2"))
    (True, False)
    """
    try:
        left, right = _united(_intervals(one)), _united(_intervals(two))
    except UndefinedError:
        return False
    return len(left) == len(right) and all(
        a[1] == b[1] and a[3] == b[3] and close(a[0], b[0]) and close(a[2], b[2])
        for a, b in zip(left, right, strict=True)
    )


def _intervals(node: Node) -> list[Interval]:
    if node.kind == "reals":
        return _ALL
    if node.kind == "chain":
        return _of_relations(node)
    if node.kind == "sequence":
        return _of_sequence(node)
    if node.kind in ("union", "intersection", "difference"):
        one, two = map(_intervals, node.args)
        if node.kind == "union":
            return one + two
        return _common(one, _complement(two) if node.kind == "difference" else two)
    raise UndefinedError


def _of_sequence(node: Node) -> list[Interval]:
    opened, closed, items, join = node.args
    if opened == "{":
        return [(end, True, end, True) for end in map(_number, items)]
    if opened:
        if len(items) != 2:
            raise UndefinedError
        low, high = map(_number, items)
        if low >= high:  # (3, 1) is a pair of numbers, no interval
            raise UndefinedError
        return [(low, opened == "[", high, closed == "]")]
    parts = [_intervals(item) for item in items]
    if len({name for item in items for name in item.symbols}) != 1:
        raise UndefinedError
    both = functools.reduce(_common, parts)
    return [i for part in parts for i in part] if join == "or" or not _united(both) else both


def _of_relations(node: Node) -> list[Interval]:
    """``a < x <= b``, ``x >= a``, ``x != a`` and ``x in`` a set."""
    sides, relations, _ = node.args
    if relations == ("in",) and sides[0].kind == "symbol":
        return _intervals(sides[1])
    found = _ALL
    for left, relation, right in zip(sides, relations, sides[1:], strict=False):
        if relation not in FLIPPED:
            raise UndefinedError
        if left.kind == "symbol":
            found = _common(found, _half(relation, _number(right)))
        elif right.kind == "symbol":
            found = _common(found, _half(FLIPPED[relation], _number(left)))
        else:
            raise UndefinedError
    if len(node.symbols) != 1:
        raise UndefinedError
    return found


def _half(relation: str, end: Any) -> list[Interval]:
    if relation == "=":
        return [(end, True, end, True)]
    equal = relation in ("<=", ">=")
    below: Interval = (-_INFINITY, False, end, equal)
    above: Interval = (end, equal, _INFINITY, False)
    return [interval for sign, interval in (("<!", below), (">!", above)) if relation[0] in sign]


def _number(node: Node) -> Any:
    if node.symbols or node.kinds & {"plus_minus", "minus_plus"}:
        raise UndefinedError
    return approximate(Evaluator(real=True).value(node))


def _complement(intervals: list[Interval]) -> list[Interval]:
    found = _ALL
    for low, has_low, high, has_high in intervals:
        outside = _half("<" if has_low else "<=", low) + _half(">" if has_high else ">=", high)
        found = _common(found, outside)
    return found


def _common(one: list[Interval], two: list[Interval]) -> list[Interval]:
    pairs = [
        (*_inner(a[:2], b[:2], larger=True), *_inner(a[2:], b[2:], larger=False))
        for a in _united(one)
        for b in _united(two)
    ]
    return _united(pairs)


def _inner(a: Any, b: Any, *, larger: bool) -> Any:
    """The end that lies further inside; where both are equal, it is closed if both are closed."""
    if close(a[0], b[0]):
        return a[0], a[1] and b[1]
    choose: Callable[..., Any] = max if larger else min
    return choose(a, b, key=lambda end: end[0])


def _united(intervals: list[Interval]) -> list[Interval]:
    """The union as sorted intervals: empty ones are dropped, those that touch are joined."""
    kept: list[Interval] = []
    whole = [i for i in intervals if i[0] < i[2] or (i[1] and i[3] and close(i[0], i[2]))]
    for low, has_low, high, has_high in sorted(whole, key=lambda i: (i[0], not i[1])):
        if kept:
            last = kept[-1]
            touches = close(last[2], low) and (last[3] or has_low)
            if low < last[2] or touches:
                end = max((last[2], last[3]), (high, has_high))
                kept[-1] = (last[0], last[1] or (has_low and close(last[0], low)), *end)
                continue
        kept.append((low, has_low, high, has_high))
    return kept
