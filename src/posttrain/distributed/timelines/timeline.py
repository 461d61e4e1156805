"""What the RL stage does, recorded as spans: its engine, its graders, its learner, and the loop."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from posttrain.build.sampler import Flow
from posttrain.build.setup import Setup
from posttrain.distributed.spans import Span, Spans
from posttrain.distributed.timelines.chrome_trace import TraceFile
from posttrain.pipelines.rl import Step
from posttrain.protocols import Engine, Learner, Sync
from posttrain.types import Collected

Part = TypeVar("Part")
DRIVER = "driver"
FILE_NAME = "trace.json"
LEARNER = {
    "infer": "log-probs",
    "step": "optimiser step",
    "refresh_reference": "new reference",
    "save": "saving",
    "state": "checkpoint",
}


class Recorded:
    """A part of which some methods are recorded; all else is the part's own."""

    def __init__(self, part: object, spans: Spans, *, who: str, names: Mapping[str, str]) -> None:
        object.__setattr__(self, "_recorded", (part, spans, who, names))

    def __getattr__(self, name: str) -> Any:
        part, spans, who, names = object.__getattribute__(self, "_recorded")
        found = getattr(part, name)
        if name not in names:
            return found

        @functools.wraps(found)  # whoever asks for the parameters is told those of the part
        def recorded(*given: Any, **more: Any) -> Any:
            with spans.record(who, names[name]):
                return found(*given, **more)

        return recorded

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_recorded")[0], name, value)


class Timeline:
    """Records what it is handed, and writes the last steps; without spans it hands all back.

    Where learner and engines are ``elsewhere``, they have rows of their own, and what is called
    here is a wait of the driver.
    """

    def __init__(
        self, spans: Spans | None = None, file: TraceFile | None = None, *, elsewhere: bool = False
    ) -> None:
        self._spans, self._file, self._elsewhere = spans, file, elsewhere
        self._step_began = time.time()

    def setup(self, setup: Setup) -> Setup:
        """The setup, with its grading recorded."""
        return replace(setup, scorer=self._part(setup.graded, "grading", {"score": "grading"}))

    def engine(self, engine: Engine) -> Engine:
        """The engine, with its sampling recorded."""
        who = DRIVER if self._elsewhere else "engine"
        return self._part(engine, who, {"generate": "sampling"})

    def learner(self, learner: Learner) -> Learner:
        """The learner, with its steps recorded."""
        return self._part(learner, DRIVER if self._elsewhere else "learner", LEARNER)

    def _part(self, part: Part, *told: Any) -> Part:
        if self._spans is None:
            return part
        who, names = told
        return cast(Part, Recorded(part, self._spans, who=who, names=names))

    def flow(self, flow: Flow) -> Flow:
        """What feeds the loop, with its waiting, its syncs and its evaluations recorded."""
        if self._spans is None:
            return flow
        return replace(
            flow,
            batches=self._source(flow.batches),
            sync=self._sync(flow.sync),
            idle=functools.partial(self._evaluating, flow.idle),
        )

    def _source(self, batches: Iterable[Collected]) -> Iterator[Collected]:
        remaining = iter(batches)
        while True:
            with self._recording("waiting for a batch"):
                collected = next(remaining, None)
            if collected is None:
                return
            yield collected

    def _sync(self, sync: Sync) -> Sync:
        def recorded(version: int) -> None:
            with self._recording("sync"):
                sync(version)

        return recorded

    @contextlib.contextmanager
    def _evaluating(
        self, idle: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        with self._recording("evaluating"), idle():
            yield

    def _recording(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._spans.record(DRIVER, what) if self._spans else contextlib.nullcontext()

    def on_step(self, on_step: Callable[[Step], None]) -> Callable[[Step], None]:
        """What is done after a step, recorded with the step as a whole."""
        spans, file = self._spans, self._file
        if spans is None or file is None:
            return on_step

        def recorded(taken: Step) -> None:
            with spans.record(DRIVER, "after the step"):
                on_step(taken)
            ended = time.time()
            spans.add(Span(DRIVER, f"step {taken.state.step}", self._step_began, ended))
            self._step_began = ended
            file.stepped()

        return recorded


@contextlib.contextmanager
def timeline(setup: Setup, folder: Path) -> Iterator[Timeline]:
    """A timeline of the stage in ``folder``, where ``run.trace`` asks for one."""
    if not setup.recipe.run.trace:
        yield Timeline()
        return
    spans: Spans = getattr(setup.cluster, "spans", None) or Spans()  # theirs are in it already
    file = TraceFile(folder / FILE_NAME, spans, begun=time.time())
    try:
        yield Timeline(spans, file, elsewhere=setup.cluster is not None)
    finally:
        file.write()
