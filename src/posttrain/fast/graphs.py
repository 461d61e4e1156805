"""Recording what a GPU does in a CUDA graph, and going on unharmed where that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttrain.models.gpu_memory import alone, ran_out


class RecordingError(RuntimeError):
    """What was to be recorded needs the host in its midst: it looks at what the GPU computes."""


class Pool:
    """Memory that graphs have in common, so that no two of them may run at the same time.

    ``broken`` says why recording in it has failed; nothing more is recorded in it then.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.broken = ""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Pool) -> Iterator[None]:
    """Inside, kernels are recorded in ``graph`` and not run; other threads may use the device.

    Where that fails, by :class:`RecordingError` or for want of memory, all else goes on as before.
    """
    if pool.broken:
        raise RecordingError(pool.broken)
    failure: BaseException | None = None
    # The stream is named because a failure leaves another one current.
    with alone, _own_workspaces(), torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:  # noqa: BLE001 - raised again below
                    failure = error
                    if isinstance(error, RuntimeError):
                        error.__traceback__ = None  # PyTorch holds it for ever, and it its frames
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
    raise RecordingError(pool.broken)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Inside, products get workspaces that belong to what is recorded.

    PyTorch keeps one for each thread and stream, and all is recorded on one stream: the recordings
    of all pools would write into that of the first, whose memory goes when that one does.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _explain(failure: BaseException) -> str:
    reason = next(iter(str(failure).splitlines()), type(failure).__name__)
    return f"this model cannot be recorded, so all its kernels are launched anew: {reason}"


def _recover(pool: Pool) -> None:
    """Tell PyTorch that a recording has ended, as it does itself unless one breaks.

    The memory of the pool is given back, and random numbers, which are refused while something is
    recorded, are to be had again once another recording has ended well.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # it was not begun, or has been ended
        torch._C._cuda_endAllocateToPool(device, pool.handle)
        torch._C._cuda_releasePool(device, pool.handle)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
