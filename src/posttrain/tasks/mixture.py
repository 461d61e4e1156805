"""Several tasks at once, each as often as its weight says, and scored as it scores."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.protocols import Split, Task
from posttrain.registry import split as split_spec
from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt, Score

TASK = "task"  # the column that names the task of a prompt
OWN = "own_task"  # what a column of that name held before


def mixture_task(*, tasks: Sequence[Mapping[str, Any]]) -> PromptTask:
    """The prompts of several tasks: tables of a name, a ``weight`` (1 by default) and options.

    A batch of training holds them in the proportion of the weights, whatever their numbers. Each
    is scored by its own rewards, and ``[rewards]`` takes their place for all. A task is called by
    its name, or as ``as`` says; that is the column ``task`` of its prompts. Test prompts are all
    those of the tasks.
    """
    made, weights = _made(tasks)
    prompts = {each: _prompts(made, each) for each in ("train", "test")}
    known = {(name, p.id): p for name, task in made.items() for p in _all(task)}
    scores: dict[Any, float] = {}  # none where a task has none: the recipe's are for all
    if all(task.rewards for task in made.values()):
        by_task = ByTask({name: task.rewards for name, task in made.items()})
        by_task.checks_answer = all(_is_checked(task) for task in made.values())
        by_task.maximum = 1.0 if by_task.checks_answer else None
        scores[by_task] = 1.0

    def own(prompt: Prompt) -> tuple[Task, Prompt]:
        name = prompt.columns[TASK]
        return made[name], known[name, prompt.id.removeprefix(f"{name}/")]

    def demonstrate(prompt: Prompt, generator: random.Random) -> Any:
        task, asked = own(prompt)
        show = getattr(task, "demonstrate", None)
        return task.gold(asked) if show is None else show(asked, generator)

    def gold(prompt: Prompt) -> str:
        task, asked = own(prompt)
        return task.gold(asked)

    showing = any(getattr(task, "demonstrate", None) is not None for task in made.values())
    return PromptTask(
        name="mixture",
        rewards=scores,
        train=prompts["train"],
        test=prompts["test"],
        solve=gold,
        demonstrate=demonstrate if showing else None,
        weights=weights,
        told="; ".join(filter(None, (getattr(task, "told", "") for task in made.values()))),
    )


class ByTask:
    """Scores an answer by the rewards of the task that its prompt is of."""

    maximum: float | None = None
    checks_answer: bool = False
    __name__ = "by_task"

    def __init__(self, rewards: Mapping[str, Any]) -> None:
        self._rewards = rewards
        self._scorers = {name: RewardScorer(given) for name, given in rewards.items()}
        for name, scorer in self._scorers.items():
            many = [each.name for each in scorer.rewards if each.trl or each.kind == "scorer"]
            if many:
                raise ValueError(
                    f"task.tasks: {many[0]!r}, a reward of {name!r}, takes lists of completions, "
                    "and in a mixture each is scored alone; write one that takes a completion"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByTask) and self._rewards == other._rewards

    def __hash__(self) -> int:
        return hash(tuple(self._rewards))

    def __call__(self, task: str, **given: Any) -> Score:
        """The score of its own rewards, whose parts are named ``TASK/REWARD``."""
        if OWN in given:
            given[TASK] = given.pop(OWN)
        score = self._scorers[task].score_sample(given)
        parts = {f"{task}/{part}": value for part, value in score.parts.items()}
        return replace(score, parts={task: score.value, **parts})


def _made(tasks: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Task], dict[str, float]]:
    from posttrain.tasks import make_task

    made: dict[str, Task] = {}
    weights: dict[str, float] = {}
    for number, given in enumerate(tasks, start=1):
        name, options = split_spec(given, kind=f"task.tasks[{number}]")
        weight, called = options.pop("weight", 1.0), options.pop("as", name)
        number_like = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number_like or not 0 < weight < math.inf:
            raise ValueError(
                f"task.tasks: the weight of {called!r} must be above 0, got {weight!r}"
            )
        if called in made:
            raise ValueError(
                f"task.tasks: two are called {called!r}; give one another name with as"
            )
        made[called], weights[called] = make_task({"name": name, **options}), float(weight)
        if getattr(made[called], "weights", None):
            raise ValueError(f"task.tasks: {called!r} is a mixture itself; list its tasks here")
    if len(made) < 2:
        raise ValueError(f"task.tasks: a mixture is of at least 2 tasks, got {len(made)}")
    return made, weights


def _prompts(made: Mapping[str, Task], split: Any) -> tuple[Prompt, ...]:
    """All prompts of a split, in turn of each task: the first few are of all."""
    named = [
        [
            replace(prompt, id=f"{name}/{prompt.id}", columns=_columns(prompt, name))
            for prompt in task.prompts(split)
        ]
        for name, task in made.items()
    ]
    rounds = itertools.zip_longest(*named)
    return tuple(prompt for each in rounds for prompt in each if prompt is not None)


def _columns(prompt: Prompt, name: str) -> dict[str, Any]:
    own = {OWN: prompt.columns[TASK]} if TASK in prompt.columns else {}
    return {**prompt.columns, **own, TASK: name}


def _all(task: Task) -> list[Prompt]:
    splits: tuple[Split, ...] = ("train", "test")
    return [prompt for split in splits for prompt in task.prompts(split)]


def _is_checked(task: Task) -> bool:
    """Whether full marks of a task, which are 1, mean that an answer is right."""
    given = [
        spec if isinstance(spec, Mapping) else {"weight": spec} for spec in task.rewards.values()
    ]
    total = sum(float(spec.get("weight", 1.0)) for spec in given)
    return getattr(task, "accuracy", None) is not None and math.isclose(total, 1.0)
