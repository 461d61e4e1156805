"""What the pieces of a plan return, with errors that name a piece which returns something else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from posttrain.algorithms.pieces import Loss
from posttrain.types import Batch, Terms


def with_field(function: Callable[[Batch], Batch], batch: Batch, *, field: str) -> Batch:
    """What a piece makes of a batch; an error names the piece where it has not added the field."""
    result: Any = function(batch)
    if isinstance(result, Batch) and getattr(result, field) is not None:
        return result
    what = f"the batch without {field}" if isinstance(result, Batch) else described(result)
    raise ValueError(
        f"{name_of(function)} returned {what}; it has to return the batch with {field} [B, T]: "
        f"`return batch.replace({field}=…)`"
    )


def terms_of(loss: Loss, predicted: Tensor, *, batch: Batch) -> Terms:
    """The terms of a loss; an error names the loss where it returns none for every token."""
    result: Any = loss(predicted, batch)
    if isinstance(result, Terms) and getattr(result.loss, "shape", None) == predicted.shape:
        return result
    what = f"Terms(loss={described(result.loss)})" if isinstance(result, Terms) else None
    raise ValueError(
        f"{name_of(loss)} returned {what or described(result)}; it has to return "
        f"posttrain.types.Terms(loss=…) with a term for every token, {[*predicted.shape]} here; "
        "what each counts is decided by rl.weights"
    )


def name_of(function: Callable[..., Any]) -> str:
    """A function as a recipe names it, whatever options are bound to it.

    >>> name_of(functools.partial(described, value=1))
    'posttrain.pipelines.returned:described'
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"


def described(value: Any) -> str:
    """A value by its type, and a tensor by its shape.

    >>> described(None), described(Batch.from_rewards([1.0]).rewards)
    ('None', 'a Tensor of shape [1]')
    """
    if value is None:
        return "None"
    shape = f" of shape {[*value.shape]}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
