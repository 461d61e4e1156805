"""The same from Python: ``posttrain.rl``, ``posttrain.sft``, ``posttrain.evaluate``.

Options are those of the recipe's section of the same name, checked by the same rules; those of
``[run]`` and ``[model]`` are ``run_options={"trackers": ["wandb"]}`` and ``model_options``. A run
that was cut short goes on exactly where it was when it is called again with ``resume=True``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.build.model_source import find_source, folder_name, model_name, over
from posttrain.build.rows import Rows, data_name, has_test, rows_task
from posttrain.build.setup import Supplied
from posttrain.config import Recipe, recipe_from_dict
from posttrain.config.recipe_rules import NO_WEIGHT
from posttrain.config.specs import MODEL_REWARD
from posttrain.pipelines.evaluate import Evaluation
from posttrain.protocols import Env, Reward, Split, Task
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.play import Ask, Place, Show
from posttrain.stages.eval import evaluate_recipe
from posttrain.stages.generate import Asked, generate_from, open_player, stopping
from posttrain.stages.generate import LoadedPolicy as Policy
from posttrain.stages.results import Run
from posttrain.stages.run import run
from posttrain.types import Rollout

__all__ = [
    "dpo",
    "evaluate",
    "generate",
    "Policy",
    "play",
    "prefer",
    "reward",
    "rl",
    "sft",
]

Rewards = str | Reward | Mapping[Any, Any] | Sequence[str | Reward]


def rl(
    *,
    model: str | Path = "tiny",
    prompts: str | Path | Rows | None = None,
    reward: Rewards | None = None,
    task: str | Mapping[str, Any] | Task | None = None,
    test_prompts: str | Path | Rows = (),
    folder: str | Path = "runs/rl",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    evaluate: bool = True,
    run_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    grading: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Reinforcement learning: a model, prompts and a reward in; a run with a better model out.

    ``prompts`` are strings, or rows with a ``prompt`` and the columns that the reward wants, or a
    file or hub id of those; ``reward`` is a function, a name, a list of them, or a table with
    weights. In their place ``task`` names a task, or is one. With test prompts the model is
    evaluated before and after. Rewards run in worker processes; ``grading={"workers": 0}`` runs
    them in this one, where they may change its variables; an environment (``task={"name": ...,
    "env": ...}``) runs as ``environment`` says in the same way. The other options are those of
    ``[rl]``: ``algorithm="grpo"``, ``steps=100`` …
    """
    chosen = rows_task(task, prompts=prompts, test_prompts=test_prompts)
    stages = ["rl", "eval"] if evaluate and has_test(chosen) else ["rl"]
    given = {
        **_begun(
            model,
            folder,
            stages=stages,
            seed=seed,
            options=(run_options, model_options),
            adapter=adapter,
        ),
        "grading": dict(grading or {}),
        "environment": dict(environment or {}),
        "rl": options,
    }
    return run(*_recipe(given, chosen, reward=reward), resume=resume, allow_changes=allow_changes)


