"""What a piece declares about itself, so that nobody has to know it by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from posttrain.registry import options

Piece = Callable[..., Any]
Declared = TypeVar("Declared", bound=Piece)


def piece(
    *, needs: Iterable[str] = (), smallest_group: int | Callable[..., int] = 1
) -> Callable[[Declared], Declared]:
    """Declare what an advantage needs beyond what every batch has; an own one does it too.

    ``needs`` are fields of the batch that cost something to make: ``greedy_rewards`` has the source
    sample a greedy completion of every prompt. ``smallest_group`` is how many completions of a
    prompt it compares at least: a number, or a function of the piece's options.

    >>> @piece(smallest_group=2)
    ... def mine(batch): ...
    >>> smallest_group(mine), needs(mine)
    (2, frozenset())
    """

    def declare(function: Declared) -> Declared:
        function.needs = frozenset(needs)  # type: ignore[attr-defined]
        function.smallest_group = smallest_group  # type: ignore[attr-defined]
        return function

    return declare


def needs(function: Piece) -> frozenset[str]:
    """The fields that a piece declares to need; a piece that declares nothing needs none.

    >>> needs(len)
    frozenset()
    """
    declared: frozenset[str] = getattr(_unbound(function), "needs", frozenset())
    return declared


def smallest_group(function: Piece) -> int:
    """How many completions of a prompt a piece compares at least, its bound options considered.

    >>> @piece(smallest_group=lambda k: k + 1)
    ... def mine(batch, *, k=4): ...
    >>> smallest_group(mine), smallest_group(functools.partial(mine, k=1))
    (5, 2)
    """
    declared = getattr(_unbound(function), "smallest_group", 1)
    if not callable(declared):
        return int(declared)
    return int(declared(**{name: option.default for name, option in options(function).items()}))


def _unbound(function: Piece) -> Piece:
    return function.func if isinstance(function, functools.partial) else function
