"""Pieces of a recipe that are functions: found in their tables, options filled in and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.weights import WEIGHTS
from posttrain.config.asked import compared
from posttrain.config.describe import elsewhere
from posttrain.config.fields import Spec
from posttrain.config.sections import ModelSection, RlSection
from posttrain.registry import (
    Function,
    check_options,
    did_you_mean,
    look_up,
    options,
    resolve,
    split,
)
from posttrain.types import Batch

NO_CORRECTION = "none"
MODEL_REWARD = "model"
NO_CHECK = "none"
_ACCURACY = "that word names the reward that checks the answers"


def reward_table() -> Mapping[str, Function]:
    """The rewards by name: functions, and the reward model, whose options are those of loading."""
    from posttrain.models.scorer import reward_scorer
    from posttrain.rewards import REWARDS

    return {**REWARDS, MODEL_REWARD: reward_scorer}


def engine_table() -> Mapping[str, Function]:
    """The engines by name."""
    from posttrain.rollout.engines import ENGINES

    return ENGINES


def tiny_model() -> Function:
    """What builds the tiny model; its options are ``model.options``."""
    from posttrain.models.tiny import build_tiny

    return build_tiny


def correction_table() -> Mapping[str, Function]:
    """The corrections by name, and ``none`` to switch off the one that truncation brings."""
    return {NO_CORRECTION: lambda batch: batch, **CORRECTIONS}


def complete(
    given: Spec | None, default: Mapping[str, Any], *, table: Mapping[str, Function], key: str
) -> Spec:
    """The piece ``given``, or the default; found in its table, with every plain option written out.

    A table without a name changes options of the default; one with a name replaces it.

    >>> from posttrain.algorithms.losses import POLICY_LOSSES
    >>> row = {"name": "clipped", "clip_high": 0.28}
    >>> complete({"clip_low": 0.1}, row, table=POLICY_LOSSES, key="rl.loss")
    {'name': 'clipped', 'clip_low': 0.1, 'clip_high': 0.28}
    """
    merged = {**default, **given} if given is not None and "name" not in given else given or default
    name, chosen = split(merged, kind=key)
    function = look_up(name, table, kind=key)
    _check(function, chosen, key=f"{key} {name!r}")
    return {"name": name, **_written_out(function, chosen)}


def check_model(model: ModelSection) -> None:
    """Check the options of the tiny model; loading it takes a second, so only where there are."""
    if model.options and model.name == "tiny":
        _check(tiny_model(), model.options, key="model.options")


def complete_task(given: Spec, *, rewards: Mapping[str, Spec] | None) -> Spec:
    """``[task]``: the task found, its options checked and written out, its ``accuracy`` checked.

    ``rewards`` are those of the recipe, None where they are handed over as objects.
    """
    from posttrain.tasks import TASKS, full_spec

    if "name" not in given:
        raise ValueError(f"task.name: missing; {did_you_mean('', TASKS)}")
    own = full_spec({key: value for key, value in given.items() if key != "accuracy"})
    task = complete(own, {}, table=TASKS, key="task")
    if "accuracy" in options(look_up(task["name"], TASKS, kind="task")):
        raise ValueError(f"task {task['name']!r}: rename its option 'accuracy'; {_ACCURACY}")
    if "accuracy" in given:
        task["accuracy"] = _complete_accuracy(given["accuracy"], rewards)
    return task


def _complete_accuracy(given: Any, rewards: Mapping[str, Spec] | None) -> Spec:
    """``task.accuracy``: a row of ``[rewards]`` by name, another reward, or ``none``."""
    if not isinstance(given, str) and not (isinstance(given, Mapping) and "name" in given):
        raise ValueError(f"task.accuracy: {_ACCURACY}; write a name, or a table with one")
    name, chosen = split(given, kind="task.accuracy")
    if name == MODEL_REWARD:
        raise ValueError(f"task.accuracy: {_ACCURACY}, and a reward model says nothing of right")
    if rewards is not None and (name in rewards or name == NO_CHECK):
        if chosen:
            place = f"stand in [rewards] for {name!r}" if name in rewards else "have no effect"
            raise ValueError(f"task.accuracy: options {place}; give the name alone")
    elif rewards is not None:
        complete_reward(name, {**chosen, "weight": 0.0}, key="task.accuracy")
    return {"name": name, **chosen}


def complete_reward(name: str, given: Spec, *, key: str = "rewards") -> Spec:
    """One row of ``[rewards]``: the function found, its options checked and written out.

    ``maximum`` says what the reward gives at most, where the function has no such option itself.
    """
    from posttrain.rewards.bound import take_maximum

    chosen = {option: value for option, value in given.items() if option != "weight"}
    function = look_up(name, reward_table(), kind=key)
    declared = {}
    if "maximum" in chosen and "maximum" not in options(function) and name != MODEL_REWARD:
        declared["maximum"] = take_maximum(function, chosen, kind=f"{key} {name!r}")
    _check(function, chosen, key=f"{key} {name!r}")
    return {"weight": given["weight"], **declared, **_written_out(function, chosen)}


def _check(function: Function, chosen: Mapping[str, Any], *, key: str) -> None:
    try:
        check_options(function, chosen, kind=key)
    except ValueError as error:
        known = options(function)
        homes = [elsewhere(name) for name in chosen if name not in known]
        hint = next((f"; {home}" for home in homes if home), "")
        raise ValueError(f"{error}{hint}") from None


def _written_out(function: Function, chosen: Mapping[str, Any]) -> Spec:
    """All options of a function, in its order; defaults that TOML cannot hold stay its own."""
    defaults = {
        name: option.default
        for name, option in options(function).items()
        if isinstance(option.default, bool | int | float | str)
        and option.default is not inspect.Parameter.empty
    }
    return {**defaults, **chosen}


def probe(rl: RlSection) -> list[Callable[[], object]]:
    """Each piece of the library, to be called on a few tokens: a bad option raises here and now.

    Groups are as large as the advantage wants them: whether those of the recipe are is a rule.
    """

    def call(name: str, spec: Spec, *, table: Mapping[str, Function]) -> Callable[[], object]:
        def check() -> None:
            function = resolve(spec, table, kind=f"rl.{name}")
            try:
                function(batch.need("values"), batch) if "loss" in name else function(batch)
            except ValueError as error:
                raise ValueError(f"rl.{name}.{error}") from None

        return check

    batch = _tiny_batch(compared(rl))
    pieces: list[tuple[str, Spec, Mapping[str, Function]]] = [
        ("advantage", rl.advantage, ADVANTAGES),
        ("loss", rl.loss, POLICY_LOSSES),
        ("weights", rl.weights, WEIGHTS),
        ("correction", rl.correction, CORRECTIONS),
    ]
    if rl.critic is not None:
        pieces.append(("critic.loss", rl.critic.loss, VALUE_LOSSES))
    return [call(name, spec, table=table) for name, spec, table in pieces if spec["name"] in table]


def _tiny_batch(group_size: int) -> Batch:
    size = 2 * max(2, group_size)
    token = torch.zeros(size, 1)
    rewards, groups = torch.arange(size) % 2, torch.arange(size) * 2 // size
    return Batch.from_rewards(rewards, groups=groups.tolist()).replace(
        old_logprobs=token,
        sampler_logprobs=token,
        values=token,
        returns=token,
        token_rewards=token,
        advantages=token,
        baseline=torch.tensor(0.0),
        score_norms=torch.ones(size),
        greedy_rewards=torch.zeros(size),
    )
