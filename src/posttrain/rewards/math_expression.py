r"""Mathematical expressions, parsed by math-verify's LaTeX parser and compared by value.

Two expressions are compared by what they evaluate to: numbers to a dozen digits, expressions in
symbols at a few generic points. That takes microseconds where simplifying may take for ever. Only
relations, unions and functions without a value are left to math-verify's own comparison.
"""

from __future__ import annotations

import functools
import logging
import math
from fractions import Fraction
from typing import Any

from posttrain.rewards.math_text import refused

DIGITS = 30  # that values are computed with
AGREE = 1e-12  # relative: what counts as the same value
NOTHING = 1e-25  # what counts as 0, where 0 is the other value and neither is a plain number
MAX_NODES = 400
MAX_LOG10 = 10_000.0  # numbers of more digits are not computed
MAX_SYMBOLIC_POWER = 60  # of a sum in symbols
MAX_FACTORIAL = 1000

# Values for symbols, taken in alphabetical order: of both signs, and no one's favourite number.
_POINTS = (
    (0.7345, 1.2871, 2.1379, 0.3917, 1.8113, 0.5573),
    (-1.1973, 0.6141, -0.8297, 1.4339, -2.2171, 0.9187),
    (2.6417, -1.7129, 0.4463, -0.5851, 0.2939, -1.3219),
)

Expression = Any  # of sympy, which has no types


@functools.lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression | None:
    r"""The expression that a cleaned text is; None where it is none, or too large to compute with.

    >>> parse_expression(r"\frac{\sqrt{12}}{2}"), parse_expression("9^{9^{9}}")
    (sqrt(12)/2, None)
    """
    if refused(text):
        return None
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # Its parse() is not used: it looks for an answer in prose, with regular expressions of more
    # than linear time, and hands arithmetic to sympy's parse_expr, which evaluates it as Python.
    config = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        latex = normalize_latex(text, config)
        parsed = latex2sympy(
            latex, is_real=not should_treat_as_complex(latex), normalization_config=None
        )
    except Exception:  # noqa: BLE001 - it raises plain Exceptions for what it cannot read
        return None
    is_expression = isinstance(parsed, sympy.Basic | sympy.MatrixBase)
    return parsed if is_expression and _is_bounded(parsed) else None


def number_expression(value: Fraction) -> Expression:
    """A plain number as an expression.

    >>> number_expression(Fraction(1, 3))
    1/3
    """
    import sympy

    return sympy.Rational(value.numerator, value.denominator)


def equivalent(expected: Expression, given: Expression, *, tolerance: float) -> bool:
    r"""Whether two expressions are the same: in value, or element by element.

    >>> one = parse_expression(r"\frac{2}{\sqrt{2}}")
    >>> equivalent(one, parse_expression(r"\sqrt{2}"), tolerance=0.0)
    True
    """
    import sympy

    same = functools.partial(equivalent, tolerance=tolerance)
    if isinstance(expected, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase):
        return expected.shape == given.shape and all(map(same, expected.flat(), given.flat()))
    if isinstance(expected, sympy.Tuple) and isinstance(given, sympy.Tuple):
        return len(expected) == len(given) and all(map(same, expected, given))
    if isinstance(expected, sympy.FiniteSet) and isinstance(given, sympy.FiniteSet):
        return _same_elements(list(expected), list(given), tolerance=tolerance)
    if isinstance(expected, sympy.Interval) and isinstance(given, sympy.Interval):
        ends = (expected.left_open, expected.right_open) == (given.left_open, given.right_open)
        return ends and same(expected.start, given.start) and same(expected.end, given.end)
    if isinstance(expected, sympy.Expr) and isinstance(given, sympy.Expr):
        verdict = _same_value(expected, given, tolerance=tolerance)
        if verdict is not None:
            return verdict
    return _verify(expected, given)


