"""The evaluations at both ends of a run: the same problems, before the stage rl and after it."""

from __future__ import annotations

from typing import Any

from posttrain.config import EvalSection
from posttrain.protocols import Engine
from posttrain.runs import config_digest
from posttrain.runs.first_evaluation import BEFORE_PROBLEMS, read_before, write_before
from posttrain.stages.results import evaluated, write_problems
from posttrain.stages.rl import Context, check_held_out, run_eval


def before(context: Context, section: EvalSection, *, engine: Engine | None) -> dict[str, Any]:
    """The evaluation that a stage begins with; one that goes on has it already."""
    known = read_before(context.folder)
    if known is not None and known["of"] == _of(context, section):
        return known
    found = run_eval(context, section, engine=engine, doing="evaluating before training")
    told, problems = evaluated(found)
    write_problems(context.folder.path / BEFORE_PROBLEMS, problems)
    told["of"] = _of(context, section)
    check_held_out(found, context.recipe)
    write_before(context.folder, told)
    return told


def after(context: Context, section: EvalSection, *, engine: Engine | None) -> dict[str, Any]:
    """The evaluation of what came out."""
    found = run_eval(context, section, engine=engine)
    told, problems = evaluated(found)
    write_problems(context.folder.path / "problems.jsonl", problems)
    check_held_out(found, context.recipe)
    return {**told, "of": _of(context, section)}


def _of(context: Context, section: EvalSection) -> str:
    """What was asked, in one word: two evaluations are compared only where it is the same.

    The name of what checks answers is part of it: right by one reward is not right by another.
    """
    return config_digest(section.model_dump(mode="json"), {"by": context.parts.correct_by})
