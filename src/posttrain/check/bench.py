"""What the checks work with: the parts of a recipe, and what was found out with them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from posttrain.build.setup import Setup, Supplied
from posttrain.check.verdicts import Verdict
from posttrain.config import Recipe, Resolved, RewardSection, RlSection, SftSection
from posttrain.config.usual import far_from_usual
from posttrain.data.template import Template
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Scorer, Task
from posttrain.types import Prompt, Rollout

if TYPE_CHECKING:
    from posttrain.check.trial import Trial

Moment = Literal["check", "start", "rl"]
"""When it is looked: ``posttrain check``, the start of a run, or that of its stage rl."""


class Bench:
    """Parts that are made one after the other: each is an attribute once a check has made it.

    So the table names what a check needs, and what could not be made leaves it out.
    """

    read: Callable[[], Recipe]
    recipe: Resolved
    stages: Sequence[str]
    """Those still to come; the section of each is an attribute too."""
    sft: SftSection
    reward: RewardSection
    rl: RlSection
    task: Task
    policy: Policy
    template: Template
    setup: Setup
    scorer: Scorer
    engine: Engine
    backbone: Policy
    """What the stage reward trains."""
    splits: Mapping[str, Sequence[Prompt]]
    rendered: Prompt
    """The first prompt as the model sees it."""
    limit: int
    """The longest answer."""
    ready: bool
    """Set where all that the rewards need is there."""
    answers: Mapping[str, Sequence[Rollout]]
    """Scored rollouts by kind: ``gold``, ``wrong`` (the gold of another row) and ``empty``."""
    groups: Sequence[Sequence[Rollout]]
    """Real rollouts, sampled and scored as a run would."""
    seconds: Mapping[str, float]
    """What sampling (``rollout``) and grading (``reward``) these took."""
    trial: Trial
    less: Trial
    """A step on some of the rollouts of ``trial``."""
    decode_seconds: float
    """What sampling the groups takes once warm."""

    stand_in: bool = False
    """Whether other rewards stand in for a reward model that this run is still to train."""
    untrained: bool = False
    """Whether stages before rl will still change the model."""
    own_engine: bool = False
    """Whether the engine was handed over: nothing is known of how it is wired."""
    no_gold: str = ""
    """Why there are no gold answers, where there are none."""
    too_large: bool = False
    """Whether a step cannot fit into memory."""

    def __init__(
        self, moment: Moment, *, fast: bool = False, supplied: Supplied | None = None
    ) -> None:
        self.moment, self.fast = moment, fast
        self.supplied = supplied or Supplied()
        if "engine" in self.supplied:
            self.engine, self.own_engine = self.supplied["engine"], True

    def take(self, recipe: Resolved, stages: Sequence[str]) -> None:
        """Put a recipe with the stages to come on the bench."""
        self.recipe, self.stages = recipe, stages
        self.__dict__.update((stage, getattr(recipe, stage)) for stage in stages)

    def take_setup(self, setup: Setup) -> None:
        """Put a whole setup there, and each part of it that there is."""
        self.setup = setup
        made = {name: getattr(setup, name) for name in ("policy", "template", "task", "scorer")}
        self.__dict__.update((name, part) for name, part in made.items() if part is not None)
        if setup.engine is not None:
            self.engine, self.own_engine = setup.engine, True

    def close(self) -> None:
        """Close the engine, unless it was handed over."""
        if self.has("engine") and not self.own_engine:
            self.engine.close()

    def has(self, needs: str) -> bool:
        """Whether all of these, by name, could be made."""
        return all(name in self.__dict__ for name in needs.split())

    def some_prompts(self, limit: int) -> list[Prompt]:
        """At most ``limit`` train prompts, spread evenly over the split."""
        prompts = self.task.prompts("train")
        return list(prompts[:: max(1, -(-len(prompts) // limit))])

    @property
    def rollouts(self) -> list[Rollout]:
        """All real ones."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def known(self) -> list[Rollout]:
        """All answers whose worth is known."""
        return [rollout for rollouts in self.answers.values() for rollout in rollouts]

    def usual_first(self, fix: str, *, of: tuple[str, ...]) -> str:
        """The fix; or that of a setting ``of`` these that is far from usual: it explains more."""
        far = far_from_usual(self.recipe)
        found = next((usual.advice(key) for key, _, usual in far if key.startswith(of)), "")
        return f"{found} first: it is far from usual" if found else fix


@contextlib.contextmanager
def heard() -> Iterator[list[Verdict]]:
    """What is warned of inside becomes verdicts that warn, there after the block."""
    said: list[Verdict] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [
        Verdict("warn", str(warning.message), "mend the file, or accept it")
        for warning in caught
        if issubclass(warning.category, UserWarning)
    ]


@contextlib.contextmanager
def unchanged(policy: Policy) -> Iterator[None]:
    """Whatever happens inside, weights and random numbers are afterwards what they were."""
    weights = list(policy.model.parameters())
    before = [weight.detach().to("cpu", copy=True) for weight in weights]
    cuda = [weights[0].device] if weights[0].device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            for weight, kept in zip(weights, before, strict=True):
                weight.data.copy_(kept)
                weight.grad = None
