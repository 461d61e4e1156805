"""Splits the time of a step into waiting (rollouts, weight sync) and training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from posttrain.protocols import Sync
from posttrain.types import Collected


class Clock:
    """Wraps source and sync of a loop: their time is waiting, the rest of a step is training.

    With lag 0, the time of waiting is that of sampling and grading.
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._waited = 0.0

    def source(self, batches: Iterable[Collected]) -> Iterator[Collected]:
        """The batches of a source, timed; a step begins when its batch is requested."""
        remaining = iter(batches)
        while True:
            self._begun = time.perf_counter()
            collected = next(remaining, None)
            if collected is None:
                return
            self._waited = time.perf_counter() - self._begun
            yield collected

    def sync(self, sync: Sync) -> Sync:
        """A sync, timed."""

        def waited(version: int) -> None:
            begun = time.perf_counter()
            sync(version)
            self._waited += time.perf_counter() - begun

        return waited

    def seconds(self) -> dict[str, float]:
        """The step up to now."""
        spent = time.perf_counter() - self._begun
        return {"time/wait": self._waited, "time/train": spent - self._waited}
