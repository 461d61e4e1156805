"""Functions that a recipe names: looked up in their tables, options filled in and checked.

Nothing here loads torch: tables and signatures are parsed from source text.
:mod:`posttrain.config.piece_facts` calls the pieces, once everything else is right.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.algorithms import table as algorithms
from posttrain.config.describe import elsewhere
from posttrain.config.fields import Spec
from posttrain.config.sections import ModelSection
from posttrain.registry import Function, check_options, did_you_mean, look_up, options, split
from posttrain.written import written_function, written_table

NO_CORRECTION = {"name": "none"}
MODEL_REWARD = "model"
OWN_STAGE = "reward"  # a reward model, or a critic's start, that this run makes itself
NO_CHECK = "none"
_ACCURACY = "that word names the reward that checks the answers"
_OF_ANY_MODEL = ("attention",)
_BESIDE_TASKS = {"accuracy": _ACCURACY, "env": "that word names what replies to the answers"}


def reward_table() -> Mapping[str, Function]:
    """The rewards by name: functions, and the reward model, whose options are those of loading."""
    from posttrain.rewards import REWARDS

    model = written_function("posttrain.models.reward_scorer", "reward_scorer")
    return {**REWARDS, MODEL_REWARD: model}


def engine_table() -> Mapping[str, Function]:
    """The engines by name; loads the libraries they run on."""
    from posttrain.rollout.engines import ENGINES

    return ENGINES


def engine_names() -> Mapping[str, Function]:
    """The engines by name, with their options, without importing them."""
    return written_table("posttrain.rollout.engines", "ENGINES")


def tracker_table() -> Mapping[str, Function]:
    """The trackers that a recipe may name: those that not every run has anyway."""
    from posttrain.track import ALWAYS, TRACKERS

    return {name: made for name, made in TRACKERS.items() if name not in ALWAYS}


def correction_table() -> Mapping[str, Function]:
    """The corrections by name, and ``none`` to switch off the one that truncation brings."""
    return {NO_CORRECTION["name"]: lambda batch: batch, **algorithms.piece_table("correction")}


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
    """Check the options of the tiny model, and that its name is not a mistyped "tiny"."""
    if _mistyped_tiny(model.name):
        raise ValueError(f"model.name: there is no {model.name!r} here; did you mean 'tiny'?")
    if model.options and model.name == "tiny":
        build = written_function("posttrain.models.tiny", "build_tiny")
        _check(build, model.options, key="model.options")
        return
    sizes = [name for name in model.options if name not in (*_OF_ANY_MODEL, "revision")]
    if sizes:
        which = f"only for the model 'tiny', and model.name is {model.name!r}"
        raise ValueError(f"model.options: {', '.join(sizes)}: {which}; leave out")


def of_any_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of loading that do not belong to one model: the others are sizes of tiny."""
    return {name: value for name, value in options.items() if name in _OF_ANY_MODEL}


def _mistyped_tiny(name: str) -> bool:
    if name == "tiny" or abs(len(name) - len("tiny")) > 1 or Path(name).exists():
        return False
    return bool(difflib.get_close_matches(name, ["tiny"], cutoff=0.5))


def typed_task(typed: str, **of_file: Any) -> dict[str, Any]:
    """A task by its name, or a file of prompts with the options of one."""
    if Path(typed).suffix and ":" not in typed:
        return {"name": "file", "path": typed, **of_file}
    return {"name": typed}


def complete_task(given: Spec, *, rewards: Mapping[str, Spec] | None) -> Spec:
    """``[task]``: the task found, with its ``accuracy`` and ``env``; options checked, written out.

    ``rewards`` are those of the recipe, None where they are handed over as objects.
    """
    from posttrain.tasks import TASKS, full_spec

    if "name" not in given:
        raise ValueError(f"task.name: missing; {did_you_mean('', TASKS)}")
    own = full_spec({key: value for key, value in given.items() if key not in _BESIDE_TASKS})
    task = complete(own, {}, table=TASKS, key="task")
    known = options(look_up(task["name"], TASKS, kind="task"))
    for word, meaning in _BESIDE_TASKS.items():
        if word in known:
            raise ValueError(f"task {task['name']!r}: rename its option {word!r}; {meaning}")
    if "accuracy" in given:
        task["accuracy"] = _complete_accuracy(given["accuracy"], rewards)
    return task | complete_env(given)


def complete_env(given: Spec) -> Spec:
    """``task.env`` of a table, where there is one: found, its options checked and written out."""
    from posttrain.envs import CONTEXT, find_env

    if given.get("env") is None:
        return {}
    name, chosen = split(given["env"], kind="task.env")
    full = complete({"name": name, **chosen}, {}, table={name: find_env(name)}, key="task.env")
    # What is not written is known when the model is.
    return {"env": {k: v for k, v in full.items() if k not in CONTEXT or k in chosen}}


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
    from posttrain.rewards.declared import called

    chosen = {option: value for option, value in given.items() if option != "weight"}
    function = look_up(name, reward_table(), kind=key)
    declared = {}
    if "maximum" in chosen and "maximum" not in options(function) and name != MODEL_REWARD:
        declared["maximum"] = take_maximum(function, chosen, kind=f"{key} {name!r}")
    _check(function, chosen, key=f"{key} {name!r}")
    called("check_options", function, kind=f"{key}.{name}", chosen=chosen)
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
