"""Where a stage writes: its folder, its trackers and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.disk import keeping
from posttrain.distributed.timelines.timeline import Timeline
from posttrain.pipelines.fit import Fitted
from posttrain.pipelines.guard import Guarded
from posttrain.protocols import Tracker
from posttrain.registry import look_up
from posttrain.runs import StageFolder
from posttrain.runs.keeper import ExtraState, Keeper
from posttrain.stages.diagnosis import diagnosed
from posttrain.track import TRACKERS, ConsoleTracker, Dropped, Several, Stage
from posttrain.track.diagnosis import Background, Diagnosing

NEEDED = ("jsonl", "console")  # trackers of every run


@dataclass(frozen=True, kw_only=True)
class OpenStage:
    """A stage under way, to whoever writes down what it does."""

    folder: StageFolder
    tracker: Tracker
    keeper: Keeper
    seen: Timeline = field(default_factory=Timeline)

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
    names: Sequence[str],
    background: Background | None,
    drop: Callable[[str], None],
) -> Iterator[OpenStage]:
    """Open the trackers of a stage by name; they are closed behind it.

    With a background, what they are told is diagnosed too. One that raises is left out, and
    ``drop`` called with its name; what the run itself needs may not fail.
    """
    trackers: list[Tracker] = []
    for name in names:
        made = look_up(name, TRACKERS, kind="run.trackers")(stage)
        trackers.append(made if name in NEEDED else Dropped(made, name=name, drop=drop))
    for seen in trackers:
        if isinstance(seen, ConsoleTracker):
            keeper.warn, keeper.info = seen.note, seen.say
    tracker: Tracker = Several(trackers)
    try:
        if background is not None:
            tracker = diagnosed(trackers, keeper.folder, background=background)
        with keeping(keeper.folder.path):
            yield OpenStage(folder=keeper.folder, tracker=tracker, keeper=keeper)
        if isinstance(tracker, Diagnosing):
            tracker.finish()
    finally:
        tracker.close()


def logged(
    stage: OpenStage,
    learner: Guarded,
    *,
    every: int | None,
    total_steps: int,
    measured: Callable[[Fitted], Mapping[str, float]] = lambda fitted: {},
    more: ExtraState | None = None,
) -> Callable[[Fitted], None]:
    """What follows a step of supervised training: its record, and a checkpoint where one is due."""
    guard = learner.guard

    def on_step(fitted: Fitted) -> None:
        step, skipped = fitted.step, {"train/skipped_total": float(guard.total)}
        stage.tracker.log(step, {**fitted.metrics(), **skipped, **measured(fitted)})
        last = step == total_steps
        stage.keeper.stepped(step, learner=learner, every=every, last=last, more=more)
        guard.check()

    return on_step
