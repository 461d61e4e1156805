"""Processes that are the ranks of a learner: started once, asked many times, by gloo on the CPU."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEADLINE = 120.0


@functools.cache
def pool() -> RankPool:
    """Three processes for all tests: each takes seconds to import what it needs."""
    made = RankPool(3)
    atexit.register(made.close)
    return made


class RankPool:
    """``most`` processes; :meth:`run` has the first ``size`` of them do the same, as ranks."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._groups = self._size = 0
        pipes = [context.Pipe() for _ in range(most)]
        self._connections = [ours for ours, _ in pipes]
        # One process imports for all: what a library takes seconds for is done once.
        self._mother = context.Process(target=_fork, args=([theirs for _, theirs in pipes],))
        self._mother.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
        """What ``work(ranks, *given)`` returns in each of ``size`` ranks, which join for it."""
        self._leave()
        self._ask(size, functools.partial(_joined, size, self._meeting(), work, *given))
        return self._answers(size)

    def call(self, size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
        """The same, but the ranks stay joined for the next call, until others are to run."""
        if self._size != size:
            self._leave()
            self._ask(size, functools.partial(_join, size, self._meeting()))
            self._answers(size)
            self._size = size
        self._ask(size, functools.partial(_still_joined, size, work, *given))
        return self._answers(size)

    def _leave(self) -> None:
        self._ask(self._size, _leave)
        self._answers(self._size)
        self._size = 0

    def _meeting(self) -> str:
        self._groups += 1
        return str(Path(self._folder.name, f"group-{self._groups}"))

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        self._mother.join(10)
        self._mother.kill()
        self._folder.cleanup()

    def _ask(self, size: int, work: Callable[[int], Any]) -> None:
        for connection in self._connections[:size]:
            connection.send(work)

    def _answers(self, size: int) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections[:size]):
            if not connection.poll(DEADLINE):
                raise TimeoutError(f"rank {rank} has not answered for {DEADLINE} s")
            answers.append(pickle.loads(connection.recv_bytes()))
        broken = [answer for fine, answer in answers if not fine]
        if broken:
            raise RuntimeError("\n".join(broken))
        return [answer for _, answer in answers]


def _fork(connections: list[Connection]) -> None:
    import rank_jobs  # noqa: F401 - and with it all that ranks work with

    fork = multiprocessing.get_context("fork")  # nothing was computed yet, so no thread is lost
    ranks = [fork.Process(target=_serve, args=(n, connections)) for n in range(len(connections))]
    for rank in ranks:
        rank.start()
    for connection in connections:
        connection.close()
    for rank in ranks:
        rank.join()


def _serve(rank: int, connections: list[Connection]) -> None:
    import torch

    torch.set_num_threads(1)
    connection = connections.pop(rank)
    for other in connections:  # else nobody would notice that another rank has died
        other.close()
    while True:
        try:
            work = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, work(rank))
        except Exception:  # noqa: BLE001 - whatever it is, who asked must know
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        # Not by `send`, for which torch shares memory: every tensor would hold a descriptor there.
        connection.send_bytes(pickle.dumps(answer))


def _join(size: int, meeting: str, rank: int) -> Any:
    from posttrain.learn.ranks import connect

    where: Any = {"init_method": f"file://{meeting}", "rank": rank, "world_size": size}
    return connect("cpu", deadline=DEADLINE, **where)


def _joined(size: int, meeting: str, work: Callable[..., Any], *given: Any) -> Any:
    *given, rank = given
    try:
        return work(_join(size, meeting, rank), *given)
    finally:
        _leave(rank)


def _still_joined(size: int, work: Callable[..., Any], *given: Any) -> Any:
    from posttrain.learn.ranks import Ranks

    *given, rank = given
    return work(Ranks(rank=rank, size=size), *given)


def _leave(rank: int) -> None:
    from torch import distributed

    distributed.destroy_process_group()
