"""One machine with several GPUs, or several machines, by torchrun: rank 0 runs, the others serve.

``torchrun --nproc-per-node 4 -m posttrain run RECIPE`` starts four processes of the same command.
The first does what one process does, but its learner is spread over all four; the others build
their parts of it and do what they are asked, until the first is done.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from posttrain.build.cluster import LearningStage
from posttrain.config import Resolved
from posttrain.distributed.remote_learner import LearnerCall, RemoteLearner
from posttrain.distributed.worker import (
    LearnerHost,
    LearnerRequest,
    compute_deterministically,
    handed_over,
    peer_gone,
)
from posttrain.learn.ranks import connect
from posttrain.models.load import Policy
from posttrain.models.reward import RewardModel
from posttrain.protocols import Engine, Learner
from posttrain.track.safe_terminal import say

if TYPE_CHECKING:
    from posttrain.build.setup import Setup

DEADLINE = 600.0  # seconds that a rank may keep the others waiting
BEAT = 2.0  # seconds between two signs of life of rank 0
LONGEST_PAUSE = 0.02  # seconds between two looks for a call
SILENCE = 3 * BEAT  # after which rank 0 has gone, where there is another reason to think so
GRACE = 15.0  # seconds that a rank which has failed leaves to rank 0, to say so and end
SCRATCH = ".ranks"  # in the run folder; removed at the end
END = "end"


class Calls:
    """Counts the calls of rank 0, and those that each rank is through with, in a shared store.

    The counts only grow: a rank may look long after rank 0 has gone on to the next calls.

    >>> store = distributed.HashStore()
    >>> first, other = (Calls(store, rank=rank, size=2) for rank in range(2))
    >>> first.add(), other.is_due(), first.behind()
    (None, True, [1])
    >>> other.done(), other.is_due(), first.behind()
    (None, False, [])
    """

    def __init__(self, store: distributed.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0  # of this rank: calls made by rank 0, done by the others

    def add(self) -> None:
        """Of rank 0: there is one more."""
        self._number = self._store.add("calls", 1)

    def is_due(self) -> bool:
        """Whether there is a call that this rank has not done."""
        return self._store.add("calls", 0) > self._number

    def done(self) -> None:
        """This rank is through with a call, well or not."""
        self._number = self._store.add(f"done-{self._rank}", 1)

    def behind(self) -> list[int]:
        """Of rank 0: the ranks that are not through with its last call."""
        others = range(1, self._size)
        return [rank for rank in others if self._store.add(f"done-{rank}", 0) < self._number]


class Meeting:
    """Where the ranks of one torchrun meet, and how rank 0 asks all of them.

    Rank 0 shows that it lives. The others wait for its calls, and end where it no longer does.
    """

    def __init__(self, *, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        place = int(os.environ["LOCAL_RANK"])
        on_gpu = torch.cuda.is_available()
        if on_gpu and place >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun: {os.environ['LOCAL_WORLD_SIZE']} ranks on a machine with "
                f"{torch.cuda.device_count()} GPUs; give --nproc-per-node as many as there are GPUs"
            )
        if on_gpu:
            torch.cuda.set_device(place)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True),
            timeout=timedelta(seconds=deadline),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = distributed.PrefixStore(f"posttrain-{attempt}", store)
        self.ranks = connect(
            "cuda" if on_gpu else "cpu",
            deadline=deadline,
            store=distributed.PrefixStore("ranks", self._store),
            rank=rank,
            world_size=size,
        )
        self._calls = Calls(self._store, rank=rank, size=size)
        self._host = LearnerHost(self.ranks)
        self._ended = threading.Event()
        self._ending, self._heard = False, (-1, time.monotonic())
        if rank == 0:
            threading.Thread(target=self._live, name="sign of life", daemon=True).start()

    def ask(self, call: LearnerCall | LearnerRequest) -> Any:
        """Have all ranks do a call, this one too; its own answer."""
        try:
            self._calls.add()
            distributed.broadcast_object_list([call], src=0)
            return self._done(call)
        except RuntimeError as error:
            if not peer_gone(error):
                raise
            raise RuntimeError(
                f"{self._failed(error)}. posttrain resume goes on, with any number of ranks"
            ) from error

    def serve(self) -> None:
        """Do what rank 0 asks, until it is done."""
        while self._called():
            asked: list[Any] = [None]
            try:
                distributed.broadcast_object_list(asked, src=0)
                self._done(asked[0])
                self._calls.done()
            except Exception as error:  # noqa: BLE001 - rank 0 says it, whatever it is
                self._fail(error)

    def end_soon(self, *signalled: Any) -> None:
        """End as soon as rank 0 does: it may still write a checkpoint."""
        self._ending = True

    def end(self) -> None:
        """Let the other ranks end: rank 0 asks nothing more."""
        if not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(RuntimeError):  # where torchrun itself has gone
                self._store.set(END, "")

    def _done(self, call: LearnerCall | LearnerRequest) -> Any:
        if isinstance(call, LearnerRequest):
            if self.ranks.rank:
                _settle(call.recipe)
            return self._host.build(call)
        return self._host.answer(call)

    def _called(self) -> bool:
        """Wait for the next call; False: rank 0 is done."""
        pause = 0.001
        while not self._calls.is_due():  # a wait with a limit would warn
            if self._store.check([END]):
                return False
            if self._silent(SILENCE if self._ending else self._deadline):
                self._leave("rank 0 has ended, or no longer gives a sign of life")
            pause = min(2 * pause, LONGEST_PAUSE)
            time.sleep(pause)
        return True

    def _silent(self, seconds: float) -> bool:
        """Whether rank 0 has given no sign of life for so long."""
        beats = self._store.add("beats", 0)
        if beats != self._heard[0]:
            self._heard = (beats, time.monotonic())
        return time.monotonic() - self._heard[1] > seconds

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(RuntimeError):
                self._store.add("beats", 1)

    def _fail(self, error: Exception) -> None:
        """Say what went wrong here, and leave: ranks that wait for this one must not wait long."""
        failed = f"learner rank {self.ranks.rank} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            if peer_gone(error):
                self._calls.done()  # it could not go on, and is not the one that was waited for
            elif not self._store.check(["failed"]):
                self._store.set("failed", failed)
        details = "".join(traceback.format_exception(error))
        distributed.destroy_process_group()  # who waits for this rank learns so
        begun = time.monotonic()
        while time.monotonic() - begun < GRACE and not self._store.check([END]):
            if self._silent(SILENCE):
                break
            time.sleep(0.1)
        self._leave(f"{failed}\n{details}")

    def _failed(self, error: RuntimeError) -> str:
        """What another rank has said before it left, or else which ones have not answered.

        A rank says so before it leaves, and this one may see that first.
        """
        silent = ""
        with contextlib.suppress(RuntimeError):  # where torchrun itself has gone
            begun = time.monotonic()
            while time.monotonic() - begun < SILENCE and self._calls.behind():
                if self._store.check(["failed"]):
                    return self._store.get("failed").decode()
                time.sleep(0.1)
            named = " and ".join(f"learner rank {rank}" for rank in self._calls.behind())
            silent = f" (no answer from {named})" if named else ""
        return f"a learner rank has gone, or did not answer{silent}: {error}"

    def _leave(self, why: str) -> None:
        say(f"posttrain: {why}", error=True)
        sys.stderr.flush()
        os._exit(1)  # threads of libraries may wait for ranks that have gone


def _settle(recipe: Resolved) -> None:
    """Compute as a recipe asks; rank 0 does so for the whole run already."""
    beside = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(recipe.run.threads or max(1, (os.cpu_count() or 1) // beside))
    if recipe.run.deterministic:
        compute_deterministically()


class TorchrunLearner(RemoteLearner):
    """A learner over the ranks of torchrun; where one of them is lost, torchrun ends all."""

    def _ask(self, name: str, *given: Any, changes: bool = False) -> Any:
        self._is_current = self._is_current and not changes
        return self._answer(LearnerCall(name, given, self._version))

    def _keep(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        self._state = (folder.absolute(), dict(numbers))


class _Hosts:
    """The ranks, built for one learner."""

    def __init__(self, meeting: Meeting, request: LearnerRequest) -> None:
        self.call: Callable[[LearnerCall], Any] = meeting.ask
        meeting.ask(request)

    def end(self) -> None:
        """The next learner takes the place of this one."""


class TorchrunCluster:
    """Satisfies ``Cluster``: the learner is over all ranks, and this process samples."""

    def __init__(self, recipe: Resolved, folder: Path, *, meeting: Meeting) -> None:
        size = meeting.ranks.size
        if recipe.cluster is not None and recipe.cluster.learners not in (1, size):
            raise ValueError(
                f"cluster.learners: {recipe.cluster.learners} asked for, and torchrun has started "
                f"{size} ranks; give --nproc-per-node {recipe.cluster.learners}, or drop the key"
            )
        self._meeting, self._scratch = meeting, folder.absolute() / SCRATCH

    def make_learner(
        self,
        recipe: Resolved,
        model: Policy | RewardModel,
        *,
        stage: LearningStage,
        total_steps: int,
        reward_model: Path | None = None,
    ) -> Learner:
        """The learner of a stage, over all ranks; that of the stage before is dropped."""
        request, save = handed_over(
            recipe,
            model,
            stage=stage,
            scratch=self._scratch,
            total_steps=total_steps,
            reward_model=reward_model,
        )
        start = functools.partial(_Hosts, self._meeting, request)
        return TorchrunLearner(start, model=model.model, save=save, scratch=self._scratch)

    def make_engine(self, setup: Setup) -> Engine:
        """Not asked for: ``cluster.engines`` wants an address, which torchrun has none of."""
        raise ValueError("cluster.engines: torchrun's ranks only learn, and the first one samples")

    def metrics(self) -> dict[str, float]:
        """Nothing: a rank that is lost ends the run, so there are no restarts to count."""
        return {}

    def close(self) -> None:
        """Remove what was kept for the ranks; they serve until this process ends."""
        shutil.rmtree(self._scratch, ignore_errors=True)


_meetings: list[Meeting] = []  # of this process: one, where torchrun has started it


def meeting() -> Meeting | None:
    """The meeting of this process, where torchrun has started it with others."""
    return _meetings[0] if _meetings else None


def enter() -> None:
    """At the start of a process of torchrun: rank 0 returns, the others serve and end."""
    if int(os.environ["RANK"]) == 0:
        _meetings.append(Meeting())
        atexit.register(_meetings[0].end)
        return
    warnings.simplefilter("ignore")  # rank 0 has the same ones
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        met = Meeting()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, met.end_soon)
        met.serve()
    os._exit(0)  # no thread of a library is to be waited for
