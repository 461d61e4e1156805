"""Pieces say what they are: facts that the loop needs and a signature cannot hold.

A piece of your own file declares them as the built-in ones do; what it does not declare is not
assumed of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.registry import options
from posttrain.types import Batch, Terms

Function = TypeVar("Function", bound=Callable[..., Any])
Loss = Callable[..., Terms]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a piece has declared about itself; the defaults hold for one that declares nothing."""

    zero_with_advantage: bool = False
    whole_batch: Callable[..., Loss] | None = None


def piece(
    *, zero_with_advantage: bool = False, whole_batch: Callable[..., Loss] | None = None
) -> Callable[[Function], Function]:
    """Declare facts about the function below.

    ``zero_with_advantage``, of a policy loss: where a token's advantage is 0, its term and the
    gradient of its term are exactly 0. No gradient is then computed for sequences without one.
    ``whole_batch``, of a policy loss that must see all sequences at once (to rank tokens, say):
    ``whole_batch(batch, **options)``, with the options of the loss, is called on the whole batch
    before it is cut, when ``advantages`` and ``old_logprobs`` are there, and returns the loss to
    use on the parts.

    >>> @piece(zero_with_advantage=True)
    ... def doubled(logprobs, batch): return Terms(loss=-2 * batch.need("advantages") * logprobs)
    >>> facts(doubled).zero_with_advantage
    True
    """
    declared = Facts(zero_with_advantage=zero_with_advantage, whole_batch=whole_batch)

    def declare(function: Function) -> Function:
        # With the function itself: functools.wraps copies attributes, and a wrapper that adds a
        # term of its own has not declared anything.
        function.__dict__["posttrain_piece"] = (function, declared)
        return function

    return declare


def facts(function: Callable[..., Any]) -> Facts:
    """What a function has declared with :func:`piece`, also where options are bound to it.

    >>> facts(print).zero_with_advantage
    False
    """
    while isinstance(function, functools.partial):
        function = function.func
    owner, declared = getattr(function, "posttrain_piece", (None, None))
    return declared if owner is function and isinstance(declared, Facts) else Facts()


def for_batch(loss: Loss, batch: Batch) -> Loss:
    """The loss to use on parts of ``batch``: made from the whole of it where the piece asks so.

    >>> for_batch(print, Batch.from_rewards([1.0])) is print
    True
    """
    make = facts(loss).whole_batch
    if make is None:
        return loss
    given = {name: option.default for name, option in options(loss).items()}
    return make(batch, **given)
