"""The parts of a recipe on the bench: made as a run makes them, one by one, each failure a line."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.build.check.report import Book, Findings
from posttrain.build.finished import check_models
from posttrain.build.parts import (
    Parts,
    choose_device,
    filled,
    make_engine,
    make_parts,
    make_policy,
    make_template,
    monitored,
)
from posttrain.config import Recipe
from posttrain.config.pieces import MODEL_REWARD
from posttrain.config.preference_rules import OWN_STAGE
from posttrain.config.usual import far_from_usual
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Task
from posttrain.tasks import make_task
from posttrain.types import Prompt

if TYPE_CHECKING:
    from posttrain.build.run import Supplied

TRAINED_BEFORE = ("sft",)
STANDS_IN = "the reward model is still to come and may judge otherwise"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the checks work with; ``task`` alone is there where the rest could not be made.

    ``untrained`` says that stages before rl will still change the model, ``stand_in`` that the
    reward model of this run does not exist yet and the task's own rewards stand in for it.
    ``supplied_engine`` says that nothing is known of how the engine is wired, ``under_way`` that
    the stages before rl are done, and what they read has been looked at.
    """

    recipe: Recipe
    task: Task | None
    policy: Policy | None = None
    parts: Parts | None = None
    engine: Engine | None = None
    fast: bool = False
    untrained: bool = False
    stand_in: bool = False
    supplied_engine: bool = False
    under_way: bool = False
    reward_model: Path | None = None

    @property
    def excuse(self) -> str:
        """Why what rests on the rewards cannot be held against the recipe; empty: it can."""
        return STANDS_IN if self.stand_in else ""

    @property
    def learns(self) -> bool:
        """Whether there is an rl stage, and all that it takes."""
        return "rl" in self.recipe.stages and self.ready

    @property
    def ready(self) -> bool:
        """Whether model, task and rewards could be made."""
        return self.parts is not None and self.parts.scorer is not None and self.task is not None

    def close(self) -> None:
        """Close the engine, unless it was handed over."""
        if self.engine is not None and not self.supplied_engine:
            self.engine.close()

    def of_policy(self) -> Policy:
        """The policy, where there is one."""
        assert self.policy is not None, "asked only once it could be loaded"
        return self.policy

    def of_parts(self) -> Parts:
        """The parts, where they could be made."""
        assert self.parts is not None, "asked only once they could be made"
        return self.parts

    def some_prompts(self, limit: int) -> list[Prompt]:
        """At most ``limit`` train prompts, spread evenly over the split."""
        prompts = self.task.prompts("train") if self.task is not None else ()
        return list(prompts[:: max(1, -(-len(prompts) // limit))])

    def usual_first(self, fix: str, *, of: tuple[str, ...]) -> str:
        """The fix; or that of a setting ``of`` these that is far from usual: it explains more."""
        far = far_from_usual(self.recipe)
        found = next((usual.advice(key) for key, _, usual in far if key.startswith(of)), "")
        return f"{found} first: it is far from usual" if found else fix


def make_bench(recipe: Recipe, book: Book, *, fast: bool, supplied: Supplied | None) -> Bench:
    """Make the parts of a resolved recipe; what cannot be made is a line of its area."""
    config, data, rewards = book["config"], book["data"], book["rewards"]
    given_task = supplied.task if supplied is not None else None
    given_engine = supplied.engine if supplied is not None else None
    recipe, stand_in = without_own_models(recipe)
    task, policy, parts = given_task, None, None
    with data.guard("task"), heard(data, "task"):
        task = task or (make_task(recipe.task) if recipe.task is not None else None)
    with config.guard("model"):
        check_models(recipe)
        policy = make_policy(recipe, recipe.model.name, device=choose_device(recipe))
    told = len(data.lines)
    if policy is not None:
        with data.guard("chat"), heard(data, "chat"):
            make_template(recipe, policy)
    missing_task = task is None and recipe.task is not None
    if policy is not None and len(data.lines) == told and not missing_task:
        with rewards.guard("rewards"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="chat: ")  # heard just now
            specs = _stand_in(recipe, task) if stand_in else recipe
            parts = make_parts(
                specs,
                policy,
                device=choose_device(recipe),
                task=task,
                rewards=supplied.rewards if supplied is not None else None,
            )
    bench = Bench(
        recipe=recipe,
        task=task,
        policy=policy,
        parts=parts,
        engine=given_engine,
        fast=fast,
        untrained=_trained_before_rl(recipe),
        stand_in=stand_in,
        supplied_engine=given_engine is not None,
    )
    return with_engine(bench, book["signal"])


def with_engine(bench: Bench, findings: Findings) -> Bench:
    """The bench with the engine that its recipe names, where it needs one and has none."""
    if not bench.learns or bench.engine is not None:
        return bench
    with findings.guard("engine"):
        engine = make_engine(
            filled(bench.recipe.rl).engine,
            bench.of_policy(),
            template=bench.of_parts().template,
            compute=bench.recipe.model.compute,
        )
        return replace(bench, engine=engine)
    return bench


def without_own_models(recipe: Recipe) -> tuple[Recipe, bool]:
    """The recipe without what its own stage reward will make, and whether a reward is missing."""
    critic = recipe.rl.critic if recipe.rl is not None else None
    if recipe.rl is not None and critic is not None and critic.source == OWN_STAGE:
        begun = critic.model_copy(update={"source": "policy"})
        recipe = recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"critic": begun})})
    model = recipe.rewards.get(MODEL_REWARD)
    return recipe, model is not None and model.get("path", OWN_STAGE) == OWN_STAGE


def _stand_in(recipe: Recipe, task: Task | None) -> Recipe:
    """The recipe with other rewards in the place of a model that is still to be trained."""
    known: dict[str, Any] = {n: s for n, s in recipe.rewards.items() if n != MODEL_REWARD}
    if not any(spec["weight"] for spec in known.values()):
        own = {} if task is None else {n: monitored(spec) for n, spec in task.rewards.items()}
        known = {name: {**spec, "weight": 1.0} for name, spec in (known or own).items()}
    return recipe.model_copy(update={"rewards": known})


def _trained_before_rl(recipe: Recipe) -> bool:
    stages = list(recipe.stages)
    before = stages[: stages.index("rl")] if "rl" in stages else stages
    return any(stage in TRAINED_BEFORE for stage in before)


@contextlib.contextmanager
def heard(findings: Findings, name: str) -> Iterator[None]:
    """What is warned of inside becomes a line that warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            findings.warned(name, str(warning.message), fix="mend the file, or accept it")


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
