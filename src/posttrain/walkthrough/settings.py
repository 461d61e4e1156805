"""What the sorting experiment varies, and what it holds fixed.

The task, the model's size and the schedule are the lecture's (Stanford CS336, 2025, lecture 17).
Every name below is looked up in the tables of :mod:`posttrain.algorithms`; nothing is redefined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES
from posttrain.registry import Spec, resolve
from posttrain.types import Batch, Terms
from posttrain.walkthrough import sorting_rewards

PROMPTS = ((1, 0, 2), (3, 2, 4), (1, 2, 3))
VOCABULARY = 5
DIMENSION = 10

DELTAS: dict[str, Spec] = {
    "rewards": "return",
    "centered": "group_centred",
    "normalized": {"name": "group_normalised", "deviation": "sample", "epsilon": 1e-5},
    "max_reward": {"name": "max_only", "keeps": "reward"},
    "max_centred": {"name": "max_only", "keeps": "centred"},
}
LOSSES: dict[str, Spec] = {
    "naive": "naive",
    "unclipped": "unclipped",
    "clipped": {"name": "clipped", "clip_low": 0.01, "clip_high": 0.01},
}
KL = ("off", "on")
REWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inclusion_ordering": sorting_rewards.inclusion_ordering,
    "position_matches": sorting_rewards.position_matches,
    "exactly_sorted": sorting_rewards.exactly_sorted,
}
LARGEST = {"inclusion_ordering": 5, "position_matches": 3, "exactly_sorted": 1}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One cell of the grid, by name.

    >>> str(Configuration(delta="centered", loss="naive"))
    'centered, naive, KL off, inclusion_ordering'
    """

    delta: str = "rewards"
    loss: str = "naive"
    kl: str = "off"
    reward: str = "inclusion_ordering"

    def __post_init__(self) -> None:
        checks.choice("delta", self.delta, known=tuple(DELTAS))
        checks.choice("loss", self.loss, known=tuple(LOSSES))
        checks.choice("kl", self.kl, known=KL)
        checks.choice("reward", self.reward, known=tuple(REWARDS))

    def __str__(self) -> str:
        return f"{self.delta}, {self.loss}, KL {self.kl}, {self.reward}"

    def advantage(self) -> Callable[[Batch], Batch]:
        """The advantage function that this delta names."""
        return resolve(DELTAS[self.delta], ADVANTAGES, kind="delta")

    def policy_loss(self) -> Callable[[Tensor, Batch], Terms]:
        """The policy loss, with the lecture's clip of 0.01 where it clips."""
        return resolve(LOSSES[self.loss], POLICY_LOSSES, kind="loss")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how hard a run trains: the lecture's numbers.

    ``kl_coefficient`` multiplies the mean over tokens of the k3 estimate. The lecture names the
    penalty and gives it no size; 0.1 is ours.
    """

    num_epochs: int = 100
    num_steps: int = 10
    num_responses: int = 10
    learning_rate: float = 1e-3
    kl_coefficient: float = 0.1
    reference_period: int = 10


def grid(*, quick: bool = False) -> list[Configuration]:
    """All 90 configurations, or 15 for a quick look: the naive loss without KL.

    >>> len(grid()), len(grid(quick=True))
    (90, 15)
    """
    losses = ("naive",) if quick else tuple(LOSSES)
    penalties = ("off",) if quick else KL
    return [
        Configuration(delta=delta, loss=loss, kl=kl, reward=reward)
        for loss, kl, reward, delta in itertools.product(losses, penalties, REWARDS, DELTAS)
    ]


def prompts() -> Tensor:
    """The prompts as a tensor [P, N]."""
    return torch.tensor(PROMPTS)
