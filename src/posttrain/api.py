"""The same from Python: ``posttrain.rl``, ``posttrain.sft``, ``posttrain.evaluate``.

Options are those of the recipe's section of the same name, checked by the same rules, and typed
(:mod:`posttrain.options`). Other sections are mappings: ``run_options={"trackers": ["wandb"]}`` and
``model_options`` for ``[run]`` and ``[model]``, the rest by their own names. A run that was cut
short goes on exactly where it was when it is called again with ``resume=True``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Never, Unpack

from posttrain.build.model_source import find_source, named_model, over
from posttrain.build.rows import data_name, env_spec, has_test, preference_data, rows_task
from posttrain.options.section_options import EvalOptions
from posttrain.options.stage_options import (
    DpoOptions,
    EvaluateOptions,
    PreferOptions,
    RewardOptions,
    RlOptions,
    SftOptions,
)
from posttrain.pipelines.callbacks import Callback, StepDone, Stop
from posttrain.pipelines.evaluate import Evaluation
from posttrain.registry import did_you_mean, options
from posttrain.rollout.play import Ask, Place, Show
from posttrain.stages.eval import evaluate_recipe
from posttrain.stages.generate import open_player
from posttrain.stages.loaded.loaded_policy import Asked, stopping
from posttrain.stages.loaded.loaded_policy import LoadedPolicy as Policy
from posttrain.stages.results import Run, push
from posttrain.stages.whole.from_python import (
    Data,
    EnvLike,
    Model,
    Preferences,
    Rewards,
    TaskLike,
    TrainingCall,
    make_recipe,
    without_our_frames,
)
from posttrain.stages.whole.given_options import check_options, split_sections
from posttrain.types import Rollout

__all__ = [
    "Callback",
    "StepDone",
    "Stop",
    "dpo",
    "evaluate",
    "generate",
    "Policy",
    "play",
    "prefer",
    "push",
    "reward",
    "rl",
    "sft",
]


@without_our_frames
def rl(
    *,
    model: Model = "tiny",
    tokenizer: Any = None,
    prompts: Data | None = None,
    reward: Rewards | None = None,
    task: TaskLike | None = None,
    env: EnvLike | None = None,
    test_prompts: Data = (),
    columns: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    evaluate: bool | EvalOptions = True,
    callbacks: Sequence[Callback] = (),
    **options: Unpack[RlOptions],
) -> Run:
    """Reinforcement learning: a model, prompts and a reward in; a run with a better model out.

    ``model`` is a name, a folder, a run, or a model object with its ``tokenizer``. ``prompts`` are
    strings, or rows with a ``prompt`` and the columns that the reward wants, or a file or hub id;
    ``columns={"prompt": "exercise"}`` says which are meant. ``reward`` is a function, a name, a
    list of them, or a table with weights. In their place ``task`` names a task, or is one. With
    test prompts the model is evaluated before and after, with options of ``[eval]`` if
    ``evaluate`` is a mapping. Rewards run in worker processes; ``grading={"workers": 0}`` runs
    them in this one, where they may change its variables. ``env`` is an environment, its class or
    function, or its name, that answers the model turn after turn and may score the episode in the
    place of a ``reward``; ``environment`` says how it is run. Without a ``folder`` the run goes to
    the next of ``runs/rl-1``, ``runs/rl-2`` …; ``overwrite`` replaces the run in a folder,
    ``resume`` goes on with it, and more ``steps`` prolong it. ``callbacks`` are called after every
    step with a :class:`StepDone`: they add numbers to its record, or end the stage with a
    :class:`Stop`. The other options are those of ``[rl]``: ``algorithm="grpo"``, ``steps=100`` …
    """
    check_options(rl, options)
    named = env_spec(env)
    chosen = rows_task(task, prompts=prompts, test_prompts=test_prompts, columns=columns, env=named)
    evaluated = evaluate is not False and has_test(chosen)
    call = TrainingCall(model, tokenizer, folder, seed, resume, overwrite, allow_changes, callbacks)
    asked = {"eval": dict(evaluate)} if evaluated and isinstance(evaluate, Mapping) else {}
    stages = ["rl", "eval"] if evaluated else ["rl"]
    return call.run(stages, options, beside=asked, task=chosen, reward=reward, env=named)


@without_our_frames
def sft(
    *,
    model: Model = "tiny",
    tokenizer: Any = None,
    data: Data = "task",
    task: TaskLike | None = None,
    env: EnvLike | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    **options: Unpack[SftOptions],
) -> Run:
    """Supervised fine-tuning on demonstrations, a file or rows, or on a task's own answers.

    ``env`` is the environment whose tools the demonstrations call. The other options are those of
    ``[sft]``: ``epochs=2``, ``learning_rate=1e-4`` …
    """
    check_options(sft, options)
    named = env_spec(env)
    chosen = rows_task(task, prompts=None, test_prompts=(), env=named)
    call = TrainingCall(model, tokenizer, folder, seed, resume, overwrite, allow_changes, callbacks)
    return call.run(["sft"], {"data": data_name(data), **options}, task=chosen, env=named)


@without_our_frames
def prefer(
    *,
    model: Model,
    tokenizer: Any = None,
    task: TaskLike | None = None,
    prompts: Data | None = None,
    test_prompts: Data = (),
    columns: Mapping[str, str] | None = None,
    reward: Rewards | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    **options: Unpack[PreferOptions],
) -> Run:
    """Preferences between completions of a model, by rewards: ``FOLDER/prefer/pairs.jsonl``.

    ``reward`` is what the annotator goes by, as in ``rl``; without, the task's own rewards. The
    other options are those of ``[prefer]``: ``error_rate=0.1``, ``samples=4`` …
    """
    check_options(prefer, options)
    chosen = rows_task(task, prompts=prompts, test_prompts=test_prompts, columns=columns)
    call = TrainingCall(model, tokenizer, folder, seed, resume, overwrite, allow_changes)
    return call.run(["prefer"], options, task=chosen, reward=reward)


@without_our_frames
def reward(
    *,
    model: Model,
    data: Preferences,
    tokenizer: Any = None,
    folder: str | Path | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    **options: Unpack[RewardOptions],
) -> Run:
    """A reward model from preferences, a file, rows or a run that has made some.

    Rows are pairs, ranked sets or scored completions.
    The other options are those of ``[reward]``: ``epochs=2``, ``learning_rate=1e-5`` …
    """
    check_options(reward, options)
    call = TrainingCall(model, tokenizer, folder, seed, resume, overwrite, allow_changes, callbacks)
    return call.run(["reward"], preference_data(data, options))


@without_our_frames
def dpo(
    *,
    model: Model,
    data: Preferences,
    tokenizer: Any = None,
    folder: str | Path | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    **options: Unpack[DpoOptions],
) -> Run:
    """A policy that has learned from preferences, without a reward model.

    ``data`` is a file, rows, or a run that has made some.

    The other options are those of ``[dpo]``: ``loss="ipo"``, ``beta=0.1``, ``epochs=2`` …
    """
    check_options(dpo, options)
    call = TrainingCall(model, tokenizer, folder, seed, resume, overwrite, allow_changes, callbacks)
    return call.run(["dpo"], preference_data(data, options))


@without_our_frames
def evaluate(
    model: Model,
    *,
    tokenizer: Any = None,
    task: TaskLike | None = None,
    prompts: Data | None = None,
    columns: Mapping[str, str] | None = None,
    reward: Rewards | None = None,
    env: EnvLike | None = None,
    seed: int | None = None,
    stop: Sequence[str] | None = None,
    **options: Unpack[EvaluateOptions],
) -> Evaluation:
    """Accuracy of a model on a task's test problems, or on ``prompts`` under ``reward``.

    A run folder, or a model folder inside one, is evaluated as the run did: its task, rewards,
    environment, limits, chat template and seed, each unless given here; problems it was trained on
    are refused. A recipe gives the same, and its model. ``stop`` are strings that end an answer.
    The other options are those of ``[eval]``: ``problems=200``, ``samples=8`` …
    """
    check_options(evaluate, options)
    own, sections = split_sections(options)
    sections["run"] = {"seed": seed, **sections.get("run", {})}
    with named_model(model, tokenizer) as name:
        source = find_source(name)
        spec = source.env if env is None and not isinstance(task, str | Mapping) else env_spec(env)
        asked = prompts if prompts is not None else ()
        chosen = rows_task(task, prompts=None, test_prompts=asked, columns=columns, env=spec)
        if chosen is None and env is not None:
            chosen = source.task(env=spec)
        named = chosen if isinstance(chosen, Mapping) else None
        brought = {"task": chosen, "rewards": reward}
        given = [part for part, value in brought.items() if value is not None]
        known = source.evaluation(task=named, given=given)
        values = over(known, **sections, eval=own, **stopping(stop))
        replaced = [part for part in given if not (part == "task" and named)]
        values = {part: table for part, table in values.items() if part not in replaced}
        for change in source.changes(given=given):
            warnings.warn(change, stacklevel=3)
        handed = None if named else chosen
        played = spec if handed is not None else None
        recipe, supplied = make_recipe(values, handed, reward=reward, env=played)
        return evaluate_recipe(recipe, supplied, chosen=prompts is not None)


@without_our_frames
def generate(
    model: Model,
    prompt: Asked | Sequence[Asked],
    *,
    tokenizer: Any = None,
    num_samples: int = 1,
    seed: int = 0,
    chat: bool | str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] | None = None,
    **unknown: Never,
) -> list[Rollout]:
    """What a model answers to a prompt, up to a string of ``stop``; greedy without a temperature.

    The prompt is a text, messages of a chat, or a list of prompts. Each call loads the model: a
    :class:`Policy` stays loaded. A run folder, a model folder inside one, or a recipe also brings
    its chat template, system message, stop strings and longest answer. Otherwise, without
    ``max_new_tokens``, 256 or what the context leaves.
    """
    for name in unknown:
        meant = did_you_mean(name, options(generate))
        raise ValueError(f"generate: unknown option {name!r}; {meant}")
    with Policy(model, tokenizer=tokenizer, chat=chat, stop=stop) as policy:
        return policy.generate(
            prompt,
            num_samples=num_samples,
            seed=seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )


@without_our_frames
def play(
    model: Model,
    env: EnvLike | Path | None = None,
    *,
    tokenizer: Any = None,
    prompt: str | None = None,
    task: str | None = None,
    split: Literal["train", "test"] = "train",
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
    with named_model(model, tokenizer) as name:
        player = open_player(
            find_source(name),
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
