"""``posttrain run``, ``sft``, ``rl`` and ``eval``: a recipe, its overrides, the stages to run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from posttrain.cli.eval_arguments import check_typed, evaluation_recipe
from posttrain.config import (
    Quantity,
    Recipe,
    arithmetic,
    read_recipe,
    recipe_from_dict,
    render_dry_run,
    resolve,
)
from posttrain.config.paths import check_model_paths
from posttrain.config.read import parse_overrides
from posttrain.model_paths import check_run
from posttrain.track.progress import loading
from posttrain.track.safe_terminal import Terminal

Command = Literal["run", "sft", "prefer", "reward", "dpo", "rl"]


def run_recipe(
    arguments: Sequence[str],
    *,
    command: Command,
    dry_run: bool,
    audit: bool = False,
    resume: Sequence[str] | None = None,
) -> None:
    """Run a recipe's stages, or one of them; or print what they would be.

    ``resume``, unless None, resumes the run, and lists the keys that may have changed.
    """
    audited = ["--rl.audit", "true"] if audit else []
    recipe, text = _read([*arguments, *audited], command)
    check_model_paths(recipe)
    if dry_run:
        Terminal().print(render_dry_run(recipe), highlight=False, soft_wrap=True)
        return
    console = Terminal()
    with loading(console):  # mistakes in the recipe are reported before large libraries are loaded
        resolved = resolve(recipe)
        importlib.import_module("posttrain.stages.run")
    console.print(arithmetic_table(arithmetic(resolved)))
    allow = _keys(resume or ())
    _run(recipe, text=text, console=console, resume=resume is not None, allow_changes=allow)


def resume_run(folder: Path, overrides: Sequence[str], *, allow_changes: Sequence[str]) -> None:
    """Resume the run in a folder, by the recipe that it holds and what is to change of it."""
    if any(path[:2] == ("run", "folder") for path in parse_overrides(overrides)):
        raise ValueError(f"--run.folder: has no effect here, the run stays in {folder}; drop it")
    console, typed, here = Terminal(), folder, Path.cwd()
    folder = folder.absolute()
    if not folder.is_dir() or not any(folder.glob(".*.tmp")):  # left by a start that was killed
        check_run(typed)
    with loading():
        from posttrain.build.model_source import go_back, recorded_recipe
        from posttrain.runs import RunFolder
        from posttrain.stages.whole.places import undo_killed

    undo_killed(folder, resume=True)
    if moved := go_back(RunFolder(folder)):
        console.print(f"{folder}: {moved}", soft_wrap=True)
    folder = typed if Path.cwd() == here else folder  # what is told stays as it was typed
    recipe = recorded_recipe(folder, overrides)
    _run(recipe, console=console, resume=True, allow_changes=_keys(allow_changes))


def _run(recipe: Recipe, **options: Any) -> None:
    """Run a valid recipe; the import takes seconds, so it happens only here."""
    with loading(options["console"]):
        from posttrain.stages.run import run

    run(recipe, **options)


def _keys(given: Sequence[str]) -> list[str]:
    """Keys one by one, or several with commas between them."""
    return [key for text in given for key in text.replace(",", " ").split()]


def evaluate_model(
    model: str, task: str | None, *, overrides: Sequence[str], out: Path | None, show: int = 0
) -> None:
    """Evaluate a model, a run or a recipe; print the estimates and ``show`` of the answers."""
    check_typed(model, task=task, overrides=overrides)
    with loading():  # mistakes in what was typed are reported before large libraries are loaded
        from posttrain.report import HeldOut, render_evaluation
        from posttrain.stages.eval import evaluate_recipe
        from posttrain.stages.evaluation import evaluated, write_problems

    console = Terminal()
    recipe = evaluation_recipe(model, task=task, overrides=overrides, out=out, console=console)
    found = evaluate_recipe(recipe)
    numbers, problems = evaluated(found)
    weights = found.marks.weights
    held_out = HeldOut(accuracy_by=found.accuracy_by, weights=weights, before={}, after=numbers)
    options = {"title": (recipe.task or {})["name"], "show": show, "seed": recipe.run.seed}
    console.print(render_evaluation(held_out, problems, **options))
    if out is not None:
        write_problems(out, problems)


def _read(arguments: list[str], command: Command) -> tuple[Recipe, str | None]:
    path = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if path is None and command == "run":
        raise ValueError("run: name the recipe first: posttrain run RECIPE.toml [--rl.steps 6 …]")
    if command != "run":
        arguments = [*arguments, "--run.stages", f'["{command}"]']
    if path is None:
        return recipe_from_dict({command: {}}, overrides=arguments, name=command), None
    return read_recipe(path, arguments), Path(path).read_text(encoding="utf-8")


def arithmetic_table(rows: Sequence[Quantity]) -> Table:
    """The batch arithmetic of a recipe, for a terminal."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("stage", "what", "how many", "because"):
        table.add_column(heading, justify="right" if heading == "how many" else "left")
    for row in rows:
        table.add_row(row.stage, row.name, f"{row.value:,}", row.how)
    return table
