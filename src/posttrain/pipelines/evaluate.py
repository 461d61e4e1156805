"""Evaluation on held-out problems: accuracy, mean@k and pass@k with 95% intervals, rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.row_objects import to_frame
from posttrain.protocols import Sampler
from posttrain.types import Prompt, Rollout, Sampling, Score
from posttrain.types.marks import (
    Marks,
    estimate_label,
    exceeding_one,
    has_full_marks,
    mean_parts,
    no_full_marks,
    reward_label,
)
from posttrain.types.text import html_table, shortened

SHOWN = 12  # numbers in one line
_Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and the interval that holds the true one in 95 of 100 evaluations."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """What :func:`evaluate` found; ``greedy`` and ``sampled`` hold every scored rollout.

    ``estimates`` has ``accuracy``, ``mean@k`` and ``pass@k`` by the reward that checks answers;
    where none does, ``full_marks/NAME``, ``mean@k/NAME`` and ``pass@k/NAME`` of each reward that is
    learned from. ``above_one`` are the rewards whose full marks are unknown, with their largest
    score: it is above 1, and they declare no maximum. ``parts`` are the means of the rewards by
    name, over the greedy answers they could score; ``invalid`` is the share of all answers whose
    grader broke.
    """

    marks: Marks
    estimates: Mapping[str, Estimate]
    mean_reward: float
    parts: Mapping[str, float]
    invalid: float
    greedy: Sequence[Rollout]
    sampled: Sequence[Rollout] = ()
    above_one: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy_by(self) -> str:
        """The reward that checks answers; empty where none does."""
        return self.marks.check

    @property
    def accuracy(self) -> Estimate | None:
        """Greedy accuracy; None where nothing checks answers."""
        return self.estimates.get("accuracy")

    def is_right(self, rollout: Rollout) -> bool | None:
        """Whether an answer is right; None where no reward checks answers, or its grader broke."""
        known = self.accuracy is not None and rollout.score is not None and rollout.score.ok
        return has_full_marks(rollout, self.marks.check, marks=self.marks) if known else None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics logged for one evaluation."""
        found = {
            f"eval/{name}": estimate.value
            for name, estimate in self.estimates.items()
            if name == "accuracy" or name.startswith("full_marks/")
        }
        found |= {f"eval/part/{name}": value for name, value in self.parts.items()}
        return {**found, "eval/reward": self.mean_reward, "eval/invalid": self.invalid}

    @property
    def rollouts(self) -> list[Rollout]:
        """Every scored answer, the greedy ones first."""
        return [*self.greedy, *self.sampled]

    @property
    def reason(self) -> str:
        """The reason of the first broken score; empty where none broke."""
        return next((r.score.reason for r in self.rollouts if r.score and not r.score.ok), "")

    def rows(self) -> list[dict[str, Any]]:
        """Every answer as a row: what was asked and said, its score, and each reward's part."""
        found = []
        for kind, rollouts in (("greedy", self.greedy), ("sampled", self.sampled)):
            for rollout in rollouts:
                score = rollout.score
                row: dict[str, Any] = {
                    "problem": rollout.group,
                    "drawn": kind,
                    "prompt": rollout.prompt.shown,
                    "completion": rollout.text,
                    "right": self.is_right(rollout),
                    "reward": score.value if score is not None and score.ok else None,
                    "state": None if score is None else score.state,
                    "num_tokens": sum(rollout.mask),
                    "stop_reason": rollout.stop_reason,
                }
                parts = {} if score is None else score.parts
                found.append(row | {f"part/{name}": value for name, value in parts.items()})
        return found

    def to_pandas(self) -> Any:
        """The :meth:`rows` as a DataFrame."""
        return to_frame(self.rows())

    def __repr__(self) -> str:
        """The estimates and means in a few words: the rollouts would be pages."""
        facts = self._facts()
        more = f", and {len(facts) - SHOWN} more" if len(facts) > SHOWN else ""
        texts = ", ".join(f"{shortened(name, 60)} {value}" for name, value in facts[:SHOWN])
        return f"Evaluation of {len(self.greedy)} problems: {texts}{more}"

    def _repr_html_(self) -> str:
        """The numbers, and the first answers, for a notebook."""
        numbers = html_table([("", "value"), *self._facts()], title=f"{len(self.greedy)} problems")
        marks = {True: "right", False: "wrong", None: "?"}
        answers = [
            (shortened(r.prompt.shown, 200), shortened(r.text, 200), marks[self.is_right(r)])
            for r in self.greedy[:5]
        ]
        return numbers + html_table([("prompt", "answer", ""), *answers])

    def _facts(self) -> list[tuple[str, str]]:
        """What came out, by name, in words."""
        facts = [
            (estimate_label(name, self.accuracy_by), str(estimate))
            for name, estimate in self.estimates.items()
        ]
        for name, most in self.above_one.items():
            label = estimate_label(self.marks.metric_name(name), self.accuracy_by)
            facts.append((label, no_full_marks(most)))
        facts.append(("mean reward", f"{self.mean_reward:.3f}"))
        facts += [
            (reward_label(name, self.marks.weights), f"{value:.3f}")
            for name, value in self.parts.items()
        ]
        return facts + ([("broken scores", f"{self.invalid:.1%}")] if self.invalid else [])


