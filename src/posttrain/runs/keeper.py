"""The checkpoints of a stage: where it goes on, when one is due, which are kept."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from posttrain.disk import NotWrittenError
from posttrain.protocols import Learner
from posttrain.runs.before import forget_before, forget_nothing
from posttrain.runs.checkpoints import Checkpoint, prune, write_checkpoint
from posttrain.runs.folder import StageFolder
from posttrain.runs.interrupts import Interrupts

SHARE = 0.01  # largest fraction of wall-clock time for timed checkpoints
Clock = Callable[[], float]
ExtraState = Callable[[Path], Mapping[str, Any]]


class Pace:
    """Says when a checkpoint is due, by a clock that only goes forward.

    ``seconds`` are asked for between two of them, 0 for none. Where one has taken ``t`` seconds,
    the next comes no sooner than ``t / SHARE`` after it, however few were asked for.

    >>> now = 0.0
    >>> pace = Pace(600, clock=lambda: now)
    >>> with pace.saving():
    ...     now += 2.0
    >>> pace.interval, pace.stretched
    (600.0, False)
    >>> with pace.saving():
    ...     now += 30.0
    >>> pace.interval, pace.stretched
    (3000.0, True)
    """

    def __init__(self, seconds: float, *, clock: Clock) -> None:
        self._asked, self._clock = float(seconds), clock
        self._cost = 0.0
        self._since = clock()

    @property
    def on(self) -> bool:
        """Whether there are checkpoints by time at all."""
        return self._asked > 0

    @property
    def cost(self) -> float:
        """Seconds that the last checkpoint took."""
        return self._cost

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next."""
        return max(self._asked, self._cost / SHARE)

    @property
    def stretched(self) -> bool:
        """Whether they come less often than was asked for, because they take too long."""
        return self.on and self.interval > self._asked

    @property
    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self.on and self._clock() - self._since >= self.interval

    def start(self) -> None:
        """Restart the interval now; there is nothing to lose before this."""
        self._since = self._clock()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a checkpoint is written: what it takes is measured, and time counts from its end.

        An exception that leaves the block is not counted.
        """
        started = self._clock()
        yield
        self._since = self._clock()
        self._cost = self._since - started


class SkipCounter(Protocol):
    """Counts skipped steps: all of them, and those in a row."""

    total: int
    in_a_row: int


Counter = TypeVar("Counter", bound=SkipCounter)


class Keeper:
    """Writes the checkpoints of one stage, and holds the one it goes on from, if any.

    They come every ``save_minutes`` by ``clock``, unless the stage says after how many steps; also
    after the last step, so a kill during saving or evaluation loses nothing. If a timed checkpoint
    cannot be written, warn and continue.
    """

    warn: Callable[[str], None] = staticmethod(lambda text: None)
    """Where a remark to the user goes."""
    info: Callable[[str], None] = staticmethod(lambda text: None)
    """Where a line goes that is no reason for concern."""

    def __init__(
        self,
        folder: StageFolder,
        *,
        interrupts: Interrupts | None = None,
        begins_at: Checkpoint | None = None,
        save_minutes: float = 0.0,
        keep_last: int = 0,
        keep_best: int = 0,
        seconds: Callable[[], float] = lambda: 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.folder = folder
        self._interrupts = interrupts or Interrupts()
        self._begins_at = begins_at
        self._saved = self.step
        self._said_stretched = self._said_unwritten = False
        self._keep_last, self._keep_best = keep_last, keep_best
        self._guard: SkipCounter | None = None
        self._seconds = seconds
        self._pace = Pace(60.0 * save_minutes, clock=clock)
        self._in_doubt = self._runs()  # they may hold what they held before, until a step is done

    @property
    def step(self) -> int:
        """The step after which the stage goes on; 0 at its beginning."""
        return 0 if self._begins_at is None else self._begins_at.step

    @property
    def begins_at(self) -> Checkpoint | None:
        """The checkpoint to go on from."""
        return self._begins_at

    def save_counts_of(self, guard: Counter) -> Counter:
        """Save the counts of a guard with every checkpoint; a resumed one goes on from them."""
        self._guard = guard
        if self._begins_at is not None:
            counted = self._begins_at.state["guard"]
            guard.total, guard.in_a_row = int(counted["total"]), int(counted["in_a_row"])
        return guard

    def stepping(self) -> AbstractContextManager[None]:
        """Inside, a first Ctrl-C waits for the next call of :meth:`stepped`."""
        for run in self._in_doubt:
            forget_nothing(run)
        self._pace.start()
        return self._interrupts.stepping()

    def restore(self, learner: Learner) -> None:
        """Make a new learner the one of the checkpoint, where there is one."""
        if self._begins_at is not None:
            numbers = self._begins_at.state["learner"]
            learner.restore(self._begins_at.path, numbers)

    def stepped(
        self,
        step: int,
        *,
        learner: Learner | None = None,
        every: int | None = None,
        last: bool = False,
        must: bool = False,
        more: ExtraState | None = None,
    ) -> None:
        """A step is done and logged: save where it is time to, stop where that was asked.

        ``every`` is in steps: None goes by time, and with 0 there is a checkpoint only where the
        run is asked to stop; ``must`` saves in any case. ``more`` writes what the stage keeps
        beside the learner, and returns the numbers of it. What the run takes the place of goes.
        """
        while self._in_doubt:
            forget_before(self._in_doubt.pop())
        due = self._pace.due if every is None else bool(every) and step % every == 0
        wanted = self._pace.on if every is None else bool(every)
        if due or (last and wanted) or must or self._interrupts.asked:
            problem: tuple[str, str] | None = None
            with self._pace.saving():  # a caught write error still counts as time spent
                try:
                    self._save(step, learner, more=more)
                except NotWrittenError as error:
                    if (
                        every is not None
                        or must
                        or self._interrupts.asked
                        or not self._is_ours(error)
                    ):
                        raise
                    problem = (error.reason, error.remedy)
            if problem is not None:
                self._say_unwritten(step, problem, last=last)
            elif every is None and self._pace.stretched and not last:
                self._say_stretched()
        self._interrupts.check(saved=step)

    def _runs(self) -> list[Path]:
        """The folder of the run, and that of the whole where it is one of several adapters."""
        run = self.folder.path.parent
        among = run.parent.name == "adapters" and (run.parents[1] / "run.json").is_file()
        return [run, run.parents[1]] if among else [run]

    def _is_ours(self, error: NotWrittenError) -> bool:
        """Whether it is the checkpoint that was not written, not the rollouts it waits for."""
        return Path(error.filename).is_relative_to(self.folder.checkpoints)

    def _save(self, step: int, learner: Learner | None, *, more: ExtraState | None) -> None:
        def fill(folder: Path) -> dict[str, Any]:
            kept = dict(more(folder)) if more is not None else {}
            guard = self._guard
            counted = (0, 0) if guard is None else (guard.total, guard.in_a_row)
            kept["guard"] = dict(zip(("total", "in_a_row"), counted, strict=True))
            kept["seconds"] = self._seconds()
            return kept if learner is None else {**kept, "learner": learner.state(folder)}

        write_checkpoint(self.folder, step, fill=fill)
        self._saved, self._said_unwritten = step, False
        prune(self.folder, keep_last=self._keep_last, keep_best=self._keep_best)

    def _say_unwritten(self, step: int, problem: tuple[str, str], *, last: bool) -> None:
        """Warn once; a later successful write re-arms the warning."""
        if self._said_unwritten:
            return
        self._said_unwritten = True
        reason, remedy = problem
        again = f", and the next is tried after {self._pace.interval / 60:.3g} minutes"
        warnings.warn(
            f"no checkpoint: {self.folder.checkpoint(step)}: cannot be written: {reason}; "
            f"if the run is killed, it starts over from step {self._saved}. Nothing of it is left, "
            f"and training goes on{'' if last else again}. To have one, {remedy}; "
            "run.keep_last = 1 takes less room, and run.save_minutes = 0 turns them off",
            stacklevel=3,
        )

    def _say_stretched(self) -> None:
        if self._said_stretched:
            return
        self._said_stretched, pace = True, self._pace
        self.warn(
            f"a checkpoint takes {pace.cost:.1f} s: so that they stay below {SHARE:.0%} of the "
            f"time, the next comes after {pace.interval / 60:.3g} minutes, not after "
            f"run.save_minutes. A kill loses no more than that; save_every, in steps, overrules it"
        )
