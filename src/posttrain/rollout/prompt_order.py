"""In which order prompts are asked: all in turn, several tasks by weight, or by their pass rate.

Each order is decided by the seed and by what was observed before, so that a run that goes on asks
what it would have asked. ``position`` counts the prompts handed out; ``state(position)`` and
``restore(position, state)`` are all that resuming takes, at any batch behind which the source
stands, however far ahead of learning it has run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from posttrain.types import Prompt, Rollout, draw_seed, whole

Passed = Callable[[Rollout], bool]


class PromptOrder(Protocol):
    """Prompts without end."""

    @property
    def position(self) -> int:
        """The prompts handed out so far."""
        ...

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        ...

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """The scored rollouts of the prompts that were taken last, in their order."""
        ...

    def state(self, position: int) -> Any:
        """What to keep beside ``position``, as JSON; None where that is all."""
        ...

    def restore(self, position: int, state: Any) -> None:
        """Go on behind ``position``."""
        ...


class PromptCycle:
    """Every pass is a new permutation, decided by the seed and the pass."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        if not prompts:
            raise ValueError("prompts: the training split is empty")
        self.position = 0
        self._prompts = prompts
        self._seed = seed
        self._pass = -1
        self._order: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        return [self._next() for _ in range(count)]

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Nothing depends on it."""

    def state(self, position: int) -> None:
        """The position is all."""

    def restore(self, position: int, state: Any) -> None:
        """Go on behind ``position``."""
        self.position = position

    def _next(self) -> Prompt:
        number, offset = divmod(self.position, len(self._prompts))
        if number != self._pass:
            generator = torch.Generator().manual_seed(draw_seed(self._seed, number))
            self._order = torch.randperm(len(self._prompts), generator=generator).tolist()
            self._pass = number
        self.position += 1
        return self._prompts[self._order[offset]]


class Curriculum:
    """Prompts drawn by their pass rate: those between ``low`` and ``high`` most often.

    A prompt is drawn with weight 1 where its rate is in the band or not known yet, else with weight
    ``outside``; of one batch without replacement (Efraimidis and Spirakis, 2006: the largest of
    ``log w − log(−log u)``). The rate of a prompt, ``r ← (r + observed) / 2`` from the second
    time on, follows the policy; groups whose rewards agree teach nothing, and are of prompts
    outside.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        low: float,
        high: float,
        outside: float,
        passed: Passed,
    ) -> None:
        if not prompts:
            raise ValueError("prompts: the training split is empty")
        self._prompts, self._seed, self._passed = prompts, seed, passed
        self._band, self._outside = (low, high), outside
        asked = repr([(prompt.text, prompt.messages, whole(prompt.columns)) for prompt in prompts])
        self._digest = hashlib.sha256(asked.encode(errors="replace")).hexdigest()[:16]
        self._history: list[tuple[int, float | None]] = []  # index and rate, in order
        self._taken: list[int] = []
        self.rates: dict[int, float] = {}

    @property
    def position(self) -> int:
        """The prompts handed out so far."""
        return len(self._history) + len(self._taken)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; all are observed before the next are taken."""
        generator = torch.Generator().manual_seed(draw_seed(self._seed, self.position))
        weights = torch.ones(len(self._prompts), dtype=torch.float64)
        low, high = self._band
        for index, rate in self.rates.items():
            if not low <= rate <= high:
                weights[index] = self._outside
        drawn: list[int] = []
        while len(drawn) < count:  # more than once round only where a batch has more than there are
            uniform = torch.rand(len(weights), dtype=torch.float64, generator=generator)
            keys = weights.log() - (-uniform.clamp_min(1e-300).log()).log()
            drawn += keys.argsort(descending=True, stable=True).tolist()
        self._taken += drawn[:count]
        return [self._prompts[index] for index in drawn[:count]]

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Note how often each prompt was answered rightly; broken scores do not count."""
        for index, group in zip(self._taken, groups, strict=True):
            valid = [r for r in group if r.score is not None and r.score.ok]
            rate = sum(map(self._passed, valid)) / len(valid) if valid else None
            self._history.append((index, rate))
            self._learn(index, rate)
        self._taken = []

    def state(self, position: int) -> dict[str, Any]:
        """What was observed up to there, and of which prompts."""
        return {"prompts": self._digest, "seen": [list(each) for each in self._history[:position]]}

    def restore(self, position: int, state: Any) -> None:
        """Go on with what was observed; what is not known is as if nothing had been.

        That is by the place of a prompt among all: of other prompts it means nothing.
        """
        same = isinstance(state, Mapping) and state.get("prompts") == self._digest
        seen = state["seen"][:position] if same else []
        self._history = [(int(index), rate) for index, rate in seen]
        self._history += [(0, None)] * (position - len(self._history))
        self._taken, self.rates = [], {}
        for index, rate in self._history:
            self._learn(index, rate)

    def _learn(self, index: int, rate: float | None) -> None:
        if rate is not None:
            self.rates[index] = (self.rates.get(index, rate) + rate) / 2


class MixedPrompts:
    """Several orders by name, in the proportion of their weights at every moment.

    The next prompt is of the one that is furthest behind its share.
    """

    def __init__(self, parts: Mapping[str, PromptOrder], weights: Mapping[str, float]) -> None:
        self._parts = parts
        total = sum(weights[name] for name in parts)
        self._shares = {name: weights[name] / total for name in parts}
        self._counts = dict.fromkeys(parts, 0)
        self._taken: list[str] = []

    @property
    def position(self) -> int:
        """The prompts handed out so far."""
        return sum(self._counts.values())

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        names = [self._next(self._counts) for _ in range(count)]
        self._taken += names
        drawn = {name: iter(part.take(names.count(name))) for name, part in self._parts.items()}
        return [next(drawn[name]) for name in names]

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Hand the groups to the orders that their prompts came from."""
        pairs = list(zip(self._taken, groups, strict=True))
        for name, part in self._parts.items():
            part.observe([group for taken, group in pairs if taken == name])
        self._taken = []

    def state(self, position: int) -> dict[str, Any]:
        """The states of the parts there."""
        counts = self._counted(position)
        return {name: part.state(counts[name]) for name, part in self._parts.items()}

    def restore(self, position: int, state: Any) -> None:
        """Go on behind ``position``."""
        self._counts, self._taken = self._counted(position), []
        for name, part in self._parts.items():
            part.restore(self._counts[name], (state or {}).get(name))

    def _counted(self, position: int) -> dict[str, int]:
        counts = dict.fromkeys(self._parts, 0)
        for _ in range(position):
            self._next(counts)
        return counts

    def _next(self, counts: dict[str, int]) -> str:
        """The part that is furthest behind its share, which gets one more."""
        asked = sum(counts.values()) + 1
        name = max(counts, key=lambda each: self._shares[each] * asked - counts[each])
        counts[name] += 1
        return name
