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
from posttrain.types import Batch, Terms

Function = TypeVar("Function", bound=Callable[..., Any])
Loss = Callable[..., Terms]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a piece has declared about itself; the defaults hold for one that declares nothing."""

    needs: frozenset[str] = frozenset()
    smallest_group: int | Callable[..., int] = 1
    zero_with_advantage: bool = False
    whole_batch: Callable[..., Loss] | None = None


def piece(
    *,
    needs: Iterable[str] = (),
    smallest_group: int | Callable[..., int] = 1,
    zero_with_advantage: bool = False,
    whole_batch: Callable[..., Loss] | None = None,
) -> Callable[[Function], Function]:
    """Declare facts about the function below.

    Of an advantage: ``needs`` is what it takes from the batch beside rewards and groups. With
    ``greedy_rewards`` every prompt is also answered greedily, with ``token_rewards`` the score is
    put at the last token. ``smallest_group`` is how many completions of a prompt it compares at
    least, a number or a function of its options.

    Of a policy loss: ``zero_with_advantage`` says that where a token's advantage is 0, its term and
    the gradient of its term are exactly 0. No gradient is then computed for sequences without one.
    ``whole_batch`` is for a loss that must see all sequences at once (to rank tokens, say):
    ``whole_batch(batch, **options)``, with the options of the loss, is called on the whole batch
    before it is cut, when ``advantages`` and ``old_logprobs`` are there, and returns the loss to
    use on the parts.

    >>> @piece(smallest_group=2)
    ... def mine(batch): ...
    >>> facts(mine).smallest_group, facts(mine).needs
    (2, frozenset())
    >>> @piece(zero_with_advantage=True)
    ... def doubled(logprobs, batch): return Terms(loss=-2 * batch.need("advantages") * logprobs)
    >>> facts(doubled).zero_with_advantage
    True
    """
    declared = Facts(
        needs=frozenset(needs),
        smallest_group=smallest_group,
        zero_with_advantage=zero_with_advantage,
        whole_batch=whole_batch,
    )

    def declare(function: Function) -> Function:
        # With the function itself: functools.wraps copies attributes, and a wrapper that does
        # something of its own has not declared anything.
        function.__dict__["posttrain_piece"] = (function, declared)
        return function

    return declare


def facts(function: Callable[..., Any]) -> Facts:
    """What a function has declared with :func:`piece`, also where options are bound to it.

    >>> facts(print) == Facts()
    True
    """
    while isinstance(function, functools.partial):
        function = function.func
    owner, declared = getattr(function, "posttrain_piece", (None, None))
    return declared if owner is function and isinstance(declared, Facts) else Facts()


def smallest_group(function: Callable[..., Any]) -> int:
    """How many completions of a prompt a piece compares at least, with the options it has.

    >>> @piece(smallest_group=lambda k: k + 1)
    ... def mine(batch, *, k=4): ...
    >>> smallest_group(mine), smallest_group(functools.partial(mine, k=1))
    (5, 2)
    """
    declared = facts(function).smallest_group
    return declared if isinstance(declared, int) else declared(**_options(function))


def for_batch(loss: Loss, batch: Batch) -> Loss:
    """The loss to use on parts of ``batch``: made from the whole of it where the piece asks so.

    >>> for_batch(print, Batch.from_rewards([1.0])) is print
    True
    """
    make = facts(loss).whole_batch
    return loss if make is None else make(batch, **_options(loss))


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    """The options that a piece runs with: those bound to it, else its defaults."""
    return {name: option.default for name, option in options(function).items()}
