"""What a run leaves behind: evaluations, a picture, samples, a summary, and the object to ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.build.setup import choose_device, hardware
from posttrain.config import Resolved
from posttrain.pipelines.evaluate import Evaluation
from posttrain.report import Facts, plot_curves, render_summary
from posttrain.report.facts import TRAINED
from posttrain.runs import Rollouts, RunFolder, read_rollouts, replacing
from posttrain.stages.advice import next_steps
from posttrain.track.encoding import encode_json
from posttrain.track.progress import phase
from posttrain.types import Rollout


class Run:
    """A finished run: its numbers, its samples, its picture and its model folder.

    >>> run = Run(RunFolder("runs/demo"))  # doctest: +SKIP
    >>> run.summary["accuracy_after"]      # doctest: +SKIP
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def summary(self) -> dict[str, Any]:
        """What came out, as in ``summary.json``."""
        return self.folder.summary or {}

    @property
    def model(self) -> Path:
        """The trained model: an ordinary Hugging Face folder."""
        model = self.folder.model
        if model is None:
            raise ValueError(f"{self.folder.path}: no stage of this run trained a model")
        return model

    def metrics(self, stage: str = "rl") -> Any:
        """The numbers of a stage, one row a step: a pyarrow table, ``.to_pandas()`` for a frame."""
        return self.folder.stage(stage).frame()

    def samples(self, step: int | None = None, *, limit: int = 10) -> list[dict[str, Any]]:
        """Rollouts of the RL stage, of one step or of all."""
        return list(read_rollouts(self.folder.stage("rl").rollouts, step=step, limit=limit))

    def rollouts(self) -> Rollouts:
        """All rollouts of the RL stage, by filter, order and page."""
        return Rollouts(self.folder.stage("rl").path)

    def plot(self, path: str | Path | None = None, *, stage: str = "rl") -> Path:
        """Draw the curves of a stage; without a path, into the run folder."""
        target = Path(path) if path is not None else self.folder.curves
        folder = self.folder.stage(stage)
        title, by = self.folder.path.name, folder.accuracy_by
        plot_curves(folder.records(), target, title=title, accuracy_by=by)
        return target

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r})"


def evaluated(found: Evaluation) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An evaluation as plain values: its numbers, and one row a problem."""
    counts: dict[int, list[bool | None]] = {}
    for rollout in found.sampled:
        counts.setdefault(rollout.group, []).append(found.is_right(rollout))
    rows = [
        _problem(rollout, right=found.is_right(rollout)) | _sampled(counts.get(rollout.group, []))
        for rollout in found.greedy
    ]
    numbers = {
        "estimates": {name: vars(estimate) for name, estimate in found.estimates.items()},
        "problems": len(found.greedy),
        "above_one": dict(found.above_one),
        "reward": found.mean_reward,
        "parts": dict(found.parts),
        "invalid": found.invalid,
        "reason": found.reason,
    }
    return numbers, rows


def write_problems(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of an evaluation, one line a problem."""
    with replacing(path) as beside, beside.open("wb") as file:
        file.writelines(encode_json(row) + b"\n" for row in rows)


@phase("drawing the curves and writing the summary")
def finish_run(folder: RunFolder, *, recipe: Resolved, seconds: float, console: Console) -> Run:
    """Draw the curves, pick samples, write the summary and print it."""
    run, facts, seed = Run(folder), Facts(folder), recipe.run.seed
    stage = next((name for name in TRAINED if name in folder.stages), None)
    if stage is not None:
        run.plot(stage=stage)
    samples, drawn = facts.draw_samples(seed)
    folder.write_samples(samples)
    if "rl" in folder.stages:
        Rollouts(folder.stage("rl").path)  # leaves its index, for whoever looks at the run first
    summary = {"seconds": seconds, "seed": seed, "hardware": hardware(choose_device(recipe))}
    summary |= {"stages": list(folder.stages), "model": str(folder.model or "")}
    summary |= {"answers_shown": drawn} if drawn else {}
    folder.write_summary(summary | facts.to_summary())
    told = render_summary(facts, next_steps=next_steps(facts, recipe))
    console.print(told, crop=False)
    return run


def _problem(rollout: Rollout, *, right: bool | None) -> dict[str, Any]:
    score = rollout.score
    assert score is not None, "evaluate scores every rollout"
    answer = rollout.prompt.columns.get("answer")
    return {
        "id": rollout.prompt.id,
        "prompt": rollout.prompt.text,
        "answer": None if answer is None else str(answer),
        "completion": rollout.text,
        "correct": right,
        "reward": score.value,
        "parts": dict(score.parts),
        "state": score.state,
        "reason": score.reason,
        "stop_reason": rollout.stop_reason,
        "num_tokens": len(rollout.tokens),
    }


def _sampled(right: list[bool | None]) -> dict[str, Any]:
    """Of how many samples how many are right, where something checks them."""
    if not right:
        return {}
    known = [verdict for verdict in right if verdict is not None]
    return {"samples": len(right)} | ({"samples_correct": sum(known)} if known else {})
