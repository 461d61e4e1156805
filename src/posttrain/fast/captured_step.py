"""A step that a GPU replays from a CUDA graph: hundreds of kernels, one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from posttrain.fast.graphs import CaptureError, Pool, capturing
from posttrain.models.gpu_memory import capture_lock

Step = Callable[[], None]


class CapturedStep:
    """A step, captured in a CUDA graph at its second call.

    A step must read and write the same addresses at every call. The first call is an ordinary one:
    it compiles kernels and sizes workspaces, which is not allowed during a capture. A step that
    cannot be captured stays an ordinary one.
    """

    def __init__(self, step: Step, pool: Pool) -> None:
        self._step = step
        self._pool = pool
        self._called = False
        self._replay: Step | None = None

    def __call__(self) -> None:
        if not self._called:
            self._called = True
            with capture_lock:
                self._step()
            return
        if self._replay is None:
            self._replay = self._capture()
        self._replay()

    def _capture(self) -> Step:
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                self._step()
        except CaptureError as error:
            warnings.warn(str(error), stacklevel=3)
            return self._step
        return graph.replay
