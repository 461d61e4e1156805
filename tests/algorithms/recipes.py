"""Every advantage, loss and weighting by name, as functions of a batch alone."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from posttrain.algorithms import corrections, diagnostics, objective, weights
from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.pieces import for_batch
from posttrain.types import Batch, Terms

Advantage = Callable[[Batch], Batch]


def pass_at_two(batch: Batch) -> Batch:
    """pass@2 in larger groups: some of those of the tests have two members only."""
    larger = None if batch.groups is None else (batch.groups > 6).long()
    return ADVANTAGES["pass_at_k"](batch.replace(groups=larger), k=2)


ADVANTAGE_VARIANTS: dict[str, Advantage] = {
    **ADVANTAGES,
    "pass_at_k": pass_at_two,
    "others, population": partial(
        ADVANTAGES["leave_one_out_normalised"], deviation="population", epsilon=0.1
    ),
    "whitened, sample": partial(ADVANTAGES["batch_whitened"], deviation="sample"),
    "gae, sample": partial(ADVANTAGES["gae"], deviation="sample"),
    "constant_baseline": partial(ADVANTAGES["constant_baseline"], baseline=0.4),
    "population": partial(ADVANTAGES["group_normalised"], deviation="population"),
    "max centred": partial(ADVANTAGES["max_only"], keeps="centred"),
    "centred, whitened": partial(ADVANTAGES["batch_whitened"], centre_groups=True),
    "discounted, whitened": partial(ADVANTAGES["batch_whitened"], gamma=0.7),
    "discounted": partial(ADVANTAGES["return_to_go"], gamma=0.7),
    "turns, discounted": partial(ADVANTAGES["turn_return_to_go"], gamma=0.7),
    "turns, population": partial(
        ADVANTAGES["turn_group_normalised"], gamma=0.7, deviation="population", epsilon=0.1
    ),
    "teacher, mixed": partial(
        ADVANTAGES["towards_teacher"], coefficient=0.5, discount=0.7, reward=2.0
    ),
    "gae, raw": partial(ADVANTAGES["gae"], gamma=0.9, lam=0.7, normalise=False),
    "gae, two steps": partial(ADVANTAGES["gae"], gamma=0.9, lam=0.7, steps=2),
}

WEIGHT_VARIANTS: dict[str, Advantage] = {
    **weights.WEIGHTS,
    "dr_grpo": partial(weights.sequence_sum, length=9),
}


def policy_terms(
    name: str, logprobs: Tensor, *, entropy: Tensor, batch: Batch, whole: Batch | None = None
) -> Terms:
    """A policy loss with everything on: correction, mismatch, divergence and entropy."""
    terms = for_batch(POLICY_LOSSES[name], batch if whole is None else whole)(logprobs, batch)
    terms = objective.with_correction(terms, batch)
    terms = objective.with_mismatch(terms, batch)
    terms = objective.with_kl(terms, logprobs, batch=batch, coefficient=0.3)
    return objective.with_entropy(terms, entropy, batch=batch, coefficient=0.02)


def prepared(batch: Batch, weighting: str = "token_mean") -> Batch:
    """A batch with what is decided once for the whole mini-batch: correction and weights."""
    return WEIGHT_VARIANTS[weighting](corrections.truncated(batch, level="geometric"))


def outcome(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient by the outputs, and metrics, of a policy or a value loss."""
    outputs = outputs.detach().clone().requires_grad_()
    if name in POLICY_LOSSES:
        terms = policy_terms(name, outputs, entropy=-3.0 * outputs, batch=batch)
    else:
        terms = VALUE_LOSSES[name.removeprefix("value ")](outputs, batch)
    loss = weights.total(terms.loss, batch)
    (gradient,) = torch.autograd.grad(loss, outputs)
    for report in (terms.loss, *terms.means.values(), *terms.maxima.values()):
        assert not report[~batch.active].any()
    return loss.detach(), gradient, diagnostics.tally(terms, batch.active).summary()


OUTCOMES = (*POLICY_LOSSES, *(f"value {name}" for name in VALUE_LOSSES))
