"""Losses: one term per token (or per pair), never a mean; averaging is in ``weights``.

To add one, write the function, declare what it is with ``pieces.piece``, and name it in its table.
"""

from collections.abc import Callable

from torch import Tensor

from posttrain.algorithms.losses.covariance import clip_cov, kl_cov
from posttrain.algorithms.losses.direct import dpo, ipo, kto, orpo, simpo
from posttrain.algorithms.losses.divergences import teacher_divergence
from posttrain.algorithms.losses.policy import (
    cispo,
    clipped,
    dual_clip,
    geometric_mean,
    naive,
    penalised,
    sapo,
    sequence_clipped,
    unclipped,
)
from posttrain.algorithms.losses.supervised import bradley_terry, nll, plackett_luce
from posttrain.algorithms.losses.value import clipped_value, huber, squared
from posttrain.types import Terms

POLICY_LOSSES: dict[str, Callable[..., Terms]] = {
    "naive": naive,
    "unclipped": unclipped,
    "clipped": clipped,
    "dual_clip": dual_clip,
    "penalised": penalised,
    "sequence_clipped": sequence_clipped,
    "geometric_mean": geometric_mean,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "teacher_divergence": teacher_divergence,
}

VALUE_LOSSES: dict[str, Callable[..., Terms]] = {
    "squared": squared,
    "clipped": clipped_value,
    "huber": huber,
}

PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "bradley_terry": bradley_terry,
    "plackett_luce": plackett_luce,
}

DIRECT_LOSSES: dict[str, Callable[..., Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "kto": kto,
    "orpo": orpo,
    "simpo": simpo,
}

__all__ = [
    "DIRECT_LOSSES",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "VALUE_LOSSES",
    "bradley_terry",
    "cispo",
    "clip_cov",
    "clipped",
    "clipped_value",
    "dpo",
    "dual_clip",
    "geometric_mean",
    "huber",
    "ipo",
    "kl_cov",
    "kto",
    "naive",
    "nll",
    "orpo",
    "penalised",
    "plackett_luce",
    "sapo",
    "sequence_clipped",
    "simpo",
    "squared",
    "teacher_divergence",
    "unclipped",
]
