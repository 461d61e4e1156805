"""The learner on one device: fp32 master weights, exact averaging, one optimiser step at a time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from posttrain.algorithms.diagnostics import Tally, tally
from posttrain.algorithms.weights import total
from posttrain.data.minibatch import micro_batches
from posttrain.models.logprobs import score_tokens
from posttrain.protocols import Objective, Outputs, StepResult
from posttrain.types import Batch

Schedule = Callable[[int], float]


class LocalLearner:
    """Trains one model in this process.

    ``temperature`` is that of the sampler: the policy that is trained is the one that was sampled.
    ``micro_batch_tokens`` bounds a forward pass and cannot change the result. Weights stay in
    their own precision (float32 by default); ``compute`` is what the forward pass runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        save: Callable[[Path], None],
        schedule: Schedule = lambda step: 1.0,
        max_gradient_norm: float = 1.0,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        compute: torch.dtype = torch.float32,
        reference: bool = False,
        entropy_gradient: bool = False,
    ) -> None:
        self.version = 0
        self.model = model
        self.optimizer = optimizer
        self.num_steps = 0
        self.reference = self._frozen_copy() if reference else None
        self._save = save
        self._schedule = schedule
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self._max_gradient_norm = max_gradient_norm
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._compute = compute
        self._entropy_gradient = entropy_gradient

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def infer(self, batch: Batch) -> Batch:
        """Add ``old_logprobs``, and ``ref_logprobs`` where there is a reference."""
        batch = batch.replace(old_logprobs=self._logprobs(self.model, batch))
        if self.reference is None:
            return batch
        return batch.replace(ref_logprobs=self._logprobs(self.reference, batch))

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimiser step; a batch without an active token changes nothing."""
        rate = self._set_rate()
        diagnostics, loss = Tally(), torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad(set_to_none=True)
        parts = micro_batches(batch, self._micro_batch_tokens)
        for _, rows in parts:
            part = rows.to(self.device)
            outputs = self._forward(self.model, part)
            if rows.old_logprobs is None:  # the first and only step on this batch: π is π_old
                part = part.replace(old_logprobs=outputs.logprobs.detach())
            terms = objective(outputs, part)
            part_loss = total(terms.loss, part)
            part_loss.backward()
            loss += part_loss.detach().cpu()
            diagnostics += tally(terms, part.active)
        if not parts:
            return StepResult(loss=0.0, gradient_norm=0.0, learning_rate=rate, metrics={})
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_gradient_norm)
        self.optimizer.step()
        self.num_steps += 1
        return StepResult(
            loss=float(loss),
            gradient_norm=float(norm),
            learning_rate=rate,
            metrics=diagnostics.summary(),
        )

    def refresh_reference(self) -> None:
        """Make the current weights the new reference."""
        self.reference = self._frozen_copy()

    def save(self, folder: Path) -> None:
        """Write the model folder."""
        self._save(folder)

    def _set_rate(self) -> float:
        factor = self._schedule(self.num_steps)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        return self._base_rates[0] * factor

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, batch: Batch) -> Tensor:
        result = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for rows, part in micro_batches(batch, self._micro_batch_tokens):
            logprobs = self._forward(model, part.to(self.device)).logprobs.cpu()
            result = result.to(logprobs.dtype)
            result[rows, : logprobs.shape[1]] = logprobs
        return result

    def _forward(self, model: nn.Module, part: Batch) -> Outputs:
        with self._precision():
            return score_tokens(
                model,
                part,
                temperature=self._temperature,
                entropy="gradient" if self._entropy_gradient else "value",
            )

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self._compute == torch.float32:
            yield
            return
        with torch.autocast(self.device.type, dtype=self._compute):
            yield

    def _frozen_copy(self) -> nn.Module:
        return copy.deepcopy(self.model).eval().requires_grad_(False)
