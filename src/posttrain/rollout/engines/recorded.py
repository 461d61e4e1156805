"""A step that a GPU plays from a recording: hundreds of kernels, one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], None]


class Recorded:
    """A step, recorded in a CUDA graph at its second call.

    A step must find its inputs where they were, and leave its results there, too. The first call
    is an ordinary one: it compiles kernels and sizes workspaces, which a recording may not. Graphs
    of one ``pool`` share their memory, so no two of them may run at the same time.
    """

    def __init__(self, step: Step, pool: Any) -> None:
        self._step = step
        self._pool = pool
        self._called = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._called:
            self._called = True
            self._step()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device, as the learner does while it trains.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step()
            self._graph = graph
        self._graph.replay()
