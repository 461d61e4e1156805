"""``posttrain eval`` and ``generate``: from a model, a run folder or a recipe to what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from posttrain.config import ConfigError, Recipe, recipe_from_dict
from posttrain.config.paths import check_given
from posttrain.config.read import parse_overrides, parse_value
from posttrain.config.specs import complete_task, typed_task
from posttrain.config.toml import value_text
from posttrain.model_paths import check_exists
from posttrain.track.printable import command_line, printable
from posttrain.track.progress import loading

_NOT_ASKED = ("sft", "prefer", "reward", "dpo", "rl")
_OF_RL = (("rl", "engine"), ("rl", "stop"))  # keys of [rl] that an evaluation uses
STAGES = ("--run.stages", '["eval"]')


def evaluation_recipe(
    given: str, *, task: str | None, overrides: Sequence[str], out: Path | None, console: Console
) -> Recipe:
    """The recipe of an evaluation, and a line about what is evaluated where it was not typed."""
    from posttrain.build.grade_file import check_out
    from posttrain.build.model_source import find_source, finished

    source = find_source(given)
    changes = parse_overrides(overrides)
    parts = {path[0] for path in changes} & {"task", "rewards"}
    named = typed_task(task, test_share=1.0) if task is not None else None
    values = source.evaluation(task=named, given=parts)
    recipe = source.recipe(values, [*overrides, *STAGES])
    if recipe.task is None:
        begun = command_line("posttrain", "eval", given, "--task")
        raise ValueError(
            f"eval: name the task; {given} has none. Questions with answers that it has not "
            f"learned from: {begun} QUESTIONS.jsonl; a task by its name: {begun} arithmetic"
        )
    if out is not None:
        for path in recipe.task.values():
            check_out(out, path)
    anew = parts if task is None else {*parts, "task"}
    for line in (*source.told, *source.changes(given=anew)):
        console.print(Text(printable(line), style="yellow"), soft_wrap=True)
    if source.run is not None or source.file:
        whose = source.run if source.run is not None else source.file
        line = f"{recipe.model.name}, with the settings of {whose}"
        console.print(Text(printable(line), style="dim"), soft_wrap=True)
    if source.file and ("model", "name") not in changes and finished(recipe.run.folder):
        command = command_line("posttrain", "eval", recipe.run.folder)
        line = f"{recipe.run.folder} holds a finished run of this recipe: {command} evaluates its"
        console.print(Text(printable(f"{line} model"), style="yellow"), soft_wrap=True)
    return recipe


def check_typed(given: str, *, task: str | None, overrides: Sequence[str]) -> None:
    """Refuse unknown tasks and keys, settings that would change nothing, and a missing model."""
    changes = parse_overrides(overrides)
    if task is not None:
        own = {path[1]: value for path, value in changes.items() if path[0] == "task" and path[1:]}
        complete_task({**typed_task(task, test_share=1.0), **own}, rewards=None)
    recipe_from_dict({"task": {"name": task or ""}, "eval": {}}, overrides=list(overrides))
    idle = [path for path in changes if path[0] in _NOT_ASKED and path[:2] not in _OF_RL]
    if idle:
        raise ConfigError(
            [
                f"--{'.'.join(path)}: has no effect on an evaluation; it goes by --eval.KEY, "
                "--task.KEY, --rewards.NAME, --model.KEY, --grading.KEY, --rl.engine and --rl.stop"
                for path in idle
            ]
        )
    if task is None and ("task", "name") not in changes:
        check_exists(given)
    check_given(given)


def stopping(texts: Sequence[str] | None) -> list[str]:
    """``--stop TEXT --stop TEXT`` as the override that it is."""
    try:
        strings = [item for text in texts or () for item in parse_value(text, ("rl", "stop"))]
    except ValueError as error:
        raise ValueError(f"--stop: {error}") from None
    return ["--rl.stop", value_text(strings)] if texts else []


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse a second prompt, and what is no override that an answer depends on."""
    for word in arguments[:1]:
        if not word.startswith("--"):
            raise ValueError(f"generate: one prompt, in quotes; {word!r} is a second one")
    for word in arguments:
        if word.startswith("--") and not word.startswith(("--model.", "--run.", "--rl.stop")):
            raise ValueError(
                f"generate: {word.partition('=')[0]} has no effect on an answer; it takes "
                "--model.KEY, --run.device and the options of posttrain generate --help"
            )


def generated_texts(
    model: str, prompt: str, *, overrides: Sequence[str], chat: bool | None, **drawing: Any
) -> list[str]:
    """What a model answers, all turns where it has several."""
    check_given(model)
    with loading():
        from posttrain.report.episode_text import transcript
        from posttrain.stages.loaded.loaded_policy import LoadedPolicy

    with LoadedPolicy(model, chat=chat, overrides=overrides) as policy:
        return [transcript(answer) for answer in policy.generate(prompt, **drawing)]
