"""One replica of a pool, and the thread that has it begun, proven, at work, and begun anew."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

from posttrain.distributed.engine_host import Sequences
from posttrain.distributed.replica import DiedError, Replica
from posttrain.distributed.spans import Spans
from posttrain.protocols import Engine
from posttrain.rollout.engines.weight_probe import SAMPLES, WeightProbe, why_unproven
from posttrain.types import Part, Turn

GRACE = 5.0  # seconds for an engine to end what runs beside it, before its process is killed
MOST_ATTEMPTS = 5  # at one piece: what kills every engine that takes it is no accident


@dataclass(frozen=True, kw_only=True)
class Probe(WeightProbe):
    """What every engine must prove its weights by; ``tolerance`` is rounding."""

    tolerance: float

    @property
    def asked(self) -> Sequences:
        """What an engine is asked for."""
        part = Part(numbers=tuple(range(SAMPLES)))
        prompts = [self.prompt] * SAMPLES
        return Sequences(prompts=prompts, sampling=self.sampling, seed=0, part=part)

    def problem(self, drawn: Sequence[Turn], known: Sequence[Turn]) -> str:
        """Why an engine has not the weights that ``known`` were scored by, or nothing."""
        return why_unproven(drawn, known, tolerance=self.tolerance)


@dataclass(eq=False, kw_only=True)
class Piece:
    """Some sequences of a call, for one engine and one turn; ``answers`` takes what comes of it."""

    asked: Sequences
    answers: SimpleQueue[Answer | BaseException | None]
    num_groups: int
    deaths: list[str] = field(default_factory=list)
    abandoned: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The next turn of each sequence of a piece, and who sampled them."""

    piece: Piece
    turns: Sequence[Turn]
    engine: str


@dataclass(eq=False, kw_only=True)
class Pushed:
    """Weights that every engine must have: ``payload`` as the transport wants them.

    ``drawn`` are the probes of those that have loaded them, ``passed`` those that the learner
    agrees with, ``reference`` one of these with the learner's log-probs, to which later ones are
    compared.
    """

    version: int
    payload: Any
    drawn: dict[str, Sequence[Turn]] = field(default_factory=dict)
    passed: dict[str, Sequence[Turn]] = field(default_factory=dict)
    reference: Sequence[Turn] | None = None