def sft(
    *,
    model: str | Path = "tiny",
    data: str | Path | Rows = "task",
    task: str | Mapping[str, Any] | Task | None = None,
    folder: str | Path = "runs/sft",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    run_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Supervised fine-tuning on demonstrations, a file or rows, or on a task's own answers.

    The other options are those of ``[sft]``: ``epochs=2``, ``learning_rate=1e-4`` …
    """
    chosen = rows_task(task, prompts=None, test_prompts=())
    given = {
        **_begun(
            model,
            folder,
            stages=["sft"],
            seed=seed,
            options=(run_options, model_options),
            adapter=adapter,
        ),
        "sft": {"data": data_name(data), **options},
    }
    return run(*_recipe(given, chosen), resume=resume, allow_changes=allow_changes)


def prefer(
    *,
    model: str | Path,
    task: str | Mapping[str, Any] | Task | None = None,
    prompts: str | Path | Rows | None = None,
    test_prompts: str | Path | Rows = (),
    reward: Rewards | None = None,
    folder: str | Path = "runs/prefer",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    run_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Preferences between completions of a model, by rewards: ``FOLDER/prefer/pairs.jsonl``.

    ``reward`` is what the annotator goes by: names with weights; without, the task's own rewards.
    The other options are those of ``[prefer]``: ``error_rate=0.1``, ``samples=4`` …
    """
    chosen = rows_task(task, prompts=prompts, test_prompts=test_prompts)
    table = _weights(reward)
    if not all(isinstance(name, str) for name in table):
        raise ValueError(
            'reward: give the annotator\'s rewards by name, "my_module:my_function" say'
        )
    given = {
        **_begun(model, folder, stages=["prefer"], seed=seed, options=(run_options, model_options)),
        "prefer": {"rewards": dict(table), **options},
    }
    return run(*_recipe(given, chosen), resume=resume, allow_changes=allow_changes)


def reward(
    *,
    model: str | Path,
    data: str | Path | Rows,
    folder: str | Path = "runs/reward",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    run_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A reward model from preferences, a file or rows: pairs, ranked sets, scored completions.

    The other options are those of ``[reward]``: ``epochs=2``, ``learning_rate=1e-5`` …
    """
    sections = (run_options, model_options)
    given = _begun(
        model, folder, stages=["reward"], seed=seed, options=sections, adapter=adapter
    ) | {"reward": {"data": data_name(data), **options}}
    return run(recipe_from_dict(given), resume=resume, allow_changes=allow_changes)


def dpo(
    *,
    model: str | Path,
    data: str | Path | Rows,
    folder: str | Path = "runs/dpo",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    run_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A policy that has learned from preferences, a file or rows, without a reward model.

    The other options are those of ``[dpo]``: ``loss="ipo"``, ``beta=0.1``, ``epochs=2`` …
    """
    sections = (run_options, model_options)
    given = _begun(model, folder, stages=["dpo"], seed=seed, options=sections, adapter=adapter) | {
        "dpo": {"data": data_name(data), **options}
    }
    return run(recipe_from_dict(given), resume=resume, allow_changes=allow_changes)


def evaluate(
    model: str | Path,
    *,
    task: str | Mapping[str, Any] | Task | None = None,
    prompts: str | Path | Rows | None = None,
    reward: Rewards | None = None,
    seed: int | None = None,
    stop: Sequence[str] | None = None,
    run_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    grading: Mapping[str, Any] | None = None,
    **options: Any,
) -> Evaluation:
    """Accuracy of a model on a task's test problems, or on ``prompts`` under ``reward``.

    A run folder, or a model folder inside one, is evaluated as the run did: its task, rewards,
    limits, chat template and seed, each unless it is given here; problems that it was trained on
    are refused. A recipe gives the same, and its model. ``stop`` are strings that end an answer.
    The other options are those of ``[eval]``: ``problems=200``, ``samples=8`` …
    """
    source = find_source(model)
    chosen = rows_task(task, prompts=None, test_prompts=prompts if prompts is not None else ())
    named = chosen if isinstance(chosen, Mapping) else None
    brought = {"task": chosen, "rewards": reward}
    given = [part for part, value in brought.items() if value is not None]
    values = over(
        source.evaluation(task=named, given=given),
        run={"seed": seed, **(run_options or {})},
        model=model_options or {},
        grading=grading or {},
        eval=options,
        **stopping(stop),
    )
    replaced = [part for part in given if not (part == "task" and named)]
    values = {name: table for name, table in values.items() if name not in replaced}
    for change in source.changes(given=given):
        warnings.warn(change, stacklevel=2)
    recipe, supplied = _recipe(values, None if named else chosen, reward=reward)
    return evaluate_recipe(recipe, supplied, chosen=prompts is not None)


def generate(
    model: str | Path,
    prompt: Asked | Sequence[Asked],
    *,
    num_samples: int = 1,
    seed: int = 0,
    chat: bool | str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] | None = None,
) -> list[Rollout]:
    """What a model answers to a prompt, up to a string of ``stop``; greedy without a temperature.

    The prompt is a text, messages of a chat, or a list of prompts. Each call loads the model: a
    :class:`Policy` stays loaded. A run folder, a model folder inside one, or a recipe also brings
    its chat template, system message, stop strings and longest answer. Otherwise, without
    ``max_new_tokens``, 256 or what the context leaves.
    """
    return generate_from(
        find_source(model),
        prompt,
        num_samples=num_samples,
        seed=seed,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
    )


def play(
    model: str | Path,
    env: str | Path | Mapping[str, Any] | Env | Callable[..., Any] | None = None,
    *,
    prompt: str | None = None,
    task: str | None = None,
    split: Split = "train",
    index: int = 0,
    seed: int = 0,
    human: Place | None = None,
    ask: Ask = input,
    show: Show = lambda rollout: None,
    chat: bool | str | None = None,
    max_new_tokens: int | None = None,
    max_turns: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] | None = None,
) -> Rollout:
    """One episode of a model in an environment, with its score: all turns, with their tokens.

    ``env`` is an environment, a class or function of one, its name or
    ``{"name": "my_env:Asks", "times": 2}``, or a recipe or run whose environment is meant; without
    one it is that of the model's own run or recipe. It begins with ``prompt``, or with one of a
    task. ``show`` is called after every turn. ``human`` has ``ask`` write in the place of the
    policy or of the environment: a function from what is answered to the answer, which raises
    EOFError to end.
    """
    player = open_player(
        find_source(model),
        str(env) if isinstance(env, Path) else env,
        prompt=prompt,
        task=task,
        human=human,
        ask=ask,
        show=show,
        chat=chat,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
    )
    with contextlib.closing(player):
        return player.play(player.prompt(split, index), seed=seed)


