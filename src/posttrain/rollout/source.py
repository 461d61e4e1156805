"""Where a step's rollouts come from: prompts in a shuffled cycle, an engine, a scorer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from posttrain.protocols import Engine, Env, Scorer
from posttrain.rollout.collect import by_group, collect_scored
from posttrain.rollout.environment import Encode
from posttrain.types import Collected, Prompt, Rollout, Sampling, draw_seed


class PromptCycle:
    """Prompts without end: every pass is a new permutation, decided by the seed and the pass.

    ``position`` counts the prompts handed out; setting it is all that resuming takes.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        if not prompts:
            raise ValueError("prompts: the training split is empty")
        self.position = 0
        self._prompts = prompts
        self._seed = seed
        self._pass = -1
        self._order: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        number, offset = divmod(self.position, len(self._prompts))
        if number != self._pass:
            generator = torch.Generator().manual_seed(draw_seed(self._seed, number))
            self._order = torch.randperm(len(self._prompts), generator=generator).tolist()
            self._pass = number
        self.position += 1
        return self._prompts[self._order[offset]]


class RolloutSource:
    """Yields scored rollouts, one step's worth at a time, sampled when they are asked for.

    With ``max_resamples > 0``, groups in which all rewards agree are thrown back and new prompts
    are sampled in their place (DAPO's dynamic sampling), at most that many times a step; what is
    still missing then is filled with groups that agree, so that a step always has its full size.

    With ``greedy`` every prompt is also answered greedily, by the same weights, and its rollouts
    carry that answer with its score: the baseline of advantages that need it. ``env`` and
    ``encode`` are those of :func:`posttrain.rollout.collect.collect_scored`.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        *,
        prompts: PromptCycle,
        sampling: Sampling,
        prompts_per_step: int,
        group_size: int,
        seed: int,
        max_resamples: int = 0,
        greedy: bool = False,
        env: Env | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.prompts = prompts
        self.num_calls = 0
        """Calls of the engine so far: each has a seed of its own."""
        self._engine = engine
        self._scorer = scorer
        self._sampling = sampling
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._seed = seed
        self._max_resamples = max_resamples
        self._greedy = greedy
        self._env, self._encode = env, encode

    def steps(self, count: int) -> Iterator[Collected]:
        """The rollouts of ``count`` steps."""
        for _ in range(count):
            yield self.collect()

    def collect(self) -> Collected:
        """One step's rollouts, groups numbered from 0."""
        seconds = {"rollout": 0.0, "reward": 0.0}
        kept: list[list[Rollout]] = []
        spare: list[list[Rollout]] = []
        for _ in range(self._max_resamples + 1):
            missing = self._prompts_per_step - len(kept)
            for group in self._sample(missing, seconds):
                useful = self._max_resamples == 0 or has_signal(group)
                (kept if useful else spare).append(group)
            if len(kept) == self._prompts_per_step:
                break
        filled = kept + spare[: self._prompts_per_step - len(kept)]
        rollouts = [
            _numbered(rollout, number) for number, group in enumerate(filled) for rollout in group
        ]
        return Collected(
            rollouts=rollouts,
            seconds=seconds,
            resampled=len(kept) + len(spare) - self._prompts_per_step,
            position=self.prompts.position,
            num_calls=self.num_calls,
        )

    def _sample(self, count: int, seconds: dict[str, float]) -> list[list[Rollout]]:
        found = collect_scored(
            self.prompts.take(count),
            self._sampling,
            engine=self._engine,
            scorer=self._scorer,
            num_samples=self._group_size,
            seed=draw_seed(self._seed, self.num_calls),
            greedy=self._greedy,
            env=self._env,
            encode=self._encode,
        )
        self.num_calls += 1
        for name, taken in found.seconds.items():
            seconds[name] += taken
        return by_group(found.rollouts)


def _numbered(rollout: Rollout, group: int) -> Rollout:
    greedy = rollout.greedy and dataclasses.replace(rollout.greedy, group=group)
    return dataclasses.replace(rollout, group=group, greedy=greedy)


def has_signal(group: Sequence[Rollout]) -> bool:
    """Whether the valid scores of a group, and its greedy one's, differ: only then it teaches."""
    scores = [rollout.score for rollout in group]
    scores += [rollout.greedy.score for rollout in group if rollout.greedy is not None]
    return len({score.value for score in scores if score is not None and score.ok}) > 1
