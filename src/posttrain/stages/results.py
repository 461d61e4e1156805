"""What a run leaves behind: evaluations, a picture, samples, a summary, and the object to ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.build.setup import choose_device, hardware
from posttrain.build.several.sweep import FOLDER
from posttrain.config import Resolved
from posttrain.data.row_objects import to_frame
from posttrain.disk import MovedError, NotWrittenError
from posttrain.report import RunFacts, plot_curves, render_summary
from posttrain.report.facts import TRAINED, number_or_none
from posttrain.runs import Rollouts, RunFolder, read_rollouts
from posttrain.stages.advice import next_steps
from posttrain.stages.whole.publish import push
from posttrain.track.printable import printable
from posttrain.track.progress import phase
from posttrain.types.text import html_table, shortened


class Run:
    """A run by its folder: its numbers, its samples, its picture and its model folder.

    >>> run = Run("runs/demo")         # doctest: +SKIP
    >>> run.summary["accuracy_after"]  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path | RunFolder) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)

    @property
    def summary(self) -> dict[str, Any]:
        """What came out, as in ``summary.json``."""
        return self.folder.summary or {}

    @property
    def model(self) -> Path:
        """The trained model: an ordinary Hugging Face folder."""
        model = self.folder.model
        if model is None:
            several = "; its adapters have one each: run.adapters[0].model" * bool(self.adapters)
            raise ValueError(f"{self.folder.path}: no stage of this run trained a model{several}")
        return model

    @property
    def adapters(self) -> list[Run]:
        """The runs of its adapters, of a run that trained several."""
        folders = [mark.parent for mark in (self.folder.path / FOLDER).glob("*/run.json")]
        return [Run(RunFolder(each)) for each in sorted(folders, key=lambda one: int(one.name))]

    def metrics(self, stage: str = "") -> Any:
        """The numbers of a stage, one row a step: a pyarrow table, ``.to_pandas()`` for a frame.

        Without a stage, of rl, else of dpo, reward or sft: the first of these that there is.
        """
        return self.folder.stage(stage or self._trained).frame()

    def samples(self, step: int | None = None, *, limit: int = 10) -> list[dict[str, Any]]:
        """Rollouts of the RL stage, of one step or of all."""
        return list(read_rollouts(self.folder.stage("rl").rollouts, step=step, limit=limit))

    def rollouts(self) -> Rollouts:
        """All rollouts of the RL stage, by filter, order and page."""
        return Rollouts(self.folder.stage("rl").path)

    def plot(self, path: str | Path | None = None, *, stage: str = "") -> Path:
        """Draw the curves of a stage; without a path, into the run folder."""
        target = Path(path) if path is not None else self.folder.curves
        folder = self.folder.stage(stage or self._trained)
        title, by = self.folder.path.name, folder.accuracy_by
        plot_curves(folder.records(), target, title=title, accuracy_by=by)
        return target

    def push(self, repo: str, **options: Any) -> str:
        """Upload the model with a card written from the run: :func:`posttrain.push`."""
        return push(self.folder.path, repo, **options)

    @property
    def _trained(self) -> str:
        return next((name for name in TRAINED if name in self.folder.stages), "rl")

    def to_pandas(self, stage: str = "") -> Any:
        """The numbers of a stage as a DataFrame, one row a step."""
        return to_frame(self.metrics(stage).to_pylist())

    def __fspath__(self) -> str:
        """Its folder: a run may stand wherever a run folder may."""
        return str(self.folder.path)

    def __repr__(self) -> str:
        """Where it is, and what came out."""
        facts = "".join(f", {name} {value}" for name, value in self._facts())
        return f"Run({str(self.folder.path)!r}{facts})"

    def _repr_html_(self) -> str:
        """What came out, for a notebook."""
        rows = [("", ""), *self._facts(), ("folder", str(self.folder.path))]
        return html_table(rows, title="posttrain run")

    def _facts(self) -> list[tuple[str, str]]:
        """What its summary says: accuracy and reward before and after, and what is wrong."""
        found, facts = self.summary, [("stages", "+".join(self.folder.stages))]
        for name, ends, form in (
            ("accuracy", ("accuracy_before", "accuracy_after"), ".1%"),
            ("reward", ("reward_first", "reward_last"), ".3g"),
        ):
            known = [number_or_none(found.get(end)) for end in ends]
            texts = [format(number, form) for number in known if number is not None]
            facts += [(name, " → ".join(texts))] if texts else []
        findings = [str(each["finding"]) for each in found.get("diagnosis") or []]
        facts += [("diagnosis", shortened(" ".join(findings), 60))] if findings else []
        return facts


@phase("drawing the curves and writing the summary")
def finish_run(folder: RunFolder, *, recipe: Resolved, seconds: float, console: Console) -> Run:
    """Draw the curves, pick samples, write the summary and print it."""
    run, facts, seed = Run(folder), RunFacts(folder), recipe.run.seed
    stage = next((name for name in TRAINED if name in folder.stages), None)
    if stage is not None:
        _draw_curves(run, stage=stage, console=console)
    samples, drawn = facts.draw_samples(seed)
    folder.write_samples(samples)
    if "rl" in folder.stages:
        Rollouts(folder.stage("rl").path)  # leaves its index, for whoever looks at the run first
    summary = {"seconds": seconds, "seed": seed, "hardware": hardware(choose_device(recipe))}
    summary |= {"stages": list(folder.stages), "model": str(folder.model or "")}
    summary |= {"answers_shown": drawn} if drawn else {}
    records = {stage: folder.stage_record(stage) or {} for stage in folder.stages}
    stopped = {stage: found["stopped"] for stage, found in records.items() if "stopped" in found}
    summary |= {"stopped": stopped} if stopped else {}
    folder.write_summary(summary | facts.to_summary())
    told = render_summary(facts, next_steps=next_steps(facts, recipe))
    console.print(told, crop=False)
    return run


def _draw_curves(run: Run, *, stage: str, console: Console) -> None:
    """The picture of the curves; without it, what was trained is no less finished."""
    try:
        run.plot(stage=stage)
    except (MovedError, NotWrittenError):  # the summary could not be written either
        raise
    except Exception as error:  # noqa: BLE001 - whatever the drawing library raises
        console.print(f"The curves could not be drawn: {printable(repr(error))}", markup=False)
