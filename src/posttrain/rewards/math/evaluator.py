r"""The value of an expression, with bounded work: exact where it is rational, else to 100 digits.

Expressions in symbols are compared at a few rational points, where a polynomial's value is exact.
Nothing is simplified, so nothing can take for ever: every number is bounded before it is computed.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from posttrain.rewards.math.nodes import Node

DIGITS = 100  # digits of values that are not exact
AGREE = 1e-60  # relative difference up to which values are the same, where one is not exact
NOTHING = 1e-85  # relative size of the rounding that is left when two inexact values cancel
MAX_BITS = 1 << 15  # bits of an exact number's numerator and denominator
BITS_OF_ONE = 2048  # bits up to which a multiplication counts as one operation
MAX_MAGNITUDE = 40_000  # largest binary exponent of a number
MAX_FACTORIAL = 2500
MAX_ARGUMENT = 10**30  # largest argument of a sine: beyond it too few digits would be left
MAX_OPERATIONS = 5000  # operations in one comparison
NUM_POINTS = 9

_OF_THREAD = threading.local()
Value = Any  # a Fraction, or a real or complex number of mpmath, which has no types


class UndefinedError(Exception):
    """The expression has no value here."""


class TooMuchError(Exception):
    """The comparison would take more work than an answer deserves."""


def _context() -> Any:
    """The arithmetic of this thread: mpmath changes a context's precision while it computes."""
    if not hasattr(_OF_THREAD, "context"):
        import mpmath

        _OF_THREAD.context = mpmath.MPContext()
        _OF_THREAD.context.dps = DIGITS
    return _OF_THREAD.context


