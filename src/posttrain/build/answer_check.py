"""Which reward of a run checks the answers; where none of them does, the task's own is added."""

from __future__ import annotations

import functools

from posttrain.config.specs import NO_CHECK
from posttrain.protocols import Task
from posttrain.registry import Spec, look_up, options, split
from posttrain.rewards import REWARDS
from posttrain.rewards.bound import BoundReward
from posttrain.rewards.scorer import RewardScorer
from posttrain.types.marks import Marks


def with_check(
    scorer: RewardScorer, task: Task | None, *, accuracy: Spec | None
) -> tuple[RewardScorer, Marks]:
    """The rewards with the one that checks answers among them, and what they all mean.

    That one is, whatever the order of the rewards:

    1. the one that ``accuracy`` names (``task.accuracy`` of a recipe; "none" is none);
    2. the task's own check, where it is among the rewards;
    3. the only reward that declares ``checks_answer``, for who chose it chose what answers look
       like;
    4. the task's own check, added with weight 0.
    """
    own: Spec | None = getattr(task, "accuracy", None)
    if accuracy is not None:
        name, chosen = split(accuracy, kind="task.accuracy")
        if name == NO_CHECK:
            return scorer, marks_of(scorer, "")
        if name not in [reward.name for reward in scorer.rewards]:
            scorer, name = scorer.monitoring(name, chosen)
        elif chosen:
            raise ValueError(
                f"task.accuracy: {name!r} is a reward of this run, and has its options there; give "
                "its name alone"
            )
        return scorer, marks_of(scorer, name)
    checking = [reward.name for reward in scorer.rewards if reward.checks_answer]
    if own is not None:
        name, chosen = split(own, kind="task accuracy")
        if any(_is(reward, name) for reward in scorer.rewards):
            return scorer, marks_of(scorer, name)
        if len(checking) != 1:
            scorer, name = scorer.monitoring(name, chosen)
            return scorer, marks_of(scorer, name)
    return scorer, marks_of(scorer, checking[0] if len(checking) == 1 else "")


def _is(reward: BoundReward, name: str) -> bool:
    """Whether a reward is the one of that name, and not just a function that is called so."""
    function = reward.function
    if isinstance(function, functools.partial):
        function = function.func
    return reward.name == name and function is look_up(name, REWARDS, kind="task accuracy")


def marks_of(scorer: RewardScorer, check: str = "") -> Marks:
    """What the rewards of a scorer say of themselves, and which of them checks answers."""
    full = {reward.name: reward.full_marks for reward in scorer.rewards}
    if check and full[check] is None:
        raise ValueError(f"task.accuracy: {check!r} may give any score; declare its maximum")
    return Marks(
        check=check,
        weights={reward.name: reward.weight for reward in scorer.rewards},
        full={name: most for name, most in full.items() if most is not None},
        undeclared=frozenset(r.name for r in scorer.rewards if r.maximum is None),
        options={reward.name: _options(reward.function) for reward in scorer.rewards},
    )


def _options(function: object) -> dict[str, object]:
    """The options that a reward runs with, as far as a file can hold them."""
    bound = options(function) if callable(function) else {}
    plain = bool | int | float | str | list
    return {name: o.default for name, o in bound.items() if isinstance(o.default, plain)}
