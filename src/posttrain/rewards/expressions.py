"""Arithmetic written by a model: parsed and computed exactly, never executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_EXPRESSION_LENGTH = 200  # characters; bounds the depth of the tree and the size of the numbers

# Spaces, digits, + - * / and parentheses only: no names, calls, strings or floats.
_ALPHABET = re.compile(r"[ 0-9+\-*/()]+")
_TYPOGRAPHIC = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "[": "(", "]": ")"})
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the whole numbers it uses; None where it has none.

    Powers, integer division and everything but ``+ - * /`` and parentheses over whole numbers are
    refused, and so is division by zero.

    >>> evaluate("(7 - 3) * 6 / 4")
    (Fraction(6, 1), [7, 3, 6, 4])
    >>> evaluate("2 ** 9") is None, evaluate("1 / (2 - 2)") is None
    (True, True)
    """
    text = text.strip().translate(_TYPOGRAPHIC)
    if len(text) > MAX_EXPRESSION_LENGTH or not _ALPHABET.fullmatch(text):
        return None
    used: list[int] = []
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None  # the parser raises MemoryError for brackets nested too deeply
    return value, used


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError(f"{type(node).__name__} is not allowed in an expression")
