"""Advantages: ``(batch, *, options) -> batch`` with ``advantages`` [B, T] added.

To add one, write the function and name it in :data:`ADVANTAGES`.
"""

from collections.abc import Callable

from posttrain.algorithms.advantages.baselines import (
    constant_baseline,
    greedy_baseline,
    group_centred,
    group_normalised,
    leave_one_out,
    leave_one_out_normalised,
    max_only,
    moving_baseline,
    optimal_baseline,
    per_token,
    plain_return,
    sequence_returns,
    update_baseline,
)
from posttrain.algorithms.advantages.best_of_k import pass_at_k
from posttrain.algorithms.advantages.from_teacher import towards_teacher
from posttrain.algorithms.advantages.over_turns import turn_group_normalised, turn_return_to_go
from posttrain.algorithms.advantages.temporal import batch_whitened, gae, return_to_go
from posttrain.algorithms.pieces import smallest_group
from posttrain.types import Batch

ADVANTAGES: dict[str, Callable[..., Batch]] = {
    "return": plain_return,
    "constant_baseline": constant_baseline,
    "moving_baseline": moving_baseline,
    "greedy_baseline": greedy_baseline,
    "optimal_baseline": optimal_baseline,
    "group_centred": group_centred,
    "group_normalised": group_normalised,
    "max_only": max_only,
    "leave_one_out": leave_one_out,
    "leave_one_out_normalised": leave_one_out_normalised,
    "pass_at_k": pass_at_k,
    "batch_whitened": batch_whitened,
    "return_to_go": return_to_go,
    "turn_return_to_go": turn_return_to_go,
    "turn_group_normalised": turn_group_normalised,
    "gae": gae,
    "towards_teacher": towards_teacher,
}


def without_siblings() -> list[str]:
    """The advantages for which one completion of a prompt is enough, by name.

    >>> "return" in without_siblings(), "group_centred" in without_siblings()
    (True, False)
    """
    return [name for name, function in ADVANTAGES.items() if smallest_group(function) == 1]


__all__ = [
    "ADVANTAGES",
    "batch_whitened",
    "constant_baseline",
    "gae",
    "greedy_baseline",
    "group_centred",
    "group_normalised",
    "leave_one_out",
    "leave_one_out_normalised",
    "max_only",
    "moving_baseline",
    "optimal_baseline",
    "pass_at_k",
    "per_token",
    "plain_return",
    "return_to_go",
    "sequence_returns",
    "towards_teacher",
    "turn_group_normalised",
    "turn_return_to_go",
    "update_baseline",
    "without_siblings",
]
