"""Pieces say what they are: facts that others need and a signature cannot hold.

A piece of your own file declares them as the built-in ones do; what it does not declare is not
assumed of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.registry import options

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a piece has declared about itself; the defaults hold for one that declares nothing."""

    needs: frozenset[str] = frozenset()
    smallest_group: int | Callable[..., int] = 1


def piece(
    *, needs: Iterable[str] = (), smallest_group: int | Callable[..., int] = 1
) -> Callable[[Function], Function]:
    """Declare facts about the function below.

    ``needs``, of an advantage: what it takes from the batch beside rewards and groups. With
    ``greedy_rewards`` every prompt is also answered greedily, with ``token_rewards`` the score is
    put at the last token. ``smallest_group``, of an advantage: how many completions of a prompt it
    compares at least, a number or a function of its options.

    >>> @piece(smallest_group=2)
    ... def mine(batch): ...
    >>> facts(mine).smallest_group, facts(mine).needs
    (2, frozenset())
    """
    declared = Facts(needs=frozenset(needs), smallest_group=smallest_group)

    def declare(function: Function) -> Function:
        # With the function itself: functools.wraps copies attributes, and a wrapper that does
        # something of its own has not declared anything.
        function.__dict__["posttrain_piece"] = (function, declared)
        return function

    return declare


def facts(function: Callable[..., Any]) -> Facts:
    """What a function has declared with :func:`piece`, also where options are bound to it.

    >>> facts(print).needs
    frozenset()
    """
    while isinstance(function, functools.partial):
        function = function.func
    if "posttrain_piece" not in getattr(function, "__dict__", {}):
        return Facts()
    owner, declared = function.__dict__["posttrain_piece"]
    return declared if owner is function else Facts()


def smallest_group(function: Callable[..., Any]) -> int:
    """How many completions of a prompt a piece compares at least, with the options it has.

    >>> @piece(smallest_group=lambda k: k + 1)
    ... def mine(batch, *, k=4): ...
    >>> smallest_group(mine), smallest_group(functools.partial(mine, k=1))
    (5, 2)
    """
    declared = facts(function).smallest_group
    if isinstance(declared, int):
        return declared
    return declared(**{name: option.default for name, option in options(function).items()})