class Board:
    """What the threads of a pool share, under one lock: pieces to do, weights to have, the end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.todo: deque[Piece] = deque()
        self.weights: Pushed | None = None
        self.error: BaseException | None = None
        self.closed = False
        self.retried = 0  # groups
        self.queued: list[int] = []  # pieces that waited, whenever one was handed out

    def put(self, pieces: Sequence[Piece]) -> None:
        """Have pieces done."""
        with self.changed:
            self.todo.extend(pieces)
            self.changed.notify_all()

    def again(self, piece: Piece, death: DiedError) -> None:
        """Hand a piece to someone else, before all others; too many deaths end its call."""
        with self.changed:
            piece.deaths.append(str(death))
            if piece.abandoned:
                return
            if len(piece.deaths) >= MOST_ATTEMPTS:
                told = "; ".join(piece.deaths)
                piece.answers.put(
                    RuntimeError(
                        f"{len(piece.deaths)} engines died over the same {piece.num_groups} prompt "
                        f"groups: {told}. Look for what ends them (memory?), or raise "
                        "cluster.deadline"
                    )
                )
                return
            self.retried += piece.num_groups
            self.todo.appendleft(piece)
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let everyone who waits know that the pool cannot go on."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


class Member:
    """A replica and its thread: it takes the next piece whenever it is free.

    It serves only with the weights that were pushed last, and only once its probe has shown that
    it has them. When its process is dead, or silent for too long, what it had goes back to the
    board and the process is begun anew. It is ``up`` once it may serve: one that is merely
    ``built`` may still die of the weights.
    """

    def __init__(
        self,
        replica: Replica,
        board: Board,
        *,
        make: Callable[[], Engine],
        probe: Probe | None,
        say: Callable[[str], None],
        spans: Spans | None,
    ) -> None:
        self.name = replica.name
        self.state: Literal["starting", "built", "up"] = "starting"
        self.failed = False  # to come up, since it was up last
        self.down_since = time.monotonic()
        self.reason = f"{self.name}: it has not started yet"
        self.restarts = 0
        self.tokens, self.busy = 0, 0.0
        self.facts: dict[str, Any] = {}
        self._replica, self._board, self._make = replica, board, make
        self._probe, self._say, self._spans = probe, say, spans or Spans(kept=1)
        self._proven: Pushed | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def begin(self) -> None:
        """Start the process, and serve until the board is closed."""
        self._thread.start()

    def end(self) -> None:
        """End the process, once its engine is closed or has had time to; the board is closed."""
        self._thread.join(timeout=GRACE)
        self._replica.stop()

    def _run(self) -> None:
        while not self._board.closed:
            try:
                self._start()
                while not self._board.closed:
                    if self._prove():
                        self._reach("up")
                        self._serve()
            except DiedError as death:
                self._died(death)
            except BaseException as error:  # noqa: BLE001 - raised where the pool is waited for
                self._board.fail(error)
                return
        if self.state != "starting":
            with contextlib.suppress(Exception):  # it is ended in any case
                self._replica.call("close")

    def _start(self) -> None:
        with self._spans.record(self.name, "start"):
            self._replica.start()
            self.facts = self._replica.call("build", self._make)
        self._proven = None
        self._reach("built")

    def _reach(self, state: Literal["built", "up"]) -> None:
        with self._board.changed:
            if self.state != state:
                self.state, self.failed = state, self.failed and state == "built"
                self._board.changed.notify_all()

    def _died(self, death: DiedError) -> None:
        with self._board.changed:
            closed = self._board.closed
            told = self.failed and self.reason == str(death)
            if self.state == "up":
                self.down_since = time.monotonic()
            else:
                self.failed = True
            self.state, self.reason = "starting", str(death)
            self.restarts += not closed
            if self._board.weights is not None:
                self._board.weights.drawn.pop(self.name, None)
            self._board.changed.notify_all()
        if not closed:
            if not told:  # the same, time after time, is in cluster/engine_restarts
                self._say(f"cluster: {death}; it is started anew")
            self._replica.stop()
            time.sleep(0.05)  # a process that dies at once is not begun a thousand times a second

    def _prove(self) -> bool:
        """Have the weights that were pushed last, and show it; whether there are no newer ones."""
        board, pushed = self._board, self._board.weights
        if pushed is None or pushed is self._proven:
            return True
        with self._spans.record(self.name, "sync"):
            self._replica.call("load", pushed.version, pushed.payload)
            if self._probe is None:
                drawn: Sequence[Turn] = ()
            else:
                drawn = self._replica.call("decode", self._probe.asked)
        with board.changed:
            pushed.drawn[self.name] = drawn
            board.changed.notify_all()
            board.changed.wait_for(
                lambda: board.closed or board.weights is not pushed or pushed.reference is not None
            )
            if board.closed or board.weights is not pushed or pushed.reference is None:
                return False
            if self._probe is not None and pushed.passed.get(self.name) is not drawn:
                problem = self._probe.problem(drawn, pushed.reference)
                if problem:
                    raise not_refreshed(self.name, pushed.version, problem=problem)
            self._proven = pushed
        return True

    def _serve(self) -> None:
        """Do one piece, once there is one."""
        board = self._board
        with board.changed:
            board.changed.wait_for(
                lambda: board.closed or board.weights is not self._proven or board.todo
            )
            if board.closed or board.weights is not self._proven:
                return
            board.queued.append(len(board.todo))
            piece = board.todo.popleft()
        begun = time.monotonic()
        try:
            with self._spans.record(self.name, "sampling"):
                turns = self._replica.call("decode", piece.asked)
        except DiedError as death:
            board.again(piece, death)
            raise
        except Exception as error:  # noqa: BLE001 - the engine's own: raised by the call it is of
            piece.answers.put(error)
            return
        self.busy += time.monotonic() - begun
        self.tokens += sum(len(turn.tokens) for turn in turns)
        piece.answers.put(Answer(piece=piece, turns=turns, engine=self.name))


def not_refreshed(name: str, version: int, *, problem: str) -> RuntimeError:
    """The error of an engine whose probe does not agree with the learner."""
    return RuntimeError(
        f"{name}: after the weights of version {version} were loaded, {problem}. It does not "
        "sample from the policy that is trained: it has another model, or does not take weights "
        "as it should"
    )
