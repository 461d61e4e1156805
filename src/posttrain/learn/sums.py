"""Sums of loss and diagnostics over the micro-batches of one step, and over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.algorithms.diagnostics import Tally, tally
from posttrain.algorithms.weights import total
from posttrain.fast.score import Replicas
from posttrain.learn.ranks import Ranks, shares
from posttrain.learn.trained import Applied
from posttrain.protocols import Outputs, StepResult
from posttrain.types import Batch, Terms

_SAID = ("logprobs", "entropy", "values", "divergence")
_STOPPED = ("clip_low", "clip_high")
LEAST = 1024  # chosen tokens of a replica's share: passes over fewer cost more than they gain


class Sums:
    """Sums of loss and diagnostics over the micro-batches of one step."""

    def __init__(self, recorded: Tensor | None = None) -> None:
        self.empty = True
        self._recorded = recorded
        self._tokens: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._diagnostics = Tally()
        self.loss: Tensor | float = 0.0
        self._parts: dict[str, Tensor | float] = {}

    def add_and_backward(self, terms: Terms, part: Batch) -> None:
        """Add a micro-batch's share of the loss, and run backward where gradients are enabled."""
        loss = total(terms.loss, part)
        if torch.is_grad_enabled():
            loss.backward()
        self.empty = False
        self.loss += loss.detach().double()  # stays on the device: reading it here would sync
        self._diagnostics += tally(terms, part.active)
        parts = {f"{name}_loss": value for name, value in terms.parts.items()}
        for name, value in {**parts, **terms.weighted}.items():
            self._parts[name] = self._parts.get(name, 0.0) + total(value.detach(), part)

    def record(self, rows: Tensor, outputs: Outputs, *, terms: Terms) -> None:
        """Copy the numbers of those of the ``rows`` of the step's batch that are to be recorded."""
        if self._recorded is None or not bool(self._recorded[rows].any()):
            return
        own = {name: getattr(outputs, name) for name in _SAID} | {"loss": terms.loss}
        own |= {name: terms.means[name] for name in _STOPPED if name in terms.means}
        wanted = self._recorded[rows].nonzero()[:, 0]
        place = self._recorded.cumsum(0)[rows[wanted]] - 1
        found = {name: value for name, value in own.items() if value is not None}
        copies = {name: value.detach()[: len(rows)][wanted] for name, value in found.items()}
        self._tokens.append((place, copies))

    def tokens(self, width: int, ranks: Ranks) -> dict[str, Tensor]:
        """What was recorded, of all ranks, each [K, T]; 0 where a sequence had no forward pass."""
        if self._recorded is None:
            return {}
        own = [(place, {n: v.cpu() for n, v in found.items()}) for place, found in self._tokens]
        parts = [part for each in ranks.each(own) for part in each]
        shape, joined = (int(self._recorded.sum()), width), dict[str, Tensor]()
        for place, found in parts:
            for name, value in found.items():
                whole = joined.setdefault(name, torch.zeros(shape, dtype=value.dtype))
                whole[place, : value.shape[1]] = value
        return joined

    def alike(self) -> Sums:
        """Sums of nothing yet, of other rows of the same step."""
        return Sums(self._recorded)

    def add(self, other: Sums) -> None:
        """Add what was summed elsewhere, of other rows of the same step."""
        self.empty &= other.empty
        self.loss += other.loss
        self._tokens += other._tokens
        self._diagnostics += other._diagnostics
        for name, value in other._parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value

    def over(self, ranks: Ranks) -> Sums:
        """The sums of all ranks; what was recorded stays each rank's own."""
        if ranks.size == 1:
            return self
        own = self._diagnostics
        exact: Any = {"dtype": torch.float64, "device": "cpu"}
        tables = [
            {name: torch.as_tensor(value, **exact) for name, value in table.items()}
            for table in (self._parts, own.sums, own.maxima)
        ]
        total = self.alike()
        total._tokens = self._tokens
        for empty, loss, count, (parts, sums, maxima) in ranks.each(
            (self.empty, float(self.loss), own.count.cpu(), tables)
        ):
            one = Sums()
            one.empty, one.loss, one._parts = empty, loss, dict(parts)
            one._diagnostics = Tally(sums=sums, maxima=maxima, count=count)
            total.add(one)
        return total

    def result(self, policy: Applied, *, critic: Applied | None) -> StepResult:
        """The step as the loop sees it."""
        metrics = self._diagnostics.summary()
        metrics |= {name: float(value) for name, value in self._parts.items()}
        if critic is not None:
            metrics["critic_gradient_norm"] = critic.gradient_norm
        return StepResult(
            loss=float(self.loss),
            gradient_norm=policy.gradient_norm,
            learning_rate=policy.learning_rate,
            metrics=metrics,
        )


def replicated(
    work: Callable[..., None],
    batch: Batch,
    *,
    sums: Sums,
    places: Tensor,
    replicas: Replicas,
    keep_groups: bool,
) -> None:
    """Do ``work`` on all rows, at about equal cost for each replica; ``sums`` gets all sums.

    ``work`` is forward and backward of a batch, the rows ``places`` of the step, with one model.
    A small batch has fewer shares, down to one, which this thread computes.
    """
    many = min(replicas.count, max(1, int(batch.active.sum()) // LEAST))
    shared = [rows for rows in shares(batch, many, keep_groups=keep_groups) if rows]
    if len(shared) < 2:
        work(batch, sums=sums, places=places, model=replicas.model)
        return
    learns = torch.is_grad_enabled()

    def one(model: nn.Module, rows: Tensor) -> Sums:
        found = sums.alike()
        with torch.set_grad_enabled(learns):  # each thread has its own switch
            work(batch.select(rows), sums=found, places=places[rows], model=model)
        return found

    for found in replicas.each(one, [torch.tensor(rows) for rows in shared]):
        sums.add(found)
