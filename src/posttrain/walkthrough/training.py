"""The nested loop: sample and score once an epoch, then take several steps on that batch.

Configurations that share a loss and a KL setting train side by side, one lane for each
configuration and seed; :mod:`posttrain.walkthrough.sorting_policy` says what a lane is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms.objective import with_kl
from posttrain.algorithms.weights import token_mean, total
from posttrain.types import Batch
from posttrain.walkthrough.settings import REWARDS, Configuration, Schedule, prompts
from posttrain.walkthrough.sorting_policy import Policies, initial_policies, sample


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One inner step, seen before its update. Shapes: logprobs [L·P·G, N], losses [L]."""

    epoch: int
    step: int
    batch: Batch
    logprobs: Tensor
    losses: Tensor


@dataclass(frozen=True, kw_only=True)
class History:
    """What a training left behind; configuration c owns the lanes ``lanes(c)``, one a seed.

    Shapes: losses [L, steps of all epochs], rewards [L, epochs, P, G] (of the sampled responses).
    ``early`` is the policy after a tenth of the epochs, while it still learns.
    """

    configurations: tuple[Configuration, ...]
    seeds: tuple[int, ...]
    initial: Policies
    early: Policies
    final: Policies
    losses: Tensor
    rewards: Tensor

    def lanes(self, configuration: int) -> slice:
        """The lanes of a configuration, one for each seed."""
        return slice(configuration * len(self.seeds), (configuration + 1) * len(self.seeds))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: on tensors this small, a second one costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    configurations: Sequence[Configuration],
    *,
    seeds: Sequence[int],
    schedule: Schedule | None = None,
    watch: Callable[[Moment], None] | None = None,
    after_epoch: Callable[[], None] | None = None,
) -> History:
    """Train every configuration from every seed: Adam on ``Σ weights · (loss + β · KL)``.

    The seed makes the generator that draws the lane's model and then its responses.
    """
    schedule, common = schedule or Schedule(), _common(configurations)
    policy_loss = common.policy_loss()
    generators = [torch.Generator().manual_seed(seed) for _ in configurations for seed in seeds]
    policies = initial_policies(generators)
    initial = early = reference = policies.detached()
    optimizer = torch.optim.Adam(policies.parameters(), lr=schedule.learning_rate)
    losses, rewards = [], []
    for epoch in range(schedule.num_epochs):
        if epoch == schedule.num_epochs // 10:
            early = policies.detached()
        if epoch % schedule.reference_period == 0:
            reference = policies.detached()
        responses = sample(
            policies, prompts(), generators=generators, num_responses=schedule.num_responses
        )
        batch = make_batch(policies, responses, configurations=configurations)
        if common.kl == "on":
            batch = batch.replace(ref_logprobs=token_logprobs(reference, responses).detach())
        rewards.append(batch.need("rewards").view(responses.shape[:3]))
        for step in range(schedule.num_steps):
            logprobs = token_logprobs(policies, responses)
            terms = policy_loss(logprobs, batch)
            if common.kl == "on":
                beta = schedule.kl_coefficient
                terms = with_kl(terms, logprobs, batch=batch, coefficient=beta)
            losses.append(per_lane(terms.loss.detach(), batch, num_lanes=len(generators)))
            if watch:
                seen = logprobs.detach()
                watch(Moment(epoch=epoch, step=step, batch=batch, logprobs=seen, losses=losses[-1]))
            optimizer.zero_grad()
            total(terms.loss, batch).backward()
            optimizer.step()
        if after_epoch:
            after_epoch()
    return History(
        configurations=tuple(configurations),
        seeds=tuple(seeds),
        initial=initial,
        early=early,
        final=policies.detached(),
        losses=torch.stack(losses, dim=1),
        rewards=torch.stack(rewards, dim=1),
    )


def make_batch(
    policies: Policies, responses: Tensor, *, configurations: Sequence[Configuration]
) -> Batch:
    """Score responses [L, P, G, N] and give them advantages: B = L·P·G sequences, T = N tokens.

    The lanes are shared out evenly: each configuration scores its own with its reward and its
    delta. A lane's weights are those of a batch that holds this lane alone.
    """
    num_lanes, num_prompts, num_responses, length = responses.shape
    scored = zip(configurations, responses.chunk(len(configurations)), strict=True)
    rewards = torch.cat([REWARDS[each.reward](prompts(), part) for each, part in scored])
    tokens = responses.reshape(-1, length)
    batch = Batch(
        tokens=tokens,
        mask=torch.ones_like(tokens, dtype=torch.bool),
        rewards=rewards.flatten(),
        groups=torch.arange(num_lanes * num_prompts).repeat_interleave(num_responses),
        old_logprobs=token_logprobs(policies, responses).detach(),
    )
    rows = torch.arange(len(tokens)).chunk(len(configurations))
    advantages = [
        each.advantage()(batch.select(part)).need("advantages")
        for each, part in zip(configurations, rows, strict=True)
    ]
    one_lane = token_mean(batch.select(torch.arange(num_prompts * num_responses)))
    return batch.replace(
        advantages=torch.cat(advantages), weights=one_lane.need("weights").repeat(num_lanes, 1)
    )


def token_logprobs(policies: Policies, responses: Tensor) -> Tensor:
    """The log-probabilities in the shape of a batch. Shapes: [L, P, G, N] → [L·P·G, N]."""
    return policies.logprobs(prompts(), responses).flatten(0, 2)


def per_lane(terms: Tensor, batch: Batch, *, num_lanes: int) -> Tensor:
    """Each lane's share of the update, ``Σ weights · terms``. Shapes: [B, T] → [L]."""
    return (batch.need("weights") * terms).view(num_lanes, -1).sum(1)


def _common(configurations: Sequence[Configuration]) -> Configuration:
    kinds = {(each.loss, each.kl) for each in configurations}
    if len(kinds) != 1:
        raise ValueError(
            f"configurations: {len(kinds)} kinds of loss and KL in one call; train those that "
            "share both together, and the others in calls of their own"
        )
    return configurations[0]
