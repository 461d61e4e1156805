"""Losses: one term per token (or per pair), never a mean; averaging is in ``weights``.

To add one, write the function and name it in its table.
"""

from collections.abc import Callable

from torch import Tensor

from posttrain.algorithms.losses.policy import (
    cispo,
    clipped,
    dual_clip,
    naive,
    penalised,
    sapo,
    sequence_clipped,
    unclipped,
)
from posttrain.algorithms.losses.supervised import bradley_terry, dpo, nll, plackett_luce
from posttrain.algorithms.losses.value import clipped_value, huber, squared
from posttrain.types import Terms

POLICY_LOSSES: dict[str, Callable[..., Terms]] = {
    "naive": naive,
    "unclipped": unclipped,
    "clipped": clipped,
    "dual_clip": dual_clip,
    "penalised": penalised,
    "sequence_clipped": sequence_clipped,
    "cispo": cispo,
    "sapo": sapo,
}

# Multiples of the advantage: where that is 0, so are the loss and its gradient.
ADVANTAGE_LOSSES = frozenset(POLICY_LOSSES) - {"penalised"}

VALUE_LOSSES: dict[str, Callable[..., Terms]] = {
    "squared": squared,
    "clipped": clipped_value,
    "huber": huber,
}

PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "bradley_terry": bradley_terry,
    "plackett_luce": plackett_luce,
    "dpo": dpo,
}

__all__ = [
    "ADVANTAGE_LOSSES",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "VALUE_LOSSES",
    "bradley_terry",
    "cispo",
    "clipped",
    "clipped_value",
    "dpo",
    "dual_clip",
    "huber",
    "naive",
    "nll",
    "penalised",
    "plackett_luce",
    "sapo",
    "sequence_clipped",
    "squared",
    "unclipped",
]
