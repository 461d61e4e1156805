"""Several engines that sample as one: small pieces of work go to whichever is free.

    call ──► pieces ──► queue ──► engine 0 ─┐
                          ▲   └─► engine 1 ─┴─► answers ──► replies ──► rollouts
                          └── the pieces of an engine that died ──┘

What a sequence draws depends on its seed and its number alone, and the pieces of a call do not
depend on who is free: neither the number of engines, nor who serves what, nor a retry changes a
token. Replies are given in the process that calls, turn after turn: an environment is never asked
twice because an engine died, and engines go on with other sequences meanwhile. A sequence whose
reply comes later is put back then, with those that have come by that time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from posttrain.distributed.engine_host import Sequences
from posttrain.distributed.pool_member import (
    Answer,
    Board,
    Member,
    Piece,
    Probe,
    Pushed,
    not_refreshed,
)
from posttrain.distributed.replica import Replica
from posttrain.distributed.spans import Spans
from posttrain.distributed.wire import pack_tensor
from posttrain.protocols import Engine, Learner, Reply
from posttrain.rollout.engines.conversation import Replies, begun, by_prompt
from posttrain.rollout.engines.requests import check_num_samples, check_prompts
from posttrain.track.progress import advance
from posttrain.types import Part, Prompt, Rollout, Sampling, Turn
from posttrain.types.ways import Way

# Pieces that each engine gets of a large call. More of them would even out who comes last, and cost
# more than that: a pass over few sequences takes nearly as long as one over many.
ROUNDS = 1
LOOK = 0.5  # seconds between two looks at whether anyone is still there


class EnginePool:
    """Satisfies ``Engine`` over the engines that ``make`` makes, one in each replica.

    ``longest`` is the context length of the model, if it has one. ``probe`` is what every engine
    must prove itself by when it has new weights. ``share`` makes weights known to all replicas
    once, as they are then (``ray.put``). No engine up for ``deadline`` seconds, though each was
    started anew, is an error that names them; ``say`` tells of those that are.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        make: Callable[[], Engine],
        *,
        longest: int | None,
        probe: Probe | None,
        deadline: float,
        say: Callable[[str], None],
        share: Callable[[Any], Any] = copy.deepcopy,
        spans: Spans | None = None,
    ) -> None:
        if not replicas:
            raise ValueError("replicas: a pool needs at least one")
        self.version = 0
        self._board = Board()
        self._members = [
            Member(replica, self._board, make=make, probe=probe, say=say, spans=spans)
            for replica in replicas
        ]
        self._longest, self._probe = longest, probe
        self._deadline, self._share = deadline, share
        self._looked = time.monotonic()
        self._seen = {member.name: (0, 0.0) for member in self._members}
        for member in self._members:
            member.begin()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        reply: Reply | None = None,
        part: Part | None = None,
    ) -> list[list[Rollout]]:
        """``num_samples`` rollouts of each prompt, in order; the seed decides every token."""
        check_num_samples(num_samples)
        check_prompts(prompts, sampling, limit=self._longest)
        room = None if self._longest is None else self._longest - sampling.max_new_tokens
        rollouts = begun(prompts, num_samples=num_samples, part=part)
        first = part.turn if part else 0
        with self._working() as (put, answers, wake):
            replies = Replies(reply, longest=room, when_done=wake)
            for numbers in self._cut(tuple(rollouts), num_samples):
                place = Part(numbers=numbers, turn=first)
                put(_sequences(rollouts, place, sampling=sampling, seed=seed))
            for answer in answers(replies):
                if answer is not None:
                    for number, turn in zip(
                        answer.piece.asked.part.numbers, answer.turns, strict=True
                    ):
                        turns, by = (*rollouts[number].turns, turn), answer.engine
                        rollouts[number] = replace(rollouts[number], turns=turns, engine=by)
                        replies.ask(rollouts[number], number)
                answered = replies.at_once() | replies.come()
                going = {number: whole for number, whole in answered.items() if whole is not None}
                advance(len(answered) - len(going))
                rollouts |= going
                for place in _parts(going, first):
                    put(_sequences(rollouts, place, sampling=sampling, seed=seed))
        return by_prompt(rollouts, num_samples)

    def sync(self, learner: Learner) -> PoolSync:
        """Gives every engine the learner's weights, now and whenever it is called."""
        sync = PoolSync(self, learner)
        sync(learner.version)
        return sync

    def push(self, learner: Learner, version: int) -> None:
        """Give every engine the learner's weights, and have each prove that it has them.

        An engine takes them between two pieces: what others sample meanwhile carries the version
        that it was sampled by. One that is not up then is given them when it is.
        """
        packed = {name: pack_tensor(weight) for name, weight in learner.weights().items()}
        pushed = Pushed(version=version, payload=self._share(packed))
        board = self._board
        with board.changed:
            board.weights, self.version = pushed, version
            board.changed.notify_all()
        while not (drawn := self._drawn_by_all(pushed)):
            self._look()
        reference: Sequence[Turn] = ()
        if self._probe is not None:
            scored = self._probe.scored(
                list(drawn.values()), lambda batch: learner.infer(batch).need("old_logprobs")
            )
            for (name, turns), own in zip(drawn.items(), scored, strict=True):
                problem = self._probe.problem(turns, own)
                if problem:
                    raise not_refreshed(name, version, problem=problem)
            reference = scored[0]
        with board.changed:
            pushed.passed, pushed.reference = drawn, reference
            board.changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """What the engines did since this was asked last; restarts and retries since the start."""
        now = time.monotonic()
        lasted, self._looked = now - self._looked, now
        with self._board.changed:
            queued, self._board.queued = self._board.queued, []
        found = {
            "cluster/engine_restarts": float(sum(member.restarts for member in self._members)),
            "cluster/retried_groups": float(self._board.retried),
            "cluster/queue": sum(queued) / len(queued) if queued else 0.0,
        }
        idle = []
        for number, member in enumerate(self._members):
            tokens, busy = self._seen[member.name]
            self._seen[member.name] = (member.tokens, member.busy)
            tokens, busy = member.tokens - tokens, member.busy - busy
            idle.append(max(0.0, 1 - busy / lasted) if lasted else 0.0)
            found[f"cluster/engine_{number}/tokens_per_second"] = tokens / busy if busy else 0.0
            found[f"cluster/engine_{number}/idle"] = idle[-1]
        found["cluster/engine_idle"] = sum(idle) / len(idle)
        return found

    def way(self) -> Way:
        """That of the engines, and how many there are."""
        count = f"{len(self._members)} engine{'s' if len(self._members) > 1 else ''}"
        ways = [member.facts.get("way") for member in self._members]
        own = next((way for way in ways if isinstance(way, Way)), None)
        if own is None:
            return Way(uses=(count,))
        return Way(uses=(f"{count}: {own.uses[0]}", *own.uses[1:]), without=own.without)

    def close(self) -> None:
        """End every replica."""
        with self._board.changed:
            self._board.closed = True
            self._board.todo.clear()
            self._board.changed.notify_all()
        for member in self._members:
            member.end()

    def _cut(self, numbers: Sequence[int], num_samples: int) -> list[tuple[int, ...]]:
        """The numbers of each piece: whole groups, one or more."""
        groups = len(numbers) // num_samples
        size = max(1, groups // (ROUNDS * len(self._members))) * num_samples
        return [tuple(numbers[n : n + size]) for n in range(0, len(numbers), size)]

    @contextmanager
    def _working(
        self,
    ) -> Iterator[
        tuple[
            Callable[[Sequences], None],
            Callable[[Replies], Iterator[Answer | None]],
            Callable[[int], None],
        ]
    ]:
        """How to have pieces done, their answers until all are there, and how to be woken.

        Whoever is woken gets None for an answer. Who leaves early, by an error or an interrupt,
        leaves nothing in the queue.
        """
        pieces: list[Piece] = []
        under_way = 0
        arrived: SimpleQueue[Answer | BaseException | None] = SimpleQueue()

        def put(asked: Sequences) -> None:
            nonlocal under_way
            groups = len({prompt.id for prompt in asked.prompts})
            piece = Piece(asked=asked, answers=arrived, num_groups=groups)
            pieces.append(piece)
            under_way += 1
            self._board.put([piece])

        def answers(replies: Replies) -> Iterator[Answer | None]:
            nonlocal under_way
            while under_way or replies.later:
                try:
                    found = arrived.get(timeout=LOOK)
                except Empty:
                    self._look()
                    continue
                under_way -= found is not None
                if isinstance(found, BaseException):
                    raise found
                yield found

        try:
            yield put, answers, lambda _: arrived.put(None)
        finally:
            with self._board.changed:
                for piece in pieces:
                    piece.abandoned = True
                self._board.todo = type(self._board.todo)(
                    piece for piece in self._board.todo if not piece.abandoned
                )

    def _drawn_by_all(self, pushed: Pushed) -> dict[str, Sequence[Turn]]:
        """Wait a moment; the probes, once all that are there have loaded the weights, else none."""
        board = self._board

        def all_have() -> bool:
            there = [member.name for member in self._members if member.state != "starting"]
            return bool(pushed.drawn) and all(name in pushed.drawn for name in there)

        with board.changed:
            board.changed.wait_for(lambda: board.error is not None or all_have(), timeout=LOOK)
            return dict(pushed.drawn) if board.error is None and all_have() else {}

    def _look(self) -> None:
        """Raise what ended the pool, or an error where no engine has been up for too long."""
        board = self._board
        with board.changed:
            if board.error is not None:
                raise board.error
            if board.closed:
                raise RuntimeError("this pool of engines is closed")
            if not all(member.failed for member in self._members):
                return  # it is up, or what it does has a deadline of its own
            since = min(time.monotonic() - member.down_since for member in self._members)
            told = "; ".join(member.reason for member in self._members)
        if since > self._deadline + 2 * LOOK:  # who waits for an answer has given up by then
            raise RuntimeError(
                f"no engine has been up for {self._deadline:g} s (cluster.deadline): {told}"
            )


class PoolSync:
    """Pushes the learner's weights to every engine of a pool."""

    def __init__(self, pool: EnginePool, learner: Learner) -> None:
        self._pool, self._learner = pool, learner

    def __call__(self, version: int) -> None:
        """Return when every engine that is up has proven that it has these weights."""
        self._pool.push(self._learner, version)


def _parts(going: Mapping[int, Rollout], first: int) -> list[Part]:
    """Those that go on, together where they have had as many turns."""
    by_turn: dict[int, list[int]] = {}
    for number, rollout in going.items():
        turn = first + sum(each.sampled for each in rollout.turns)
        by_turn.setdefault(turn, []).append(number)
    return [Part(numbers=tuple(numbers), turn=turn) for turn, numbers in by_turn.items()]


def _sequences(
    rollouts: dict[int, Rollout], part: Part, *, sampling: Sampling, seed: int
) -> Sequences:
    """What an engine needs of these sequences for their next turn."""
    prompts = [
        replace(
            rollouts[number].prompt,
            tokens=(*rollouts[number].prompt.tokens, *rollouts[number].tokens),
            columns={},
        )
        for number in part.numbers
    ]
    return Sequences(prompts=prompts, sampling=sampling, seed=seed, part=part)
