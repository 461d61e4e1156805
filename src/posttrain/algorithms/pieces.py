"""Facts about pieces that a signature cannot express, declared by the pieces themselves.

A piece in a user's own file declares them as the built-in ones do; nothing is assumed that is not
declared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from posttrain.registry import options
from posttrain.types import Batch, Terms
from posttrain.written import real

Function = TypeVar("Function", bound=Callable[..., Any])
Loss = Callable[..., Terms]
Divergence = Callable[[Tensor, Tensor], Tensor]
Centred = Literal["group", "turn", "batch"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a piece has declared about itself; the defaults hold for one that declares nothing."""

    needs: frozenset[str] | Callable[..., Iterable[str]] = frozenset()
    smallest_group: int | Callable[..., int] = 1
    centred: Centred | Callable[..., Centred | None] | None = None
    zero_with_advantage: bool = False
    steered: bool = False
    optimiser_steps: Literal["one", "several"] | None = None
    whole_batch: Callable[..., Loss] | None = None
    divergence: Callable[..., Divergence] | None = None


def piece(
    *,
    needs: Iterable[str] | Callable[..., Iterable[str]] = (),
    smallest_group: int | Callable[..., int] = 1,
    centred: Centred | Callable[..., Centred | None] | None = None,
    zero_with_advantage: bool = False,
    steered: bool = False,
    optimiser_steps: Literal["one", "several"] | None = None,
    whole_batch: Callable[..., Loss] | None = None,
    divergence: Callable[..., Divergence] | None = None,
) -> Callable[[Function], Function]:
    """Declare facts about the function below.

    Of an advantage: ``needs`` is what it takes from the batch beside rewards and groups. With
    ``greedy_rewards`` every prompt is also answered greedily, with ``token_rewards`` the score is
    put at the last token (what turns have earned at theirs), with ``values`` a critic is
    trained, on the ``returns`` that the advantage adds, and with ``teacher_logprobs`` (which a loss
    may need too) the recipe's teacher scores the tokens. ``smallest_group`` is how many
    completions of a prompt it compares at least. ``centred`` is for the audit: in every
    ``"group"`` the advantages add up to 0, or those of each ``"turn"`` of a group do, or over the
    policy's tokens of the ``"batch"`` they have mean 0 and deviation 1. Each of the three may be a
    function of the options.

    Of a policy loss: ``zero_with_advantage`` says that where a token's advantage is 0, its term and
    the gradient of its term are exactly 0. No gradient is then computed for sequences without one.
    ``steered`` says that its option ``coefficient`` weighs a penalty on the step from the old
    policy, which may be doubled and halved towards a target.
    ``optimiser_steps`` says that it is right in the first step on a batch alone (``"one"``), or
    that it does what it is for in the later ones alone (``"several"``).
    ``whole_batch`` is for a loss that must see all sequences at once (to rank tokens, say):
    ``whole_batch(batch, **options)``, with the options of the loss, is called on the whole batch
    before it is cut, when ``advantages`` and ``old_logprobs`` are there, and returns the loss to
    use on the parts.
    ``divergence`` is for a loss that compares whole distributions with a teacher's:
    ``divergence(**options)`` returns a function of the logits of both, [N, V] × 2 → [N], whose
    value at every token, with its gradient, the loss finds in ``batch.divergence``.

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
        needs=needs if callable(needs) else frozenset(needs),
        smallest_group=smallest_group,
        centred=centred,
        zero_with_advantage=zero_with_advantage,
        steered=steered,
        optimiser_steps=optimiser_steps,
        whole_batch=whole_batch,
        divergence=divergence,
    )

    def declare(function: Function) -> Function:
        # The function is stored with its facts, because functools.wraps copies attributes: a
        # wrapper with a behaviour of its own has not declared anything.
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
    function = real(function)
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
    return declared if isinstance(declared, int) else declared(**_options(function))


def needed(function: Callable[..., Any]) -> frozenset[str]:
    """What an advantage takes from the batch beside rewards and groups, with the options it has.

    >>> @piece(needs=lambda gamma: {"token_rewards"} if gamma != 1 else ())
    ... def mine(batch, *, gamma=1.0): ...
    >>> sorted(needed(mine)), sorted(needed(functools.partial(mine, gamma=0.9)))
    ([], ['token_rewards'])
    """
    declared = facts(function).needs
    return frozenset(declared(**_options(function)) if callable(declared) else declared)


def centred_over(function: Callable[..., Any]) -> Centred | None:
    """Over what the advantages of a piece have mean 0, with the options it has.

    >>> @piece(centred="group")
    ... def mine(batch): ...
    >>> centred_over(mine)
    'group'
    """
    declared = facts(function).centred
    return declared(**_options(function)) if callable(declared) else declared


def for_batch(loss: Loss, batch: Batch) -> Loss:
    """The loss to use on parts of ``batch``: made from the whole of it where the piece asks so.

    >>> for_batch(print, Batch.from_rewards([1.0])) is print
    True
    """
    make = facts(loss).whole_batch
    return loss if make is None else make(batch, **_options(loss))


def divergence_of(loss: Loss) -> Divergence | None:
    """The divergence that a loss wants of the policy's and the teacher's logits, if any.

    >>> divergence_of(print) is None
    True
    """
    make = facts(loss).divergence
    return None if make is None else make(**_options(loss))


def asks_teacher(*pieces: Callable[..., Any]) -> bool:
    """Whether one of these pieces takes something from a teacher.

    >>> asks_teacher(print)
    False
    """
    return any("teacher_logprobs" in needed(p) or facts(p).divergence is not None for p in pieces)


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    """The options that a piece runs with: those bound to it, else its defaults."""
    return {name: option.default for name, option in options(function).items()}
