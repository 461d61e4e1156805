"""Runs that are cut short, and whether two runs ended alike."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import recipe, same_weights, timeless

from posttrain.config import recipe_from_dict
from posttrain.learn import learner as learner_module
from posttrain.runs import read_rollouts
from posttrain.runs.folder import RunFolder
from posttrain.stages.results import Run
from posttrain.stages.run import run

GRPO = {"steps": 6, "save_every": 2, "evaluate_every": 2, "evaluate_problems": 5}


class Killed(KeyboardInterrupt):
    """Ends a run where it stands, as no handler would."""


def given(folder: Path, rl: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The recipe of a run whose checkpoints come by steps alone, where it says after how many."""
    changes = {"learning_rate": 1e-2, **rl}
    values = recipe(folder, rl=changes, grading={"workers": 0}, **sections)
    values["run"] |= {"save_minutes": 0.0}
    return values


def go(values: dict[str, Any], **options: Any) -> tuple[Run, str]:
    console = Console(file=io.StringIO(), width=200)
    done = run(recipe_from_dict(values), console=console, **options)
    return done, console.file.getvalue()


def cut(values: dict[str, Any], *, save: int) -> None:
    """Run until the ``save``-th checkpoint is being written, and die there."""
    with dying(save), pytest.raises(Killed):
        go(values)


@contextmanager
def dying(save: int) -> Iterator[None]:
    """Inside, the ``save``-th checkpoint is the end."""
    whole, calls = learner_module.save_learner, 0

    def dies(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == save:
            raise Killed
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "save_learner", dies)
        yield


def same(first: RunFolder, second: RunFolder, *, stages: tuple[str, ...] = ("sft", "rl")) -> None:
    """Metrics but for clocks, rollouts, findings and weights."""
    for stage in stages:
        one, other = first.stage(stage), second.stage(stage)
        assert timeless(one.records()) == timeless(other.records())
        assert one.findings() == other.findings()
        assert same_weights(one.model, other.model)
    if "rl" in stages:
        rows = [read_rollouts(folder.stage("rl").rollouts) for folder in (first, second)]
        assert rows[0] == rows[1]
    summaries = [dict(folder.summary or {}) for folder in (first, second)]
    for summary in summaries:
        del summary["seconds"], summary["model"]
    assert summaries[0] == summaries[1]
    assert first.samples == second.samples
