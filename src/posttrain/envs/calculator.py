"""A calculator as a tool: arithmetic of any model, computed exactly, never executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_LENGTH = 200  # characters of an expression; bounds the depth of its tree
MAX_BITS = 4096  # of a number on the way
DIGITS = 10  # significant ones of a result that is no whole number

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_TYPOGRAPHIC = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "[": "(", "]": ")", "$": " "})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Calculator:
    """One tool, ``calculate``; the recipe's rewards score the last turn, which calls it no more.

    >>> Calculator().calculate("3 * (1,200 - 50.5) / 7")
    '492.6428571'
    """

    scores = False

    def reset(self) -> None:
        """Nothing is remembered."""

    def calculate(self, expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, such as "(3 + 4.5) * 2".

        Returns:
            The value.
        """
        return written(evaluated(expression))


def evaluated(expression: str) -> Fraction:
    """The exact value of an expression; a ``ValueError`` says what is wrong with it.

    >>> evaluated("2 ** 10 / 3")
    Fraction(1024, 3)
    """
    text = _THOUSANDS.sub("", expression.translate(_TYPOGRAPHIC)).replace("^", "**").strip()
    if len(text) > MAX_LENGTH:
        raise ValueError(f"more than {MAX_LENGTH} characters")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no arithmetic expression: write numbers, + - * / ** and ()") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if node.value == float("inf"):
            raise ValueError("too large")
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right))))
    raise ValueError(f"{type(node).__name__} is not arithmetic: write numbers, + - * / ** and ()")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent that is not a whole number")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent.numerator) * size > MAX_BITS:
        raise ValueError("too large")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("too large")
    return value


def written(value: Fraction) -> str:
    """A number in decimals: whole ones in full, others by their first digits.

    >>> written(Fraction(1, 8)), written(Fraction(10**20)), written(Fraction(-1, 3))
    ('0.125', '100000000000000000000', '-0.3333333333')
    """
    if value.denominator == 1:
        return str(value.numerator)
    try:
        near = float(value)
    except OverflowError:
        raise ValueError("too large") from None
    if not near:
        raise ValueError("too close to 0")
    return f"{near:.{DIGITS}g}"
