"""Whether an answer is right, and whether it has full marks, from the rewards of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.types.text import Rollout, Score

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The rewards by name: which one checks answers, how much each counts, what full marks are.

    ``check`` is "" where nothing checks answers: then there is no accuracy. ``full`` lacks a reward
    without a largest score, such as a reward model; those in ``undeclared`` declare none and are
    taken to give at most 1, until one is seen to give more. ``options`` are those of each, defaults
    included.
    """

    check: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    full: Mapping[str, float] = field(default_factory=dict)
    undeclared: frozenset[str] = frozenset()
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def counted_rewards(self) -> tuple[str, ...]:
        """The rewards whose full marks are counted: the check, else those that are learned from.

        They are sorted by name, because the order of a table has no meaning.
        """
        if self.check:
            return (self.check,)
        return tuple(sorted(n for n, w in self.weights.items() if w > 0 and n in self.full))

    @property
    def only_shown(self) -> bool:
        """Whether the check of answers has no weight: what is learned is something else."""
        return bool(self.check) and not self.weights.get(self.check)

    def metric_name(self, name: str) -> str:
        """The metric name of the share of answers with full marks of a counted reward."""
        return "accuracy" if self.check else f"full_marks/{name}"


def mean_parts(scores: Sequence[Score]) -> dict[str, float]:
    """Means of the rewards by name, over the valid scores that have each.

    What the turns of an episode earned is 0 where it is missing: a mean over all that are valid.

    >>> whole = Score(value=1.0, parts={"env": 0.5, "env/earned": 0.5})
    >>> mean_parts([whole, Score(value=0.0, parts={"env": 0.0}), Score(value=0.0)])
    {'env': 0.25, 'env/earned': 0.16666666666666666}
    """
    known = [score.parts for score in scores if score.ok]
    names = dict.fromkeys(name for parts in known for name in parts)
    nothing = {name: 0.0 for name in ("earned", "env/earned") if name in names}
    every = [{**nothing, **parts} for parts in known]
    values = {name: [parts[name] for parts in every if name in parts] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def has_full_marks(rollout: Rollout, name: str, *, marks: Marks) -> bool:
    """Whether a reward gave all that it can give."""
    score, most = rollout.score, marks.full.get(name)
    if score is None or not score.ok or most is None or name not in score.parts:
        return False
    return score.parts[name] >= most - _ROUNDING * max(1.0, abs(most))


def is_right(rollout: Rollout, marks: Marks) -> bool:
    """Whether an answer is right by the check; without one, whether all rewards gave full marks."""
    return bool(marks.counted_rewards) and all(
        has_full_marks(rollout, name, marks=marks) for name in marks.counted_rewards
    )


def exceeding_one(rollouts: Sequence[Rollout], marks: Marks) -> dict[str, float]:
    """The largest score of each counted reward that gave more than 1 and declares no maximum.

    The full marks of such a reward are unknown.
    """
    found = {}
    for name in marks.counted_rewards:
        given = [r.score.parts[name] for r in rollouts if r.score and name in r.score.parts]
        if name in marks.undeclared and max(given, default=0.0) > 1 + _ROUNDING:
            found[name] = max(given)
    return found


def estimate_label(name: str, check: str) -> str:
    """The label of an estimate of an evaluation, with the reward that it is measured by.

    >>> [estimate_label(name, "numeric") for name in ("accuracy", "pass@4")]
    ['accuracy (numeric)', 'pass@4 (numeric)']
    >>> [estimate_label(name, "") for name in ("full_marks/format", "pass@4/format")]
    ['full marks of format', 'pass@4, full marks of format']
    """
    kind, _, reward = name.partition("/")
    if not reward:
        return f"{name} ({check})" if check else name
    return f"full marks of {reward}" if kind == "full_marks" else f"{kind}, full marks of {reward}"


def reward_label(name: str, weights: Mapping[str, float]) -> str:
    """A reward by name, and that it is only monitored where its weight is 0.

    >>> reward_label("format", {"format": 0.0})
    'format (monitored)'
    """
    return f"{name} (monitored)" if weights.get(name) == 0 else name


def no_full_marks(largest: float) -> str:
    """The text in place of a share that cannot be computed.

    >>> no_full_marks(10.0)
    '— (no maximum declared; largest seen 10)'
    """
    return f"— (no maximum declared; largest seen {largest:g})"


def how_to_declare(name: str, largest: float) -> str:
    """What to do about a reward that gives more than 1 and does not say how much at most.

    The largest score seen is no proposal: where all answers are wrong, it is that of a wrong one.
    """
    quoted = name if name.isidentifier() else f'"{name}"'
    return (
        f"{name} gave up to {largest:g} and declares no maximum, so nobody knows what full marks "
        f"are: write the most that it can give, {quoted} = {{ weight = …, maximum = … }} in "
        "[rewards], or @posttrain.rewards.declare(maximum=…) over the function"
    )
