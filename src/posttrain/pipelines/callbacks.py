"""Functions of the user's own, called after every step: own numbers, own evaluations, an early end.

What a callback sees it cannot change. What it returns is all that it does to the run: numbers for
the record of the step, or :class:`Stop`. One that decides by ``history`` alone decides the same in
a run that was cut short and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from posttrain.types import Rollout

Item = TypeVar("Item")


class Generate(Protocol):
    """Answers of the policy as it is now, greedy without a temperature."""

    def __call__(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        num_samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[Rollout]:
        """``num_samples`` answers to each prompt, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A finished step, as a callback sees it.

    ``metrics`` are its numbers, ``history`` the records of the steps before it, callbacks' numbers
    included, ``rollouts`` what was sampled (of the stage rl). ``generate`` asks the policy as it is
    now; the stage reward has none.
    """

    stage: str
    step: int
    total_steps: int
    metrics: Mapping[str, float]
    history: Sequence[Mapping[str, float]]
    rollouts: Sequence[Rollout]
    generate: Generate


@dataclass(frozen=True)
class Stop:
    """Returned by a callback: end the stage after this step, as finished."""

    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)


Callback = Callable[[StepDone], Mapping[str, float] | Stop | None]


def _no_policy(*_: Any, **__: Any) -> list[Rollout]:
    raise ValueError("generate: this stage trains no policy that could answer")


class Callbacks:
    """The callbacks of one stage, and what they have decided.

    ``stopped`` says after which step and why the stage ends; of a stage that goes on it is what a
    checkpoint knows. ``failure`` is what one of them raised, raised again once the step is saved.
    """

    generate: Generate = staticmethod(_no_policy)

    def __init__(
        self,
        callbacks: Sequence[Callback],
        *,
        stage: str,
        total_steps: int,
        history: Iterable[Mapping[str, float]] = (),
        stopped: Mapping[str, Any] | None = None,
    ) -> None:
        self._callbacks, self._stage, self._total_steps = tuple(callbacks), stage, total_steps
        self._history = [dict(row) for row in history if row["step"] >= 1] if callbacks else []
        self.stopped = stopped
        self.failure: RuntimeError | None = None

    @property
    def ended(self) -> bool:
        """Whether no further step is to be taken."""
        return self.stopped is not None or self.failure is not None

    def called(
        self, step: int, metrics: Mapping[str, float], *, rollouts: Sequence[Rollout] = ()
    ) -> dict[str, float]:
        """Call each of them; the numbers that they add to the record of the step."""
        own: dict[str, float] = {}
        for callback in self._callbacks:
            done = StepDone(
                stage=self._stage,
                step=step,
                total_steps=self._total_steps,
                metrics=MappingProxyType({**metrics, **own}),
                history=tuple(map(MappingProxyType, self._history)),
                rollouts=tuple(rollouts),
                generate=self.generate,
            )
            try:
                own |= self._taken(callback(done), step, taken={**metrics, **own})
            except Exception as error:  # noqa: BLE001 - raised again, once the step is saved
                self._failed(callback, error, step=step)
                break
        if self._callbacks:
            self._history.append({"step": float(step), **metrics, **own})
        return own

    def _taken(
        self, returned: object, step: int, *, taken: Mapping[str, float]
    ) -> dict[str, float]:
        """What one has returned, as numbers; its wish to stop is noted."""
        if isinstance(returned, Stop):
            self.stopped = {"step": step, "reason": str(returned.reason)}
            returned = returned.metrics
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"it returned {returned!r}; expected a mapping of names and numbers, a Stop or None"
            )
        if twice := sorted(map(str, returned.keys() & taken.keys())):
            raise ValueError(f"it returned {twice[0]!r}, which is already in the record; rename it")
        return {str(name): float(value) for name, value in returned.items()}

    def _failed(self, callback: Callback, error: Exception, *, step: int) -> None:
        name = getattr(callback, "__qualname__", type(callback).__name__)
        self.failure = RuntimeError(
            f"callbacks: {name} raised {type(error).__name__}: {error}, after step {step} of "
            f"{self._stage}, which is saved; fix it, and call again with resume=True"
        )
        self.failure.__cause__ = error

    def until_ended(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches, until one of the callbacks ends the stage."""
        source, end = iter(batches), object()
        while not self.ended and (batch := next(source, end)) is not end:
            yield batch  # type: ignore[misc]

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to know: a stage that was to end does not go on."""
        return {} if self.stopped is None else {"stopped": dict(self.stopped)}

    def check(self) -> None:
        """Raise what one of them raised."""
        if self.failure is not None:
            raise self.failure
