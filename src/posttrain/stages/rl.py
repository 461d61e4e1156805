"""The stage ``rl``: checked, evaluated before, then learned."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from posttrain.build.setup import Setup
from posttrain.check import before_rl
from posttrain.distributed.timelines.timeline import timeline
from posttrain.runs.resume import BEFORE_PROBLEMS, check_steps, read_before, write_before
from posttrain.stages.diagnosis import held_out, make_background
from posttrain.stages.evaluation import asked, evaluate_into
from posttrain.stages.job import Job
from posttrain.stages.open_stage import OpenStage
from posttrain.stages.rl_learning import learn
from posttrain.track.progress import phase


def run_rl(setup: Setup, job: Job) -> dict[str, Any]:
    """Reinforcement learning; what its record says."""
    section = setup.recipe.rl
    found: dict[str, Any] = {}
    opened = job.stage("rl", total_steps=section.steps)
    with opened as stage, _said_before(section.check != "off"):
        first = setup.member is None or setup.member.number == 0  # the others have the same base
        if section.check != "off" and not stage.keeper.step and first:
            with phase("checking: data, rewards, a few rollouts, one step"), setup.alone():
                report = before_rl(setup)
            report.announce(job.console).enforce(section.check)
        if "eval" in setup.recipe.stages:
            found["before"] = _evaluate_before(setup, stage)
            stage.starts_from(held_out(found["before"], make_background(setup)))
        check_steps(section.steps, done=stage.keeper.step)
        with timeline(setup, stage.folder.path) as seen:
            learn(setup, replace(stage, seen=seen))
    return found


def _evaluate_before(setup: Setup, stage: OpenStage) -> dict[str, Any]:
    """The evaluation that the stage begins with; one that goes on has it already."""
    known = read_before(stage.folder)
    if known is not None and known["of"] == asked(setup):
        return known
    path = stage.folder.path / BEFORE_PROBLEMS
    found = evaluate_into(path, setup, doing="evaluating before training")
    write_before(stage.folder, found)
    return found


@contextlib.contextmanager
def _said_before(checked: bool) -> Iterator[None]:
    """Where the check has counted prompts that are too long, they are not warned of again."""
    with warnings.catch_warnings():
        if checked:
            warnings.filterwarnings("ignore", message=r".*prompts leave no room")
        yield
