"""A policy with a critic for tests of the learner: small, in float64, the same every time."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_model import OPTIONS, small_model
from torch import nn

from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.losses.value import squared
from posttrain.algorithms.objective import with_values
from posttrain.data.collate import collate_demonstrations
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models.critic import Critic, separate_critic, shared_critic
from posttrain.models.load import load_policy
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms

RATE, CRITIC_RATE = 1e-3, 5e-3
LIMIT, CRITIC_LIMIT = 0.05, 0.02
COEFFICIENT = 0.7
ROWS = [
    ((5, 6, 7, 8, 9, 10), (False, True, True, False, True, True)),
    ((11, 12, 0), (False, True, True)),
    ((13, 14, 15, 16), (False, False, False, True)),
]


def batch() -> Batch:
    """Three ragged sequences with advantages and the critic's targets; one mask has a hole."""
    made = collate_demonstrations(ROWS, pad_token=0)
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64) * made.mask
    return made.replace(advantages=numbers[0], returns=numbers[1], rewards=numbers[0, :, 0])


def parts(kind: str) -> tuple[nn.Module, Critic]:
    """A policy and its critic, with the same random head every time."""
    owner = replace(load_policy("tiny", options=OPTIONS), model=small_model())
    critic = separate_critic(owner) if kind == "separate" else shared_critic(owner)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for weight in critic.head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return owner.model, critic


def learner(model: nn.Module, critic: Critic | None, **options: object) -> LocalLearner:
    trained = critic and Trained(
        critic,
        adamw(critic, learning_rate=CRITIC_RATE),
        schedule=lambda step: 1 / (step + 1),
        max_gradient_norm=CRITIC_LIMIT,
    )
    return LocalLearner(
        model,
        adamw(model, learning_rate=RATE),
        save=lambda folder: None,
        max_gradient_norm=LIMIT,
        critic=trained,
        **options,
    )


def terms(outputs: Outputs, part: Batch) -> Terms:
    """PPO's: the policy's clipped loss and 0.7 times the critic's."""
    values = squared(outputs.need("values"), part)
    return with_values(clipped(outputs.logprobs, part), values, coefficient=COEFFICIENT)


def either_terms(outputs: Outputs, part: Batch) -> Terms:
    """The policy's clipped loss, and the critic's where there is one."""
    if outputs.values is None:
        return clipped(outputs.need("logprobs"), part)
    return terms(outputs, part)


def value_terms(outputs: Outputs, part: Batch) -> Terms:
    """The critic's alone; the policy must not have been asked."""
    assert outputs.logprobs is outputs.entropy is None
    return squared(outputs.need("values"), part)


objective = Objective(terms)
either = Objective(either_terms)
value_objective = Objective(value_terms, only_critic=True)
