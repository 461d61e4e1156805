"""Makes the parts of a recipe as a run does: what cannot be made is a line of its area."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.build.model_source import check_models
from posttrain.build.sampler import make_plain_sampler
from posttrain.build.setup import (
    choose_device,
    make_policy,
    make_setup,
    make_template,
    monitored,
    named_task,
)
from posttrain.build.several.sweep import members
from posttrain.build.threads import use_threads
from posttrain.check.bench import Bench, warnings_as_verdicts
from posttrain.check.verdicts import Verdict
from posttrain.config import Resolved, cautions, resolve
from posttrain.config.recipe_rules import trains_several
from posttrain.config.specs import MODEL_REWARD, OWN_STAGE
from posttrain.registry import look_up, split
from posttrain.track import TRACKERS


def read_recipe(bench: Bench) -> Iterator[Verdict]:
    """Every key is known, and every rule holds; unusual values get a warning."""
    recipe = resolve(bench.read(), supplied=bench.supplied)
    yield Verdict("pass", f"{' → '.join(recipe.stages)}, every key resolved")
    if trains_several(recipe):
        number = len(members(recipe, supplied=bench.supplied))
        yield Verdict("pass", f"{number} adapters at once, each as this one is checked")
    for caution in cautions(recipe):
        key, _, said = caution.partition(": ")
        text, _, fix = said.partition("; ")
        yield Verdict("warn", text, f"{fix}, or leave it if intended", key)
    model = recipe.rewards.get(MODEL_REWARD)
    bench.stand_in = model is not None and model.get("path", OWN_STAGE) == OWN_STAGE
    stages = list(recipe.stages)
    bench.untrained = "sft" in (stages[: stages.index("rl")] if "rl" in stages else stages)
    bench.take(_without_own_critic(recipe), stages)


def find_trackers(bench: Bench) -> None:
    """Raise where the package of a tracker is not installed."""
    for spec in bench.recipe.run.trackers:
        name, _ = split(spec, kind="run.trackers")
        getattr(look_up(name, TRACKERS, kind="run.trackers"), "check_ready", lambda: None)()


def _without_own_critic(recipe: Resolved) -> Resolved:
    """The recipe with a critic that starts from the policy, where the stage reward comes first."""
    critic = recipe.rl.critic if "rl" in recipe.stages else None
    if critic is None or critic.source != OWN_STAGE:
        return recipe
    begun = critic.model_copy(update={"source": "policy"})
    return recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"critic": begun})})


def take_task(bench: Bench) -> Sequence[Verdict]:
    """Make the task; its Python warnings are verdicts."""
    with warnings_as_verdicts() as verdicts:
        task = bench.supplied.get("task") or named_task(bench.recipe)
    if task is not None:
        bench.task = task
    return verdicts


def load_model(bench: Bench) -> None:
    """The model that is to be trained."""
    check_models(bench.recipe)
    device = choose_device(bench.recipe)
    bench.policy = make_policy(bench.recipe, bench.recipe.model.name, device=device)


def write_chats(bench: Bench) -> None:
    """Make the template that renders prompts."""
    bench.template = make_template(bench.recipe, bench.policy)


def make_rewards(bench: Bench) -> None:
    """Make the rewards and all parts that stages share; nothing where the task is missing."""
    recipe = bench.recipe
    if "name" in (recipe.task or {}) and not bench.has("task"):
        return
    setup = make_setup(
        _with_stand_in(bench) if bench.stand_in else recipe,
        bench.policy,
        device=choose_device(recipe),
        task=bench.task if bench.has("task") else None,
        rewards=bench.supplied.get("rewards"),
    )
    bench.take_setup(setup)


def _with_stand_in(bench: Bench) -> Resolved:
    """The recipe with other rewards instead of a reward model that is still to be trained."""
    given = bench.recipe.rewards
    known: dict[str, Any] = {n: s for n, s in given.items() if n != MODEL_REWARD}
    if not any(spec["weight"] for spec in known.values()):
        task = bench.task.rewards.items() if bench.has("task") else ()
        own = {name: monitored(spec) for name, spec in task}
        known = {name: {**spec, "weight": 1.0} for name, spec in (known or own).items()}
    return bench.recipe.model_copy(update={"rewards": known})


def start_engine(bench: Bench) -> None:
    """The engine that the recipe names, unless one was handed over."""
    if not bench.own_engine:
        bench.engine = make_plain_sampler(bench.setup)


def settle_threads(bench: Bench) -> Verdict:
    """The CPU threads that a run would take."""
    threads = use_threads(bench.recipe, bench.policy)
    return Verdict("pass", f"{threads.number}, {threads.reason}")
