"""An evaluation in the terminal: shares with their intervals, every reward, a few answers."""

from __future__ import annotations

import random

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.pipelines.evaluate import Evaluation
from posttrain.runs import printable
from posttrain.track.text import counted
from posttrain.types import Rollout
from posttrain.types.marks import (
    estimate_label,
    how_to_declare,
    no_full_marks,
    reward_label,
)


def render_evaluation(
    found: Evaluation, *, title: str, show: int = 0, seed: int = 0
) -> RenderableType:
    """The numbers, and ``show`` of the greedy answers, drawn at random."""
    notes = [how_to_declare(name, largest) for name, largest in found.above_one.items()]
    if not found.accuracy_by:
        notes.append(
            "no accuracy: nothing here checks answers; --task.accuracy names a reward that does"
        )
    if found.invalid:
        notes.append(f"the first broken one: {found.reason}")
    told = [
        Padding(Text(printable(note), style="yellow", overflow="fold"), (0, 0, 0, 2))
        for note in notes
    ]
    answers: list[RenderableType] = [Text(), _answers(found, show=show, seed=seed)] if show else []
    return Group(_numbers(found, title=title), *told, *answers)


def _numbers(found: Evaluation, *, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    problems = counted(len(found.greedy), "problem")
    table.add_column(Text(f"{printable(title)}, {problems}, greedy answers"))
    table.add_column("", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, estimate in found.estimates.items():
        label = printable(estimate_label(name, found.accuracy_by))
        value, _, interval = str(estimate).partition(" ")
        table.add_row(Text(label), value, Text(interval))
    for name, largest in found.above_one.items():
        label = estimate_label(found.marks.share_of(name), found.accuracy_by)
        table.add_row(Text(printable(label)), "—", no_full_marks(largest).removeprefix("— "))
    table.add_row("mean reward, weighted sum", f"{found.mean_reward:.3f}", "")
    for name, mean in found.parts.items():
        label = printable(reward_label(name, found.marks.weights))
        table.add_row(Text(f"mean of {label}"), f"{mean:.3f}", "")
    if found.invalid:
        table.add_row("broken scores", f"{found.invalid:.1%}", "")
    return table


def _answers(found: Evaluation, *, show: int, seed: int) -> Table:
    total = len(found.greedy)
    places = sorted(random.Random(seed).sample(range(total), min(show, total)))
    how = f"{len(places)} of {total} answers, drawn at random (seed {seed})"
    table = Table(box=SIMPLE_HEAD, title=how, title_justify="left")
    for heading in ("prompt", "expected", "answer", "reward"):
        table.add_column(
            heading, overflow="fold", justify="right" if heading == "reward" else "left"
        )
    for place in places:
        rollout = found.greedy[place]
        answer = rollout.prompt.columns.get("answer")
        question = rollout.prompt.text or rollout.prompt.messages[-1]["content"]
        told = f"{printable(rollout.text, limit=240)}{_mark(rollout, found)}"
        score = rollout.score
        value = f"{score.value:.3f}" if score is not None and score.ok else "broken"
        expected = "" if answer is None else printable(str(answer), limit=80)
        table.add_row(Text(printable(question, limit=160)), Text(expected), Text(told), value)
    return table


def _mark(rollout: Rollout, found: Evaluation) -> str:
    """A sign of the check of answers, and of nothing else."""
    signs = {True: " ✓", False: " ✗", None: " ?"}
    return "" if found.accuracy is None else signs[found.is_right(rollout)]
