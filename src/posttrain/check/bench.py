"""What the checks share: the parts of a recipe, and what earlier checks measured with them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from posttrain.build.setup import Setup, Supplied
from posttrain.check.verdicts import TokenRow, Verdict
from posttrain.config import DpoSection, Recipe, Resolved, RewardSection, RlSection, SftSection
from posttrain.config.usual import far_from_usual
from posttrain.data.template import Template
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Scorer, Task
from posttrain.types import Prompt, Rollout

if TYPE_CHECKING:
    from posttrain.check.trial import Trial

Moment = Literal["check", "start", "rl"]
"""When checks run: ``posttrain check``, the start of a run, or the start of its stage rl."""


class Bench:
    """Parts that checks make one after the other: each is an attribute once a check has made it.

    The table names the attributes that a check needs; it is skipped where one could not be made.
    """

    read: Callable[[], Recipe]
    recipe: Resolved
    stages: Sequence[str]
    """The stages still to come; the section of each is an attribute too."""
    sft: SftSection
    reward: RewardSection
    dpo: DpoSection
    rl: RlSection
    task: Task
    policy: Policy
    template: Template
    setup: Setup
    scorer: Scorer
    engine: Engine
    backbone: Policy
    """The model that the stage reward trains."""
    splits: Mapping[str, Sequence[Prompt]]
    rendered: Prompt
    """The first prompt as the model sees it."""
    limit: int
    """The most tokens of an answer."""
    ready: bool
    """Set once everything that the rewards need (a server, say) is available."""
    answers: Mapping[str, Sequence[Rollout]]
    """Scored rollouts by kind: ``gold``, ``wrong`` (the gold of another row) and ``empty``."""
    groups: Sequence[Sequence[Rollout]]
    """Real rollouts, sampled and scored as a run would."""
    seconds: Mapping[str, float]
    """Seconds that sampling (``rollout``) and grading (``reward``) of the groups took."""
    episode: Sequence[TokenRow]
    """The tokens of one of them, where there is an environment."""
    trial: Trial
    less: Trial
    """A step on some of the rollouts of ``trial``."""
    decode_seconds: float
    """Seconds of sampling the groups again, without compilation and warm-up."""

    stand_in: bool = False
    """Whether other rewards stand in for a reward model that this run is still to train."""
    untrained: bool = False
    """Whether stages before rl will still change the model."""
    own_engine: bool = False
    """Whether the engine is the caller's object: its precision and its weights are unknown."""
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
        """Set the recipe and the stages to come."""
        self.recipe, self.stages = recipe, stages
        self.__dict__.update((stage, getattr(recipe, stage)) for stage in stages)

    def take_setup(self, setup: Setup) -> None:
        """Set the setup, and each part of it that exists already."""
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
        """Whether all attributes in ``needs``, separated by spaces, are set."""
        return all(name in self.__dict__ for name in needs.split())

    def some_prompts(self, limit: int) -> list[Prompt]:
        """At most ``limit`` train prompts, spread evenly over the split."""
        prompts = self.task.prompts("train")
        return list(prompts[:: max(1, -(-len(prompts) // limit))])

    @property
    def rollouts(self) -> list[Rollout]:
        """All sampled rollouts."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def known(self) -> list[Rollout]:
        """All graded answers of known quality."""
        return [rollout for rollouts in self.answers.values() for rollout in rollouts]

    @property
    def played(self) -> bool:
        """Whether an environment plays the prompts, and so reads their columns too."""
        return (self.recipe.task or {}).get("env") is not None

    @property
    def env_scores(self) -> bool:
        """Whether the environment scored real rollouts: the task's rewards stand beside it then."""
        found = self.rollouts if self.has("groups") else []
        return any(r.score is not None and "env" in r.score.parts for r in found)

    @property
    def to_fix(self) -> str:
        """What a broken score of a real rollout is the fault of."""
        return "the environment, or the reward" if self.setup.env is not None else "the reward"

    def usual_first(self, fix: str, *, of: tuple[str, ...]) -> str:
        """The fix; or that of an unusual setting whose key begins with one ``of`` these."""
        far = far_from_usual(self.recipe)
        found = next((usual.advice(key) for key, _, usual in far if key.startswith(of)), "")
        return f"{found} first: it is far from usual" if found else fix


@contextlib.contextmanager
def warnings_as_verdicts() -> Iterator[list[Verdict]]:
    """A list that, after the block, holds a verdict for each Python warning inside it."""
    verdicts: list[Verdict] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield verdicts
    verdicts += [
        Verdict("warn", str(warning.message), "fix the file, or accept it")
        for warning in caught
        if issubclass(warning.category, UserWarning)
    ]


@contextlib.contextmanager
def unchanged(policy: Policy) -> Iterator[None]:
    """Restore weights and random state after the block, whatever happens inside."""
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
