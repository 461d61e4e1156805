"""The ranks of a learner as Ray actors, seen from the process that runs the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from posttrain.distributed.ray_rank import LearnerRank, PeerLost
from posttrain.distributed.remote_learner import LearnerCall, OutOfStepError, RanksLostError
from posttrain.distributed.worker import LearnerRequest

STARTING = "start"
GRACE = 5.0  # seconds for the other ranks to answer too, where one has failed
Place = Callable[[int], dict[str, Any]]
"""Options of Ray by which the actor of a rank gets its resources."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How each rank's process is set up."""

    threads: int
    deterministic: bool
    on_gpu: bool
    deadline: float


class RankGroup:
    """``size`` ranks that answer together; every wait ends after the deadline."""

    def __init__(
        self, request: LearnerRequest, *, size: int, place: Place, options: RankOptions
    ) -> None:
        self._ended = False
        self._deadline = options.deadline
        self._names = [f"learner rank {rank}" for rank in range(size)]
        actor = ray.remote(concurrency_groups={"watch": 1})(LearnerRank)
        self._actors = [
            actor.options(max_restarts=0, **place(rank)).remote(
                rank,
                size=size,
                threads=options.threads,
                deterministic=options.deterministic,
                on_gpu=options.on_gpu,
            )
            for rank in range(size)
        ]
        try:
            self._begin(request, size)
        except BaseException:
            self.end()
            raise

    def _begin(self, request: LearnerRequest, size: int) -> None:
        places = self._wait(STARTING, [actor.place.remote() for actor in self._actors])
        self._names = [
            f"learner rank {rank} (process {pid} on {address})"
            for rank, (pid, address) in enumerate(places)
        ]
        if size > 1:
            first = self._actors[0].listen.remote(self._deadline)
            (meeting,) = self._wait("listen", [first])
            self._all("join", meeting, self._deadline)
        self._all("build", ray.put(request))

    def call(self, call: LearnerCall) -> Any:
        """What rank 0 answers once all have; the arguments go to each node once."""
        if self._ended:
            raise OutOfStepError("the ranks were ended after an error")
        asked = ray.put(call)
        return self._wait(call.name, [actor.call.remote(asked) for actor in self._actors])[0]

    def end(self) -> None:
        """Kill the processes, whatever they do."""
        self._ended = True
        for actor in self._actors:
            ray.kill(actor)

    def _all(self, method: str, *given: Any) -> list[Any]:
        return self._wait(method, [getattr(actor, method).remote(*given) for actor in self._actors])

    def _wait(self, doing: str, answers: Sequence[Any]) -> list[Any]:
        """All answers, or the first error; a lost or silent rank is a ``RanksLostError``."""
        waiting = list(answers)
        until, problem = time.monotonic() + self._deadline, None
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not done:
                break
            found = self._problem(answers.index(done[0]), done[0], doing=doing)
            if isinstance(found, RanksLostError):
                raise found
            if found is not None and problem is None:
                problem, until = found, min(until, time.monotonic() + GRACE)
        if isinstance(problem, PeerLost):
            raise RanksLostError(f"a learner rank has lost another one ({problem.why})")
        if isinstance(problem, BaseException):
            if waiting:  # they wait for the rank that has failed, and are out of step
                self.end()
            raise problem
        if waiting:
            raise RanksLostError(self._silent([answers.index(one) for one in waiting], doing))
        return list(ray.get(list(answers)))

    def _problem(self, rank: int, answer: Any, *, doing: str) -> BaseException | PeerLost | None:
        name = self._names[rank]
        try:
            found = ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            return _cause(error, name)
        except ray.exceptions.RayActorError as error:
            return RanksLostError(f"{name} has died during {doing}{_why(error)}")
        except ray.exceptions.RayError as error:
            return RanksLostError(f"{name} gave no answer to {doing} ({type(error).__name__})")
        return found if isinstance(found, PeerLost) else None

    def _silent(self, ranks: Sequence[int], doing: str) -> str:
        """Who has not answered; of several that wait for each other, whose process stands still."""
        if doing == STARTING:
            names = " and ".join(self._names[rank] for rank in ranks)
            return (
                f"{names} could not be started within {self._deadline:g} s (cluster.deadline): no "
                "node has room, or one has gone and none has come in its place"
            )
        asked = {rank: self._actors[rank].alive.remote() for rank in ranks}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=GRACE)
        dead = [rank for rank in ranks if asked[rank] not in done]
        named = " and ".join(self._names[rank] for rank in dead or ranks)
        still = ", whose process stands still," if dead else ""
        return (
            f"{named}{still} did not answer {doing} within {self._deadline:g} s (cluster.deadline)"
        )


def _cause(error: Any, name: str) -> BaseException:
    """What was raised there, as if it had been raised here."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return RuntimeError(f"{name}: {error}")
    if not isinstance(cause, ValueError | OSError):
        cause.add_note(f"in {name}:\n{error}")
    return cause.with_traceback(None)


def _why(error: BaseException) -> str:
    """Ray's reason in one line, where it has one."""
    lines = [line.strip() for line in str(error).splitlines()]
    known = [line for line in lines if line.startswith(("The actor died", "Worker exit", "Owner"))]
    known = known or [line for line in lines if "memory" in line.lower()]
    return f": {known[0][:300]}" if known else ""
