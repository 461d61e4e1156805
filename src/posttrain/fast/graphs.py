"""Capturing what a GPU does in a CUDA graph, and going on unharmed where that fails."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from posttrain.models.gpu_memory import capture_lock, ran_out

Step = Callable[[], None]


class CaptureError(RuntimeError):
    """The code cannot be captured: in between, the host looks at what the GPU computes."""


class Pool:
    """Memory that graphs have in common, so that no two of them may run at the same time.

    ``broken`` says why a capture in it has failed; then nothing more is captured in it.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.broken = ""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Pool) -> Iterator[None]:
    """Inside, kernels are captured in ``graph`` and not run; other threads may use the device.

    Where that fails, by :class:`CaptureError` or for want of memory, all else goes on as before.
    """
    if pool.broken:
        raise CaptureError(pool.broken)
    failure: BaseException | None = None
    # A failed capture leaves its own stream current; this one is restored.
    with capture_lock, _own_workspaces(), torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:  # noqa: BLE001 - raised again below
                    failure = error
                    if isinstance(error, RuntimeError):
                        # PyTorch keeps the error for ever, and its traceback would keep all
                        # local variables: the tensors of the pass.
                        error.__traceback__ = None
        except RuntimeError as error:
            failure = failure or error
            pool.broken = _explain(failure)
            _recover(pool)
    if failure is None:
        return
    if ran_out(failure):
        raise torch.OutOfMemoryError(str(failure))
    if not isinstance(failure, RuntimeError):
        raise failure
    pool.broken = _explain(failure)
    raise CaptureError(pool.broken)


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


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Inside, matrix products get workspaces that belong to the graph being captured.

    PyTorch keeps one workspace for each thread and stream, and all graphs are captured on one
    stream: the graphs of all pools would write into the workspace of the first pool, whose memory
    is freed together with that pool.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _explain(failure: BaseException) -> str:
    reason = next(iter(str(failure).splitlines()), type(failure).__name__)
    return (
        "this model cannot be captured in a CUDA graph, so its kernels are launched one by one: "
        f"{reason}"
    )


def _recover(pool: Pool) -> None:
    """Tell PyTorch that a capture has ended, which it forgets where a capture breaks.

    The memory of the pool is given back. PyTorch refuses random numbers during a capture, and goes
    on refusing them until another capture has ended well: so an empty one is made.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the capture has not begun, or has ended
        torch._C._cuda_endAllocateToPool(device, pool.handle)
        torch._C._cuda_releasePool(device, pool.handle)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
