"""Rollouts ahead of learning: the next batch is made while the learner trains on this one.

    learner   ┤ waits   ├ trains on 0 ┤ sync 1 ├ trains on 1 ┤ sync 2 ├ trains on 2 ┤ …
    producer  ┤ batch 0 ├ batch 1     ┤        ├ batch 2     ┤        ├ batch 3     ┤ …

Batch k is sampled with version max(0, k − max_lag) of the weights and no other: it begins once that
version has been synced, and the next sync waits until it is done. So every batch is exactly
min(k, max_lag) updates old when it is learned, and a run repeats bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

import torch

from posttrain.cpu_threads import STARTING
from posttrain.protocols import Sync
from posttrain.types import Collected


class _Closed(BaseException):
    """Ends the producer in the middle of a batch; no ``except Exception`` may swallow it."""


class _Permit(NamedTuple):
    """Leave to make one batch, once the device has done what stood before ``after``."""

    after: torch.cuda.Event | None


class RunAhead:
    """Yields what ``batches`` yields, made by a thread that runs ``max_lag`` updates ahead.

    Whoever iterates calls :meth:`sync` (a :class:`posttrain.protocols.Sync`) once after each batch
    it has learned; the engine needs weights of its own, which the inner ``sync`` fills. What goes
    wrong in the thread is raised where its batch is asked for, as it would be without a thread.
    Use it in a ``with`` block: leaving it ends the thread, in the middle of a batch if need be.

    The thread holds no lock and shares no variable: it answers each permit with a batch or an
    exception, so it is idle as soon as all permits are answered. On a GPU it works on a stream of
    its own, and has waited for that stream when it answers.

    ``waiting`` are the batches that a run which goes on had made and not yet learned.
    """

    def __init__(
        self,
        batches: Iterator[Collected],
        sync: Sync,
        *,
        max_lag: int,
        device: torch.device | None = None,
        waiting: Sequence[Collected] = (),
    ) -> None:
        if max_lag < 1:
            raise ValueError(
                f"max_lag: must be at least 1, got {max_lag}; with 0 iterate over the batches"
            )
        self._batches = batches
        self._sync = sync
        self._max_lag = max_lag
        self._lane = _Lane(device)
        self._permits: SimpleQueue[_Permit | None] = SimpleQueue()
        self._answers: SimpleQueue[Collected | BaseException] = SimpleQueue()
        self._arrived: deque[Collected | BaseException] = deque(waiting)
        self._under_way = 0  # permits that are not answered yet
        self._thread: threading.Thread | None = None
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Collected:
        """The next batch, in order; the first call starts the thread."""
        if self._closed:
            raise StopIteration
        if self._thread is None:
            self._start()
        if not self._arrived:
            self._receive()
        found = self._arrived.popleft()
        if isinstance(found, BaseException):
            self.close()
            raise found
        return found

    def sync(self, version: int) -> None:
        """Wait for the batches of the version before, hand over the weights, begin the next."""
        self._settle()
        self._sync(version)
        if self._thread is not None and not self._closed:
            self._permit()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, the thread makes nothing: engine and scorer are the caller's alone."""
        self._settle()
        with self._lane.entered(self._lane.mark()):
            yield

    def waiting(self) -> list[Collected]:
        """The batches that are made and not yet asked for, in order."""
        made = itertools.takewhile(lambda found: isinstance(found, Collected), self._arrived)
        return [found for found in made if isinstance(found, Collected)]

    def close(self) -> None:
        """End the thread; a batch under way is broken off at its next Python instruction."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        if self._under_way:
            _interrupt(self._thread)  # before the last permit: it cannot have ended yet
        self._permits.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        # A daemon: an interpreter that is left by force does not wait for the batch.
        self._thread = threading.Thread(target=self._produce, name="rollouts", daemon=True)
        self._thread.start()
        for _ in range(self._max_lag + 1 - len(self._arrived)):
            self._permit()

    def _permit(self) -> None:
        self._under_way += 1
        self._permits.put(_Permit(self._lane.mark()))

    def _receive(self) -> None:
        if not self._under_way:
            raise RuntimeError(
                f"run ahead: a batch is asked for that needs newer weights (max_lag = "
                f"{self._max_lag}); call sync after each batch that was learned"
            )
        self._arrived.append(self._answers.get())
        self._under_way -= 1

    def _settle(self) -> None:
        while self._under_way:
            self._receive()

    def _produce(self) -> None:
        """The thread: one answer for each permit, until close() ends it."""
        with contextlib.suppress(_Closed):
            while (permit := self._permits.get()) is not None:
                self._answers.put(self._attempt(permit))

    def _attempt(self, permit: _Permit) -> Collected | BaseException:
        try:
            with self._lane.entered(permit.after):
                return next(self._batches)
        except _Closed:
            raise
        except BaseException as problem:  # noqa: BLE001 - raised where the batch is asked for
            return problem


class _Lane:
    """Where the producer's kernels run: a stream of their own on a GPU, elsewhere no difference."""

    def __init__(self, device: torch.device | None) -> None:
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def mark(self) -> torch.cuda.Event | None:
        """What the calling thread has given to the device so far."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    @contextlib.contextmanager
    def entered(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, kernels run here, behind ``after``; at the end all of them have run."""
        if self._stream is None or after is None:
            yield
            return
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def _interrupt(thread: threading.Thread) -> None:
    """Raise ``_Closed`` in a thread at its next instruction, as Ctrl-C does in the main thread."""
    with STARTING:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Closed)
        )
