"""Evaluation: greedy accuracy, mean@k and pass@k on held-out problems, with 95 % intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.protocols import Engine, Scorer
from posttrain.types import Prompt, Rollout, Sampling, Score

_Z = 1.959964  # 95 % of a normal distribution lies within this many deviations


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and the interval that holds the true one in 95 of 100 evaluations."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What :func:`evaluate` found; ``greedy`` and ``sampled`` hold every scored rollout.

    ``parts`` are the means of the rewards by name, over the greedy answers they could score;
    ``invalid`` is the share of all answers whose grader broke.
    """

    correct_by: str
    estimates: Mapping[str, Estimate]
    mean_reward: float
    parts: Mapping[str, float]
    invalid: float
    greedy: Sequence[Rollout]
    sampled: Sequence[Rollout] = ()

    @property
    def accuracy(self) -> Estimate:
        """Greedy accuracy."""
        return self.estimates["accuracy"]

    @property
    def rollouts(self) -> list[Rollout]:
        """Every scored answer, the greedy ones first."""
        return [*self.greedy, *self.sampled]

    @property
    def reason(self) -> str:
        """What the first broken score said; empty where none broke."""
        return next((r.score.reason for r in self.rollouts if r.score and not r.score.ok), "")


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    scorer: Scorer,
    correct_by: str,
    sampling: Sampling,
    samples: int = 0,
    seed: int = 0,
) -> Evaluation:
    """Answer every prompt greedily, and ``samples`` times as ``sampling`` says.

    An answer is right when the reward named ``correct_by`` gives it 1. An answer whose grader
    broke counts as wrong here, and the share of those is reported as ``invalid``.
    """
    if not prompts:
        raise ValueError("prompts: nothing to evaluate; the test split is empty")
    greedy_sampling = dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    greedy = answer(engine, prompts, scorer=scorer, sampling=greedy_sampling, samples=1, seed=seed)
    greedy = _decided(greedy, correct_by)
    right = [is_correct(rollout, correct_by) for rollout in greedy]
    estimates = {"accuracy": share(sum(right), len(right))}
    sampled: list[Rollout] = []
    if samples:
        sampled = answer(
            engine, prompts, scorer=scorer, sampling=sampling, samples=samples, seed=seed
        )
        sampled = _decided(sampled, correct_by)
        counts = [0] * len(prompts)
        for rollout in sampled:
            counts[rollout.group] += is_correct(rollout, correct_by)
        estimates[f"mean@{samples}"] = mean([count / samples for count in counts])
        for k in _powers_of_two(samples):
            estimates[f"pass@{k}"] = mean([pass_at_k(samples, count, k=k) for count in counts])
    scores = [rollout.score for rollout in greedy if rollout.score is not None]
    every = [rollout.score for rollout in (*greedy, *sampled) if rollout.score is not None]
    return Evaluation(
        correct_by=correct_by,
        estimates=estimates,
        mean_reward=sum(score.value for score in scores if score.ok) / len(scores),
        parts=_parts(scores),
        invalid=sum(not score.ok for score in every) / len(every),
        greedy=greedy,
        sampled=sampled,
    )


def _decided(rollouts: Sequence[Rollout], correct_by: str) -> list[Rollout]:
    """Here the reward that decides counts, even if it only watches: where it broke, all did."""
    return [
        dataclasses.replace(rollout, score=dataclasses.replace(rollout.score, state="invalid"))
        if rollout.score and rollout.score.ok and rollout.score.parts.get(f"{correct_by}/broken")
        else rollout
        for rollout in rollouts
    ]


def _parts(scores: Sequence[Score]) -> dict[str, float]:
    """Means of the rewards by name, over the answers that each could score."""
    known = [score.parts for score in scores if score.ok]
    names = dict.fromkeys(name for parts in known for name in parts)
    values = {name: [parts[name] for parts in known if name in parts] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def is_correct(rollout: Rollout, correct_by: str) -> bool:
    """Whether the reward that decides gave full marks."""
    score = rollout.score
    return score is not None and score.ok and score.parts.get(correct_by, 0.0) >= 1 - 1e-9


def pass_at_k(samples: int, correct: int, *, k: int) -> float:
    """Chance that at least one of k answers is right: ``1 − C(n − c, k) / C(n, k)``, unbiased.

    Chen et al., 2021, arXiv:2107.03374.

    >>> pass_at_k(4, 1, k=2)
    0.5
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: must be between 1 and the {samples} samples, got {k}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def share(hits: float, total: int) -> Estimate:
    """A share with its Wilson interval, which stays inside [0, 1] and holds for few problems.

    >>> print(share(9, 10))
    90.0% [59.6%, 98.2%]
    """
    value, square = hits / total, _Z**2
    centre = (value + square / (2 * total)) / (1 + square / total)
    half = _Z / (1 + square / total)
    half *= math.sqrt(value * (1 - value) / total + square / (4 * total**2))
    return Estimate(value=value, low=max(0.0, centre - half), high=min(1.0, centre + half))


def mean(values: Sequence[float]) -> Estimate:
    """A mean over problems with its normal interval, cut to [0, 1].

    Where all problems agree, that interval has no width, however few they are; the Wilson interval
    of :func:`share` stands in.

    >>> print(mean([1.0, 0.0, 1.0, 0.0]))
    50.0% [0.0%, 100.0%]
    >>> print(mean([0.0]))
    0.0% [0.0%, 79.3%]
    """
    size = len(values)
    if min(values) == max(values):
        return share(values[0] * size, size)
    average = sum(values) / size
    variance = sum((value - average) ** 2 for value in values) / max(1, size - 1)
    half = _Z * math.sqrt(variance / size)
    return Estimate(value=average, low=max(0.0, average - half), high=min(1.0, average + half))


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    scorer: Scorer,
    sampling: Sampling,
    samples: int,
    seed: int,
) -> list[Rollout]:
    """``samples`` scored completions of every prompt; ``group`` numbers the prompts."""
    completions = engine.generate(prompts, sampling, num_samples=samples, seed=seed)
    rollouts = [
        Rollout(prompt=prompt, completion=completion, group=group)
        for group, (prompt, answers) in enumerate(zip(prompts, completions, strict=True))
        for completion in answers
    ]
    scores = scorer.score(rollouts)
    return [
        dataclasses.replace(rollout, score=score)
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


def _powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, … up to the number of samples, which is always the last."""
    powers = [2**exponent for exponent in range(samples.bit_length())]
    return sorted({*(power for power in powers if power <= samples), samples})