def evaluate(
    sample: Sampler,
    prompts: Sequence[Prompt],
    *,
    marks: Marks,
    sampling: Sampling,
    samples: int = 0,
    seed: int = 0,
) -> Evaluation:
    """Answer every prompt greedily, and ``samples`` times as ``sampling`` says.

    An answer is right when the reward that checks answers gives it full marks. An answer whose
    grader broke counts as wrong here, and the share of those is reported as ``invalid``.
    """
    if not prompts:
        raise ValueError("prompts: nothing to evaluate; the test split is empty")
    greedy_sampling = dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    found = sample(prompts, greedy_sampling, num_samples=1, seed=seed)
    greedy, sampled = _invalid_where_check_broke(found.rollouts, marks.check), list[Rollout]()
    if samples:
        found = sample(prompts, sampling, num_samples=samples, seed=seed)
        sampled = _invalid_where_check_broke(found.rollouts, marks.check)
    unknown = exceeding_one([*greedy, *sampled], marks)
    estimates: dict[str, Estimate] = {}
    for name in marks.counted_rewards:
        if name not in unknown:
            estimates |= _estimates(greedy, sampled, name=name, marks=marks, samples=samples)
    scores = [rollout.score for rollout in greedy if rollout.score is not None]
    every = [rollout.score for rollout in (*greedy, *sampled) if rollout.score is not None]
    return Evaluation(
        marks=marks,
        estimates=estimates,
        mean_reward=_mean_reward(scores),
        parts=mean_parts(scores),
        invalid=sum(not score.ok for score in every) / len(every),
        greedy=greedy,
        sampled=sampled,
        above_one=unknown,
    )


def _mean_reward(scores: Sequence[Score]) -> float:
    """The mean score over the answers that could be scored; 0 where none could."""
    known = [score.value for score in scores if score.ok]
    return sum(known) / len(known) if known else 0.0


def _estimates(
    greedy: Sequence[Rollout], sampled: Sequence[Rollout], *, name: str, marks: Marks, samples: int
) -> dict[str, Estimate]:
    """Shares of answers with full marks, by reward; for the one that checks answers, no suffix."""
    full = sum(has_full_marks(rollout, name, marks=marks) for rollout in greedy)
    suffix = "" if marks.check else f"/{name}"
    found = {marks.metric_name(name): share(full, len(greedy))}
    if not samples:
        return found
    counts = [0] * len(greedy)
    for rollout in sampled:
        counts[rollout.group] += has_full_marks(rollout, name, marks=marks)
    found[f"mean@{samples}{suffix}"] = mean([count / samples for count in counts])
    for k in _powers_of_two(samples):
        found[f"pass@{k}{suffix}"] = mean([pass_at_k(samples, count, k=k) for count in counts])
    return found


def _invalid_where_check_broke(rollouts: Sequence[Rollout], check: str) -> list[Rollout]:
    """Mark invalid what the answer check failed on, even at weight 0."""
    return [
        dataclasses.replace(rollout, score=dataclasses.replace(rollout.score, state="invalid"))
        if rollout.score and rollout.score.ok and rollout.score.parts.get(f"{check}/broken")
        else rollout
        for rollout in rollouts
    ]


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
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    # Rounding alone keeps the bound at an end away from it.
    return Estimate(value=value, low=low if hits else 0.0, high=high if hits < total else 1.0)


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


def _powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, … up to the number of samples, which is always the last."""
    powers = [2**exponent for exponent in range(samples.bit_length())]
    return sorted({*(power for power in powers if power <= samples), samples})