def _same_elements(expected: list[Any], given: list[Any], *, tolerance: float) -> bool:
    """Whether each element has a partner of its own on the other side."""
    if len(expected) != len(given):
        return False
    left = list(given)
    for element in expected:
        partner = next((e for e in left if equivalent(element, e, tolerance=tolerance)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _same_value(expected: Any, given: Any, *, tolerance: float) -> bool | None:
    """Whether two expressions have the same value wherever they are looked at; None if unknown."""
    if expected == given:
        return True
    symbols = sorted(expected.free_symbols | given.free_symbols, key=str)
    if len(symbols) > len(_POINTS[0]):
        return None
    known = False
    for point in _POINTS if symbols else _POINTS[:1]:
        values = dict(zip(symbols, point, strict=False))
        one, two = (_evaluate(expression, values) for expression in (expected, given))
        if one is None or two is None:
            continue
        known = True
        if not _close(one, two, tolerance=0.0 if symbols else tolerance):
            return False
    return True if known else None


def _evaluate(expression: Any, values: dict[Any, float]) -> Any:
    """The value of an expression as a sympy number; None where it has no finite one."""
    import sympy

    try:
        value = expression.evalf(DIGITS, subs=values) if values else expression.evalf(DIGITS)
        real, imaginary = sympy.sympify(value, strict=True).as_real_imag()
    except Exception:  # noqa: BLE001 - sympy raises anything for a matrix in a sine, or a sine of ∞
        return None
    finite = all(part.is_Float or part.is_Integer for part in (real, imaginary))
    return real + imaginary * sympy.I if finite else None


def _close(one: Any, two: Any, *, tolerance: float) -> bool:
    distance = abs(one - two)
    if distance <= tolerance or distance <= AGREE * max(abs(one), abs(two)):
        return True
    return (one == 0 or two == 0) and bool(distance <= NOTHING)


def _verify(expected: Any, given: Any) -> bool:
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its clock is off
    # Its clock is SIGALRM, which works in the main thread alone.
    return bool(verify(expected, given, timeout_seconds=None, allow_set_relation_comp=True))


def _is_bounded(expression: Any) -> bool:
    """Whether an expression, parsed but not computed, can be computed in short time."""
    import sympy

    roots = expression.flat() if isinstance(expression, sympy.MatrixBase) else [expression]
    nodes = [node for root in roots for node in sympy.preorder_traversal(root)]
    return len(nodes) <= MAX_NODES and all(_log10(root) <= MAX_LOG10 for root in roots)


def _log10(node: Any) -> float:
    """A bound on ``|log10 |value||`` of an expression, symbols counted as 10; infinity if none."""
    import sympy

    if not node.args:
        return _log10_of_number(node) if node.is_Number else 1.0
    bounds = [_log10(argument) for argument in node.args]
    if max(bounds) > MAX_LOG10:
        return math.inf
    if isinstance(node, sympy.Pow | sympy.exp):
        return _log10_of_power(node, bounds)
    if isinstance(node, sympy.factorial):
        size = node.args[0]
        small = size.is_Symbol or (size.is_Integer and 0 <= size <= MAX_FACTORIAL)
        return 2600.0 if small else math.inf
    return sum(bounds) + 1


def _log10_of_number(node: Any) -> float:
    if node.is_Rational:
        return float(len(str(abs(node.p))) + len(str(node.q)))
    if not node.is_finite or node == 0:
        return 1.0
    import sympy

    return abs(float(sympy.log(abs(node), 10))) + 1


def _log10_of_power(node: Any, bounds: list[float]) -> float:
    if bounds[-1] > len(str(int(MAX_LOG10))) + 2:
        return math.inf
    exponent = node.args[-1]
    if not exponent.is_Number:
        return bounds[0] * 10 ** bounds[-1]
    power = abs(float(exponent))
    base = node.args[0]
    if base.is_Add and base.free_symbols and power > MAX_SYMBOLIC_POWER:
        return math.inf
    return bounds[0] * max(1.0, power)
