"""Where a stage writes: its folder, its trackers and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.data.token_texts import FILE_NAME, tokenizer_json
from posttrain.disk import keeping
from posttrain.distributed.timelines.timeline import Timeline
from posttrain.pipelines.callbacks import Callback, Callbacks
from posttrain.pipelines.fit import Fitted
from posttrain.pipelines.guard import Guarded
from posttrain.pipelines.rl import Step
from posttrain.protocols import Tracker
from posttrain.registry import Spec, resolve, split
from posttrain.runs import TOKENS, RolloutWriter, StageFolder, sequence_advantages, write_text
from posttrain.runs.keeper import ExtraState, Keeper
from posttrain.runs.token_numbers import token_table, write_tokens
from posttrain.stages.diagnosis import Background, Diagnosing, diagnosed
from posttrain.track import ALWAYS, TRACKERS, Dropped, Several, Stage, Telling, leave_out
from posttrain.track.sample_table import log_samples, sample_rows

EVALUATIONS = 10  # in a stage, about, where the recipe does not say how often
MEASURED_EVERY = "measured_every"
"""In a checkpoint: the steps between evaluations, which stay when the stage is prolonged."""


@dataclass(frozen=True, kw_only=True)
class OpenStage:
    """A stage under way, to whoever writes down what it does."""

    folder: StageFolder
    tracker: Tracker
    keeper: Keeper
    callbacks: Callbacks
    seen: Timeline = field(default_factory=Timeline)

    def log(self, step: int, metrics: Mapping[str, float], *, rollouts: Sequence[Any] = ()) -> None:
        """Write down the numbers of a step, and those that callbacks add to them."""
        own = self.callbacks.called(step, metrics, rollouts=rollouts)
        self.tracker.log(step, {**metrics, **own})

    def tell_rules(self, metrics: Mapping[str, float]) -> None:
        """Let the rules of the diagnosis know what the stage came to."""
        if isinstance(self.tracker, Diagnosing):
            self.tracker.finish(metrics)

    def starts_from(self, metrics: Mapping[str, float]) -> None:
        """Let them know what the policy was worth before the stage."""
        if isinstance(self.tracker, Diagnosing):
            self.tracker.starts_from(metrics)


@contextlib.contextmanager
def tracked(
    stage: Stage,
    keeper: Keeper,
    *,
    specs: Sequence[Spec],
    background: Background | None,
    used: dict[str, bool],
    beside: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
) -> Iterator[OpenStage]:
    """Open the trackers of a stage, ``beside`` those that are there; they are closed behind it.

    With a background, what they are told is diagnosed too. One that raises is left out from there
    on, and by later stages; one that cannot be made, where an earlier stage had it. ``used`` says
    of each by its name whether it still is. What every run has may not fail.
    """
    trackers: list[Tracker] = []
    tracker: Tracker = Several(beside)
    begins_at = keeper.begins_at
    try:
        for spec in specs:
            if made := _made(spec, stage, used=used):
                trackers.append(made)
                tracker = Several([*trackers, *beside])  # closed if the next one cannot be made
        trackers += beside
        for seen in trackers:
            if isinstance(seen, Telling):
                keeper.warn, keeper.info = seen.note, seen.say
        called = Callbacks(
            callbacks,
            stage=stage.name,
            total_steps=stage.total_steps,
            history=keeper.folder.records() if callbacks else (),
            stopped=None if begins_at is None else begins_at.state.get("stopped"),
        )
        if background is not None:
            tracker = diagnosed(trackers, keeper.folder, background=background)
        with keeping(keeper.folder.path):
            yield OpenStage(folder=keeper.folder, tracker=tracker, keeper=keeper, callbacks=called)
        if isinstance(tracker, Diagnosing):
            tracker.finish()
    finally:
        tracker.close()


def _made(spec: Spec, stage: Stage, *, used: dict[str, bool]) -> Tracker | None:
    """The tracker of a stage; None where it has raised, now or before."""
    name, _ = split(spec, kind="run.trackers")
    if not used.get(name, True):
        return None
    try:
        made: Tracker = resolve(spec, TRACKERS, kind="run.trackers")(stage)
    except Exception as error:
        if name not in used:  # whoever began the run is there to mend it
            raise
        leave_out(name, error, when=f"as {stage.name} began", used=used)
        return None
    if name in ALWAYS:
        return made
    used[name] = True
    return Dropped(made, name=name, used=used)


def keep_rollouts(stage: OpenStage, taken: Step, *, writer: RolloutWriter, tokenizer: Any) -> None:
    """Write the rollouts of a step and what was recorded of their tokens; show some to trackers."""
    step, rollouts = taken.state.step, taken.collected.rollouts
    advantages = sequence_advantages(taken.batch)
    writer.write(rollouts, step=step, advantages=advantages)
    before, baseline, folder = taken.before, taken.batch.baseline, stage.folder.path / TOKENS
    facts = {
        "step": before.step,
        "sequences": taken.batch.tokens.shape[0],
        "losses": [result.loss for result in taken.results],
        "kl": before.kl.value,
        "penalty": None if before.penalty is None else before.penalty.value,
        "baseline": None if baseline is None else float(baseline),
    }
    table = token_table(taken.batch, [result.tokens for result in taken.results], facts=facts)
    if table is not None:
        if not (folder / FILE_NAME).exists() and (text := tokenizer_json(tokenizer)):
            write_text(folder / FILE_NAME, text)
        writer.also(partial(write_tokens, folder, step, table=table))
    log_samples(stage.tracker, step, rows=partial(sample_rows, rollouts, advantages))


def evaluation_steps(total_steps: int, *, epochs: int) -> int:
    """Steps between evaluations: about ten in the stage, and at least one an epoch.

    >>> [evaluation_steps(total, epochs=epochs) for total, epochs in ((500, 1), (500, 50), (3, 1))]
    [50, 10, 1]
    """
    return max(1, min(total_steps // EVALUATIONS, total_steps // epochs))


def evaluation_interval(keeper: Keeper, asked: int | None, *, total_steps: int, epoch: int) -> int:
    """Steps between evaluations: as asked, else as the stage began, else about ten times.

    ``epoch`` is its steps. A stage that is prolonged so looks as often as before.
    """
    begun = None if keeper.begins_at is None else keeper.begins_at.state.get(MEASURED_EVERY)
    if asked is not None:
        return asked
    return int(begun or evaluation_steps(total_steps, epochs=-(-total_steps // epoch)))


def logged(
    stage: OpenStage,
    learner: Guarded,
    *,
    every: int | None,
    total_steps: int,
    measured: Callable[[Fitted], Mapping[str, float]] = lambda fitted: {},
    measured_every: int = 0,
    more: ExtraState | None = None,
) -> Callable[[Fitted], None]:
    """What follows a step of supervised training: its record, and a checkpoint where one is due."""
    guard, callbacks = learner.guard, stage.callbacks

    def kept(folder: Path) -> Mapping[str, Any]:
        known = {MEASURED_EVERY: measured_every, **callbacks.state()}
        return {**(more(folder) if more is not None else {}), **known}

    def on_step(fitted: Fitted) -> None:
        step, skipped = fitted.step, {"train/skipped_total": float(guard.total)}
        stage.log(step, {**fitted.metrics(), **skipped, **measured(fitted)})
        stage.keeper.stepped(
            step,
            learner=learner,
            every=every,
            last=step == total_steps or callbacks.ended,
            must=callbacks.failure is not None,
            more=kept,
        )
        callbacks.check()
        guard.check()

    return on_step
