"""A step that a GPU plays from a recording: hundreds of kernels, one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from posttrain.fast.graphs import Pool, RecordingError, recording
from posttrain.models.gpu_memory import alone

Step = Callable[[], None]


class Recorded:
    """A step, recorded in a CUDA graph at its second call.

    A step must find its inputs where they were, and leave its results there, too. The first call
    is an ordinary one: it compiles kernels and sizes workspaces, which a recording may not. A step
    that cannot be recorded stays an ordinary one.
    """

    def __init__(self, step: Step, pool: Pool) -> None:
        self._step = step
        self._pool = pool
        self._called = False
        self._play: Step | None = None

    def __call__(self) -> None:
        if not self._called:
            self._called = True
            with alone:
                self._step()
            return
        if self._play is None:
            self._play = self._record()
        self._play()

    def _record(self) -> Step:
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._pool):
                self._step()
        except RecordingError as error:
            warnings.warn(str(error), stacklevel=3)
            return self._step
        return graph.replay
