"""Small stand-ins for the parts of the loop, and rollouts written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from posttrain.algorithms.advantages import group_centred
from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.weights import token_mean
from posttrain.pipelines.plan import Plan
from posttrain.protocols import Objective, StepResult
from posttrain.types import Batch, Collected, Prompt, Rollout, Score, Turn

OLD, REFERENCE = -1.0, -1.5


def rollout(
    reward: float | None, *, group: int = 0, tokens: Sequence[int] = (8, 9), version: int = 0
) -> Rollout:
    """A scored rollout of the prompt (5, 6); a reward of None is a broken grader."""
    return Rollout(
        prompt=Prompt(id=str(group), text="?", tokens=(5, 6)),
        turns=(
            Turn(
                tokens=tuple(tokens),
                logprobs=(OLD,) * len(tokens),
                text="",
                stop_reason="stop",
                version=version,
            ),
        ),
        group=group,
        score=Score(value=0.0, state="crashed") if reward is None else Score(value=reward),
    )


def collected(*rewards: float | None, group_size: int = 2) -> Collected:
    """Rollouts with these rewards, in groups."""
    rows = [rollout(reward, group=n // group_size) for n, reward in enumerate(rewards)]
    return Collected(rollouts=rows)


def plan(**changes: object) -> Plan:
    """A plan of plain pieces."""
    return Plan(**{"advantage": group_centred, "loss": clipped, "weights": token_mean, **changes})


class FakeLearner:
    """Learns nothing, and writes down what it was asked to do."""

    def __init__(self, approx_kl: Sequence[float] = ()) -> None:
        self.version = 0
        self.calls: list[str] = []
        self.batches: list[Batch] = []
        self.objectives: list[Objective] = []
        self._approx_kl = list(approx_kl)

    def infer(self, batch: Batch) -> Batch:
        self.calls.append("infer")
        return batch.replace(
            old_logprobs=torch.full(batch.tokens.shape, OLD),
            ref_logprobs=torch.full(batch.tokens.shape, REFERENCE),
        )

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        self.calls.append("critic" if objective.only_critic else "step")
        self.batches.append(batch)
        self.objectives.append(objective)
        moved = self._approx_kl.pop(0) if self._approx_kl else 0.0
        return StepResult(
            loss=1.0, gradient_norm=2.0, learning_rate=3.0, metrics={"approx_kl": moved}
        )

    def refresh_reference(self) -> None:
        self.calls.append("refresh")

    def save(self, folder: Path) -> None:
        self.calls.append("save")


def sampled(learner: FakeLearner, steps: Sequence[Collected]) -> Iterator[Collected]:
    """The steps, each written down when it is asked for."""
    for step in steps:
        learner.calls.append("sample")
        yield step