@dataclass
class Evaluator:
    """Values of expressions at one point; ``operations`` counts the work of all of them."""

    point: Mapping[str, Fraction] = field(default_factory=dict)
    real: bool = False
    """Whether what is not real has no value, as the root of a negative number."""
    log_base: int = 0
    """The base of a logarithm that is written without one; 0 for the natural one."""
    operations: list[int] = field(default_factory=lambda: [0])

    def value(self, node: Node) -> Value:
        """The value of an expression; raises where it has none, or takes too much."""
        self.count(1)
        if node.kind in ("number", "symbol", "constant"):
            return self.leaf(node)
        if node.kind in ("signed", "plus_minus", "minus_plus"):
            return self.signed(node)
        if node.kind in ("call", "apply"):
            name, *arguments = node.args
            values = [self.value(argument) for argument in arguments]
            if node.kind == "call":
                return self.call(name, values)
            return _any_function(self.point.get(name.args[0]), values)
        if node.kind not in _OPERATIONS:
            raise UndefinedError
        operation = _OPERATIONS[node.kind]
        values = [self.value(argument) for argument in node.args]
        if node.kind in ("add", "multiply"):
            return functools.reduce(lambda one, two: self.compute(operation, [one, two]), values)
        return self.compute(operation, values)

    def signed(self, node: Node) -> Value:
        """A part with ± before it, or one in which ± has become the one or the other."""
        if node.kind != "signed":
            sign = int(self.point.get("±", 1)) * (1 if node.kind == "plus_minus" else -1)
            return sign * self.value(node.args[0])
        both = replace(self, point={**self.point, "±": Fraction(node.args[0])})
        return both.value(node.args[1])

    def count(self, operations: int) -> None:
        """Add to the work of the comparison, and end it where it is too much."""
        self.operations[0] += operations
        if self.operations[0] > MAX_OPERATIONS:
            raise TooMuchError

    def leaf(self, node: Node) -> Value:
        """The value of a number, a symbol or a constant."""
        (name,) = node.args
        if node.kind != "constant":
            return self.checked(name if node.kind == "number" else self.point[name])
        context = _context()
        if name == "i" and self.real:
            raise UndefinedError
        values = {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1), "inf": context.inf}
        return values[name]

    def compute(self, operation: Callable[..., Value], arguments: list[Value]) -> Value:
        """One operation, its result checked."""
        if any(not isinstance(argument, Fraction) for argument in arguments):
            arguments = [approximate(argument) for argument in arguments]
        try:
            return self.checked(operation(*arguments))
        except (ArithmeticError, ValueError, TypeError, NotImplementedError):
            raise UndefinedError from None

    def call(self, name: str, arguments: list[Value]) -> Value:
        """A function of the table."""
        if name == "log" and len(arguments) == 1 and self.log_base:
            arguments = [Fraction(self.log_base), *arguments]
        if name in _EXACT:
            return self.compute(_EXACT[name], arguments)
        function = _FUNCTIONS.get(name)
        if function is None:
            raise UndefinedError
        context = _context()
        if any(abs(argument) > MAX_ARGUMENT for argument in arguments):
            raise UndefinedError
        return self.compute(
            lambda *values: _snapped(function(context, *values), min(map(abs, values))),
            [approximate(a) for a in arguments],
        )

    def checked(self, value: Value) -> Value:
        """A value that later operations can be trusted with."""
        if isinstance(value, int):
            value = Fraction(value)
        if isinstance(value, Fraction):
            bits = _bits(value)
            self.count((bits // BITS_OF_ONE) ** 2)
            if bits <= MAX_BITS:
                return value
            if not self.point:
                raise UndefinedError
            value = approximate(value)
        context = _context()
        if context.isnan(value):
            raise UndefinedError
        if self.real and isinstance(value, context.mpc):
            if abs(value.imag) > AGREE * abs(value.real):
                raise UndefinedError
            value = value.real
        if value != 0 and not context.isinf(value) and abs(context.mag(value)) > MAX_MAGNITUDE:
            raise UndefinedError
        return value


def approximate(value: Value) -> Value:
    """A value as a number of mpmath."""
    if isinstance(value, Fraction):
        return _context().mpf(value.numerator) / value.denominator
    return value


def close(one: Value, two: Value, *, tolerance: float = 0.0) -> bool:
    """Whether two values are the same: exactly where both are exact, else to sixty digits."""
    if isinstance(one, Fraction) and isinstance(two, Fraction):
        return abs(one - two) <= Fraction(str(tolerance))
    one, two = approximate(one), approximate(two)
    if one == two:
        return True
    distance = abs(one - two)
    if not _context().isfinite(distance):
        return False
    return bool(distance <= tolerance or distance <= AGREE * max(abs(one), abs(two)))


def points(symbols: frozenset[str]) -> list[dict[str, Fraction]]:
    """Points at which expressions in symbols are evaluated: fractions, integers, negatives."""
    places: list[dict[str, Fraction]] = []
    for number in range(NUM_POINTS):
        place: dict[str, Fraction] = {"±": Fraction(1)}
        for index, name in enumerate(sorted(symbols)):
            size = (7919 * (index + 1) * (number + 2) + 104729 * (number + 1)) % 8191 + 400
            sign = -1 if (index + number) % 2 else 1
            place[name] = (
                Fraction(size, 4096), Fraction(size, 3072), Fraction(size, 1024),
                Fraction(7 + 2 * index), Fraction(12 + 5 * index), Fraction(size + 4096, 256),
                Fraction(sign * size, 2048), Fraction(sign * size, 2048),
                Fraction((60, 84, 90, 126, 350)[index % 5] * (index // 5 + 1)),
            )[number]  # fmt: skip
        places.append(place)
    return places


def _any_function(name: Value, arguments: list[Value]) -> Fraction:
    """A value of an undefined function: any number, but always the same of the same arguments.

    The function is known by the value that its name has at a point, so that it changes with it.
    """
    context = _context()
    shown = [context.nstr(context.mpmathify(approximate(a)), DIGITS // 2) for a in arguments]
    digest = hashlib.sha256(repr((name, shown)).encode()).digest()
    return Fraction(int.from_bytes(digest[:2]) + 1, 1 << 15)


def _sum(one: Value, two: Value) -> Value:
    small, large = sorted((abs(one), abs(two)))
    swallowed = not isinstance(one, Fraction) and 0 < small < AGREE * large < _context().inf
    if swallowed:  # 1 + e^{1000}: the smaller addend would be lost
        raise UndefinedError
    return _snapped(one + two, large)


def _snapped(value: Value, scale: Value) -> Value:
    """0 where a value is nothing beside what it was computed of, as the sine of π is."""
    is_rest = not isinstance(value, Fraction) and abs(value) < NOTHING * scale
    return Fraction(0) if is_rest else value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _power(base: Value, exponent: Value) -> Value:
    context = _context()
    whole = isinstance(exponent, Fraction) and exponent.denominator == 1
    if isinstance(base, Fraction) and whole and _bits(base) * abs(exponent) <= 2 * MAX_BITS:
        return base ** int(exponent)
    if base == 0:
        return Fraction(0) if exponent > 0 else base / Fraction(0)
    one, two = approximate(base), approximate(exponent)
    if context.isinf(one) or context.isinf(two) or context.mag(two) > 64:
        raise UndefinedError
    if abs(two) * (abs(context.mag(one)) + 1) > MAX_MAGNITUDE:
        raise UndefinedError
    exact = isinstance(base, Fraction) and isinstance(exponent, Fraction)
    if exact and base < 0 and exponent.denominator % 2:  # the real root: (-8)^{1/3} is -2
        return (-1) ** exponent.numerator * (-one) ** two
    return one**two


def _root(index: Value, value: Value) -> Value:
    if not isinstance(index, Fraction) and not _context().isint(index):
        raise UndefinedError
    whole = int(index)
    if not 2 <= whole <= MAX_FACTORIAL:
        raise UndefinedError
    if isinstance(value, Fraction) and (exact := _exact_root(value, whole)) is not None:
        return exact
    number = approximate(value)
    if whole % 2 and not isinstance(number, _context().mpc) and number < 0:
        return -_context().root(-number, whole)
    return _context().root(number, whole)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """The rational root of a square, as √(9/4)."""
    if index != 2 or value < 0:
        return None
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return root if root * root == value else None


def _factorial(value: Value) -> Value:
    if not _is_natural(value):
        return _gamma(value)
    if value > MAX_FACTORIAL:
        raise UndefinedError
    return Fraction(math.factorial(int(value)))


def _is_natural(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1 and value >= 0


def _gamma(value: Value) -> Value:
    number = approximate(value)
    if abs(number) > MAX_FACTORIAL:
        raise UndefinedError
    return _context().gamma(number + 1)


def _double_factorial(value: Value) -> Value:
    if not _is_natural(value) or value > MAX_FACTORIAL:
        raise UndefinedError
    return Fraction(math.prod(range(int(value), 0, -2)))


def _binomial(above: Value, below: Value) -> Value:
    if _is_natural(above) and _is_natural(below):
        size = min(below, max(above - below, Fraction(0)))
        if size * _bits(above) > 2 * MAX_BITS:
            raise UndefinedError
        return Fraction(math.comb(int(above), int(below)))
    return _gamma(above) / (_gamma(below) * _gamma(approximate(above) - below))


def _logarithm(*arguments: Value) -> Value:
    """The logarithm to the base that is the first argument, or the natural one."""
    values = [_snapped(_context().log(approximate(a)), 1) for a in arguments]
    return values[-1] / values[0] if len(values) == 2 else values[0]


def _integers(arguments: tuple[Value, ...]) -> list[int]:
    if any(not isinstance(a, Fraction) or a.denominator != 1 for a in arguments):
        raise UndefinedError
    return [int(argument) for argument in arguments]


def _rounded(direction: Callable[[Any], Any]) -> Callable[..., Value]:
    def rounded(value: Value) -> Value:
        if not isinstance(value, Fraction):
            nearest = _context().nint(value)
            is_whole = abs(value - nearest) < AGREE
            below = Fraction(int(_context().floor(value)))
            value = Fraction(int(nearest)) if is_whole else below + Fraction(1, 2)
        return Fraction(direction(value))

    return rounded


def _method(name: str) -> Callable[..., Value]:
    return lambda context, one: getattr(context, name)(one)


_PLAIN_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _sum,
    "multiply": lambda one, two: one * two,
    "divide": lambda one, two: one / two,
    "negate": lambda one: -one,
    "power": _power,
    "modulo": lambda *pair: Fraction(operator.mod(*_integers(pair))),
}
_EXACT: dict[str, Callable[..., Value]] = {
    "abs": lambda one: abs(one),
    "sqrt": lambda one: _root(Fraction(2), one),
    "cbrt": lambda one: _root(Fraction(3), one),
    "root": _root,
    "factorial": _factorial,
    "double_factorial": _double_factorial,
    "binomial": _binomial,
    "log": _logarithm,
    "lg": lambda one: _logarithm(Fraction(10), one),
    "ln": _logarithm,
    "gcd": lambda *arguments: Fraction(math.gcd(*_integers(arguments))),
    "lcm": lambda *arguments: Fraction(math.lcm(*_integers(arguments))),
    "max": lambda *arguments: max(*arguments),
    "min": lambda *arguments: min(*arguments),
    "floor": _rounded(math.floor),
    "ceil": _rounded(math.ceil),
    "sgn": lambda one: Fraction((one > 0) - (one < 0)),
    "exp": lambda one: _power(_context().e, one),
    "conj": lambda one: _context().conj(approximate(one)),
    "Re": lambda one: approximate(one).real,
    "Im": lambda one: approximate(one).imag,
}
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "degree": lambda context, one: one * context.pi / 180,
    "cis": lambda context, one: context.mpc(context.cos(one), context.sin(one)),
    "arg": lambda context, one: context.arg(one),
    **{name: _method(name) for name in _PLAIN_FUNCTIONS},
    **{f"{arc}{name}": _method(f"a{name}") for name in _PLAIN_FUNCTIONS for arc in ("arc", "a")},
}