def _begun(
    model: object,
    folder: object,
    *,
    stages: list[str],
    seed: int,
    options: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    adapter: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The sections ``[run]``, ``[model]`` and ``[adapter]`` of a job."""
    place = folder_name(folder, example=f"runs/{stages[0]}")
    run = {"folder": place, "seed": seed, "stages": stages}
    more, loading = (dict(given or {}) for given in options)
    if twice := sorted(run.keys() & more.keys()):
        raise ValueError(
            f"run_options: {', '.join(twice)} cannot be given here; folder and seed are parameters "
            "of their own, and each stage is a function"
        )
    return {
        "run": {**run, **more},
        "model": {"name": model_name(model), **loading},
        "adapter": dict(adapter or {}),
    }


def _recipe(
    given: dict[str, Any],
    task: Task | Mapping[str, Any] | None,
    *,
    reward: Rewards | None = None,
) -> tuple[Recipe, Supplied]:
    """A recipe, and beside it the parts that are objects; what has a name goes into the recipe."""
    if isinstance(task, Mapping):
        given, task = {**given, "task": dict(task)}, None
    table = _weights(reward)
    if all(isinstance(name, str) for name in table):
        named = {} if reward is None else {"rewards": dict(table)}
        return recipe_from_dict({**given, **named}), _supplied(task=task)
    if MODEL_REWARD in table:
        raise ValueError(
            "reward: a reward model and functions together need names; give the functions as "
            '"my_module:my_function", importable from the current folder'
        )
    if "rl" in given and not any(table.values()):
        raise ValueError(f"reward: {NO_WEIGHT}")
    return recipe_from_dict(given), _supplied(task=task, rewards=RewardScorer(table))


def _supplied(**given: Any) -> Supplied:
    parts: Any = {name: part for name, part in given.items() if part is not None}
    return Supplied(**parts)


def _weights(reward: Rewards | None) -> Mapping[Any, Any]:
    """The rewards with their weights; one alone, and each of a list, has 1."""
    if isinstance(reward, Mapping):
        return reward
    listed = [] if reward is None else reward if isinstance(reward, list | tuple) else [reward]
    if twice := [each for place, each in enumerate(listed) if each in listed[:place]]:
        raise ValueError(f"reward: {twice[0]!r} is there twice; name each once")
    return dict.fromkeys(listed, 1.0)
