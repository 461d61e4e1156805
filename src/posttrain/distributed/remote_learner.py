"""A learner whose ranks live in other processes; where one dies, all repeat what they did."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from posttrain.disk import NotWrittenError
from posttrain.distributed.spans import Spans
from posttrain.distributed.wire import pack_batch, unpack_batch, unpack_tensor
from posttrain.protocols import Objective, StepResult
from posttrain.types import Batch
from posttrain.types.ways import Way

CALLS = 16  # after which a state is written, from which fewer calls are to be repeated
SHARE = 0.05  # of the time that writing these states may take, until there are MANY calls
MANY = 8 * CALLS
MOST_RESTARTS = 4  # in a row, without an answer in between


class RanksLostError(RuntimeError):
    """Ranks have died, or have not answered in time: the message says which."""


class OutOfStepError(RanksLostError):
    """Ranks were ended on purpose: an error that some had raised had left them out of step."""


@dataclass(frozen=True)
class LearnerCall:
    """One call of a learner, as all ranks get it; batches among ``given`` are packed.

    ``version`` is what the learner's is set to before, where there is one.
    """

    name: str
    given: tuple[Any, ...] = ()
    version: int | None = None


class RankProcesses(Protocol):
    """The ranks of a learner, started and built."""

    def call(self, call: LearnerCall) -> Any:
        """What all ranks answer; raises ``RanksLostError`` where they can no longer be asked."""
        ...

    def end(self) -> None:
        """End their processes, whatever they do."""
        ...


class RemoteLearner:
    """Satisfies ``Learner`` over ranks that ``start`` starts, as often as they die.

    ``model`` is this process's copy of what is trained, and its parameters are the weights: they
    are brought here when the version is raised, and whenever they are asked for. ``save`` writes
    that copy. All calls since the last state are kept, with states in ``scratch`` so that there
    are few: ranks that were started anew are given the state and the calls, and are then what the
    old ones were, to the bit where the kernels are.
    """

    def __init__(
        self,
        start: Callable[[], RankProcesses],
        *,
        model: nn.Module,
        save: Callable[[Path], None],
        scratch: Path,
        spans: Spans | None = None,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._start, self._model, self._save = start, model, save
        self._scratch, self._spans, self._say = scratch, spans, say
        self._version = 0
        self._is_current = True  # the copy in this process
        self._ranks: RankProcesses | None = None
        self._state: tuple[Path, Mapping[str, Any]] | None = None
        self._calls: list[LearnerCall] = []
        self._num_states, self._cost, self._written = 0, 0.0, time.monotonic()
        self._in_a_row = self.restarts = 0
        self._answer(LearnerCall("version"))  # whatever is wrong shows before the first step

    @property
    def version(self) -> int:
        """How many times the weights have been handed to the engine as a new policy."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self.weights()  # an engine of this process samples from them

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a forward pass of one rank."""
        return int(self._ask("micro_batch_tokens"))

    def infer(self, batch: Batch) -> Batch:
        """Add what the models say without gradient: old and reference log-probs, values."""
        return unpack_batch(self._ask("infer", pack_batch(batch)), onto=batch)

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimiser step of all ranks."""
        result: StepResult = self._ask("step", pack_batch(batch), objective, changes=True)
        return result

    def refresh_reference(self) -> None:
        """Make the current weights the reference that ``infer`` compares with."""
        self._ask("refresh_reference", changes=True)

    def weights(self) -> dict[str, Tensor]:
        """The weights that learn by name: always the same tensors, with what they are now."""
        named = self._model.named_parameters()
        own: dict[str, Tensor] = {name: weight for name, weight in named if weight.requires_grad}
        if not self._is_current:
            found = self._ask("weights")
            if found.keys() != own.keys():
                raise RuntimeError("cluster: the learner's model is not this process's own")
            with torch.no_grad():
                for name, weight in own.items():
                    weight.copy_(unpack_tensor(found[name]))
            self._is_current = True
        return own

    def save(self, folder: Path) -> None:
        """Write the weights as an ordinary Hugging Face model folder."""
        self.weights()
        self._save(folder)

    def state(self, folder: Path) -> dict[str, Any]:
        """Write all that the next step depends on; what is no tensor is returned, for JSON."""
        numbers = dict(self._ask("state", folder.absolute()))
        self._keep(folder, numbers)
        return numbers

    def restore(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Make all ranks what they were when :meth:`state` wrote it."""
        self._keep(folder, numbers)
        assert self._state is not None
        self._answer(LearnerCall("restore", self._state))
        self._is_current = False
        self.version = int(self._answer(LearnerCall("version")))

    def way(self, longest: int) -> Way:
        """How each rank computes sequences of at most ``longest`` tokens."""
        way: Way = self._ask("way", longest)
        return way

    def metrics(self) -> dict[str, float]:
        """How often the ranks were started anew."""
        return {"cluster/learner_restarts": float(self.restarts)}

    def close(self) -> None:
        """End all ranks, and remove what was kept for them."""
        self._end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ask(self, name: str, *given: Any, changes: bool = False) -> Any:
        call = LearnerCall(name, given, self._version)
        answer = self._answer(call)
        if changes:
            self._calls.append(call)
            self._is_current = False
            if self._is_due():
                self._write_state()
        return answer

    def _answer(self, call: LearnerCall) -> Any:
        """The ranks' answer; ranks that are lost on the way are started anew, and asked again."""
        while True:
            try:
                with self._recording(call.name):
                    answer = self._started().call(call)
            except RanksLostError as lost:
                self._end()
                if not isinstance(lost, OutOfStepError):
                    self._count(lost)
            else:
                self._in_a_row = 0
                return answer

    def _started(self) -> RankProcesses:
        """The ranks, and where they are new, as the old ones were after the last call."""
        if self._ranks is None:
            self._ranks = self._start()
            if self._state is not None:
                self._ranks.call(LearnerCall("restore", self._state))
            for call in self._calls:
                self._ranks.call(call)
        return self._ranks

    def _count(self, lost: RanksLostError) -> None:
        self._in_a_row += 1
        if self._in_a_row > MOST_RESTARTS:
            raise RuntimeError(
                f"cluster: the learner was started anew {MOST_RESTARTS} times in a row, and was "
                f"lost again: {lost}. posttrain resume goes on from the last checkpoint"
            ) from lost
        self.restarts += 1
        repeated = len(self._calls)
        self._say(
            f"cluster: {lost}; all ranks are started anew, and repeat {repeated} "
            f"call{'s' if repeated != 1 else ''} since their last state "
            f"({self._in_a_row} of at most {MOST_RESTARTS} times in a row)"
        )

    def _is_due(self) -> bool:
        num_calls, passed = len(self._calls), time.monotonic() - self._written
        return num_calls >= MANY or (num_calls >= CALLS and self._cost <= SHARE * passed)

    def _write_state(self) -> None:
        """Write a state of our own; on a disk that is full, the calls are kept a while longer."""
        begun, place = time.monotonic(), self._new_place()
        try:
            place.mkdir(parents=True)
            numbers = self._ask("state", place.absolute())
        except (NotWrittenError, OSError) as error:
            self._say(f"cluster: no state of the learner could be kept: {error}")
            self._written = time.monotonic()
            return
        self._take(place, numbers)
        self._cost = self._written - begun

    def _keep(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Take a checkpoint as the state to begin from: it is linked, for it may be removed."""
        place = self._new_place()
        shutil.copytree(folder, place, copy_function=_linked)
        self._take(place, numbers)

    def _new_place(self) -> Path:
        self._num_states += 1
        return self._scratch / f"state-{self._num_states}"

    def _take(self, place: Path, numbers: Mapping[str, Any]) -> None:
        before, self._state = self._state, (place.absolute(), dict(numbers))
        self._calls.clear()
        self._written = time.monotonic()
        if before is not None:
            shutil.rmtree(before[0], ignore_errors=True)

    def _end(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()

    def _recording(self, name: str) -> contextlib.AbstractContextManager[None]:
        return (
            contextlib.nullcontext() if self._spans is None else self._spans.record("learner", name)
        )


def _linked(source: str, target: str) -> None:
    """The same file under another name where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
