"""What to try next: it follows from what was found, and from what came out."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config import (
    ConfigError,
    Resolved,
    RlSection,
    changed_keys,
    recipe_from_dict,
    resolve,
)
from posttrain.config.read import read_values
from posttrain.config.toml import as_overrides
from posttrain.report import RunFacts
from posttrain.runs import RunFolder
from posttrain.track.diagnosis.history import FULL, WINDOW, noise, series
from posttrain.track.printable import command_line

MOST = 3  # findings that a next run is proposed for
LOOK = ("hacking", "grader_failing", "format_learned_accuracy_flat", "length_explosion")
"""Findings that the rollouts themselves explain best."""
GENERIC = ("nothing_learned",)
"""Findings that say that something is wrong, and guess at what."""
SOLVED = 0.95
_LONGEST = 500  # characters of a prompt that one would still copy


def next_steps(facts: RunFacts, recipe: Resolved) -> list[str]:
    """Lines of a shell: comments that say why, and commands that can be run as they stand."""
    open_ones = [finding for finding in facts.findings if finding["until"] is None]
    run = facts.run
    lines = _against(open_ones, run, recipe=recipe) if open_ones else _onwards(facts, recipe)
    task = recipe.task or {}
    if task.get("env") is None:
        return [*lines, *_ask(run, facts.problems)]
    # No command knows the rows that were handed over from Python beside an environment.
    return [*lines, *(_play(run, facts.problems) if "name" in task else [])]


def _against(
    findings: Sequence[Mapping[str, Any]], folder: RunFolder, *, recipe: Resolved
) -> list[str]:
    """For each finding what to change first, and the command that does it.

    A key is proposed once, by the finding that comes first; what says only that nothing came of it
    has a proposal where nothing else has.
    """
    mendable = [finding for finding in findings if finding["change"]]
    named = [finding for finding in mendable if finding["finding"] not in GENERIC]
    against: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for finding in named or mendable:
        change = finding["change"]
        if first.setdefault(change.split(" ", 1)[0], change) == change:
            against.setdefault(change, []).append(finding["finding"])
    lines: list[str] = []
    for change, names in list(against.items())[:MOST]:
        why = f"against {', '.join(dict.fromkeys(names))}"
        lines += _again(folder, recipe, change=change, why=why)
    looked = [finding["finding"] for finding in findings if finding["finding"] in LOOK]
    if looked:
        lines += [f"# {looked[0]}: read the rollouts", _command("view", folder.path)]
    return lines


def _onwards(facts: RunFacts, recipe: Resolved) -> list[str]:
    """After a run in which nothing went wrong: longer, harder, or with more to compare."""
    folder = facts.run
    if "rl" not in folder.stages or "rl" not in recipe.stages:
        return _on_to_rl(folder, recipe)
    after = facts.held_out.after
    scored = after.get("parts", {}).get("env")  # by an environment: the task's answers are no judge
    accuracy = after.get("estimates", {}).get("accuracy")
    if scored is None and accuracy is not None and accuracy["value"] >= SOLVED:
        return ["# nearly all held-out problems are right: give it harder ones, in [task]"]
    if scored is not None and SOLVED <= scored <= FULL:
        told = f"# the environment gives held-out episodes {scored:.2f} on average: if it gives at "
        return [f"{told}most 1, take harder ones"]
    rewards = series(facts.records("rl"), "reward/mean")
    count = max(WINDOW, len(rewards) // 5)
    if len(rewards) < 2 * count:
        why = "too few steps to tell much: take more"
        return _again(folder, recipe, change=f"--rl.steps {5 * recipe.rl.steps}", why=why)
    change, why = _by_reward(rewards, recipe.rl, count=count)
    return _again(folder, recipe, change=change, why=why)


def _by_reward(rewards: Sequence[float], section: RlSection, *, count: int) -> tuple[str, str]:
    """What to change, and why, by whether the training reward rose beyond chance, and still did."""
    first, last = statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])
    lately = last - statistics.fmean(rewards[-2 * count : -count])
    chance = 2 * noise(rewards, steps=count)
    longer = f"--rl.steps {2 * section.steps}"
    if lately > chance:
        return longer, "the reward was still rising: train longer"
    if last - first <= chance:
        return longer, "too few steps to tell whether the reward rises: train longer"
    why = f"the reward rose, but in the last {count} steps no longer beyond chance: "
    return (
        f"--rl.group_size {2 * section.group_size}",
        f"{why}compare more completions of each prompt",
    )


def _on_to_rl(folder: RunFolder, recipe: Resolved) -> list[str]:
    """After sft alone, rl from its model, where the recipe says how."""
    if "sft" not in folder.stages or recipe.written.rl is None or not recipe.source:
        return []
    model = ["--model.name", str(folder.model), "--run.folder", f"{folder.path}-rl"]
    return ["# the next stage, from this model", _command("rl", recipe.source, *model)]


def _again(folder: RunFolder, recipe: Resolved, *, change: str, why: str) -> list[str]:
    """The recipe once more, as it was run, with a change and a folder of its own."""
    key, value = change.removeprefix("--").split(" ", 1)
    if not recipe.source or not Path(recipe.source).is_file():
        return [f"# {why}: {key} = {value}"]
    kept = _overrides(folder, recipe, beside=key)
    if kept is None:
        return [f"# {why}: {key} = {value}"]
    path = f"{folder.path}-{key.rpartition('.')[2]}-{value}"
    command = _command("run", recipe.source, *kept, f"--{key}", value, "--run.folder", path)
    return [f"# {why}", command]


def _overrides(folder: RunFolder, recipe: Resolved, *, beside: str) -> list[str] | None:
    """The fewest words that make the recipe's file what was run, without the key ``beside``.

    What follows from another key is left to it: an algorithm brings its defaults along. The file is
    taken as the run read it, for it may be edited while a run goes on. None where it cannot be
    read, which is no reason to lose the summary of a finished run.
    """
    kept, written = folder.path / "recipe.toml", Path(recipe.source)

    def differing(keys: Mapping[str, Any]) -> dict[str, Any]:
        """What is still other than what was run, with these keys put over the file."""
        given = resolve(recipe_from_dict(values, overrides=as_overrides(keys)))
        pairs = changed_keys(given, recipe)
        return {key: new for key, (_, new) in pairs.items() if key not in ("run.folder", beside)}

    try:
        path = kept if kept.is_file() else written  # a run from Python keeps no copy
        values, _ = read_values(path, beside=written.parent)
        found = {key: new for key, new in differing({}).items() if new is not None}
    except (ConfigError, OSError):
        return None
    with contextlib.suppress(ConfigError):  # some can be made in Python alone: all are named then
        left = differing(found).keys()
        for key in reversed(list(found)):
            fewer = {name: new for name, new in found.items() if name != key}
            with contextlib.suppress(ConfigError):  # the others cannot stand without it
                found = fewer if differing(fewer).keys() <= left else found
    return as_overrides(found)


def _ask(folder: RunFolder, problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A held-out problem for the new model: one that it got wrong, where there is one."""
    wrong = [row for row in problems if row["correct"] is False]
    asked = [row["prompt"] for row in wrong or problems if "messages" not in row]
    command = _generate_command(folder.path, asked)
    if command is None or folder.model is None:
        return []
    return [f"# a held-out problem{' that it got wrong' if wrong else ''}", command]


def _play(folder: RunFolder, problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """The held-out prompt whose episode has the lowest score, to be played again and watched."""
    known = [row for row in problems if row["state"] == "ok" and "index" in row]
    if not known or folder.model is None:
        return []
    row = min(known, key=lambda row: row["reward"])
    place = ["--split", "test", "--index", str(row["index"]), "--temperature", "0"]
    lowest = f"# the held-out episode with the lowest score ({row['reward']:g})"
    return [lowest, _command("play", folder.path, *place)]


def _generate_command(run: Path, prompts: Iterable[str]) -> str | None:
    """What asks a run's model the shortest of these prompts; None where none can be typed.

    A chat of several messages is none of them, and no command line holds a NUL.
    """
    typed = [text for text in prompts if text and "\0" not in text and len(text) <= _LONGEST]
    if not typed:
        return None
    prompt = min(typed, key=len)
    end = ["--"] if prompt.startswith("-") or str(run).startswith("-") else []
    return command_line("posttrain", "generate", *end, run, prompt)


def _command(*words: str | Path) -> str:
    return command_line("posttrain", *words)
