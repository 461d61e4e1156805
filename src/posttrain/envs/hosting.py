"""A worker process of a pool of environments: the episodes that it hosts, the calls under way."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from posttrain.envs.env_worker import work
from posttrain.envs.episodes import EnvJob, Kind
from posttrain.envs.plain_answers import Failure, Plain
from posttrain.forked import START, Forked
from posttrain.protocols import Answer
from posttrain.types import Prompt, Turn

GRACE = 2.0  # seconds behind all limits of a call within which a worker says that one is over
NEVER = float("inf")
Answered = Future[Answer | Failure]


@dataclass(eq=False)
class Episode:
    """One rollout's conversation: all that playing it again takes."""

    number: int
    prompt: Prompt
    seed: int
    log: list[tuple[Turn | None, Plain]]
    worker: EnvWorker | None = None
    busy: bool = False
    closed: bool = False


@dataclass(eq=False)
class EpisodeCall:
    """What is asked of an episode; ``alone`` is one that was under way when a worker died."""

    episode: Episode
    kind: Kind
    turn: Turn | None = None
    future: Answered = field(default_factory=Future)
    deaths: int = 0
    alone: bool = False
    begun: float = 0.0
    due: float = 0.0

    def finish(self, answer: Answer | Failure) -> None:
        """Give the answer to who asked, unless they wait no more."""
        try:
            self.future.set_result(answer)
        except InvalidStateError:
            return


class EnvWorker(Forked):
    """A worker process, the pipe to it, the episodes that it hosts and the calls under way."""

    def __init__(self, env: Any, *, threads: int, memory_mb: int) -> None:
        self.ready = False
        self.due = time.monotonic() + START
        self.calls: dict[int, EpisodeCall] = {}
        self.episodes: set[Episode] = set()
        self._numbers = itertools.count()
        self._unread = b""
        super().__init__(work, env, threads=threads, memory_mb=memory_mb)

    @property
    def hosted(self) -> int:
        """How many episodes it hosts."""
        return len(self.episodes)

    def start(self, call: EpisodeCall, seconds: float) -> None:
        """Send it a call, with all that playing its episode takes where it is not hosted here."""
        episode, number = call.episode, next(self._numbers)
        known = episode.worker is self
        methods = 1 if known else 2 + len(episode.log)
        self.calls[number] = call
        self.episodes.add(episode)
        job = make_job(call, seconds, number=number, known=known)
        episode.worker, episode.busy = self, True
        call.begun = time.monotonic()
        call.due = call.begun + seconds * methods + GRACE
        self._look()
        self.line.send(job)

    def finish(self, number: int, *, left: bool = False) -> None:
        """A call is over; the episode has ``left`` where it has no state here."""
        call = self.calls.pop(number)
        call.episode.busy = False
        if left or call.kind == "close":
            self.episodes.discard(call.episode)
            call.episode.worker = None
        self._look()

    def _look(self) -> None:
        self.due = min((call.due for call in self.calls.values()), default=NEVER)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived; an incomplete one is kept for the next call."""
        data = os.read(self.line.fileno(), 2**20)
        if not data:
            raise EOFError
        *messages, self._unread = (self._unread + data).split(b"\n")
        return map(json.loads, messages)


def make_job(call: EpisodeCall, limit: float, *, number: int = 0, known: bool = False) -> EnvJob:
    """What a worker is told of a call."""
    episode = call.episode
    return EnvJob(
        number=number,
        kind=call.kind,
        episode=episode.number,
        prompt=episode.prompt,
        seed=episode.seed,
        history=() if known else tuple(episode.log),
        turn=call.turn,
        limit=limit,
    )
