"""How rank 0 of torchrun tells the others of its calls, and who of them has answered."""

import threading
from datetime import timedelta

from torch import distributed

from posttrain.distributed.torchrun import Calls

SIZE = 4


def store() -> distributed.TCPStore:
    return distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def test_a_rank_that_looks_late_misses_no_call() -> None:
    """Rank 0 has made three by the time the last rank looks for the first."""
    shared, made = store(), threading.Event()
    seen: list[list[bool]] = [[] for _ in range(SIZE)]

    def serve(rank: int) -> None:
        calls = Calls(shared, rank=rank, size=SIZE)
        if rank == SIZE - 1:
            made.wait()
        while len(seen[rank]) < 3:
            if calls.is_due() or made.is_set():  # after the last one, every look must find one
                seen[rank].append(calls.is_due())
                calls.done()
        seen[rank].append(calls.is_due())

    first = Calls(shared, rank=0, size=SIZE)
    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(1, SIZE)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        first.add()
    made.set()
    for thread in threads:
        thread.join()
    assert seen[1:] == [[True, True, True, False]] * (SIZE - 1)
    assert first.behind() == []


def test_those_that_are_not_through_with_the_last_call_are_behind() -> None:
    shared = store()
    first, *others = (Calls(shared, rank=rank, size=SIZE) for rank in range(SIZE))
    first.add()
    for other in others:
        other.done()
    first.add()
    assert first.behind() == [1, 2, 3]
    others[1].done()
    assert first.behind() == [1, 3]
