"""Supervised training: demonstrations in, one ``Learner.step`` a batch, by the same learner."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from posttrain.algorithms.losses import nll
from posttrain.algorithms.objective import with_entropy
from posttrain.algorithms.weights import token_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.pipelines.guard import Guard
from posttrain.pipelines.metrics import step_metrics
from posttrain.protocols import Learner, Outputs
from posttrain.types import Batch, Terms

Row = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and which of them to learn."""


def train(
    rows: Sequence[Row],
    learner: Learner,
    *,
    epochs: int,
    batch_size: int,
    pad_token: int,
    seed: int,
    on_step: Callable[[int, Mapping[str, float]], None],
    start: int = 0,
    guard: Guard | None = None,
) -> None:
    """Maximise the likelihood of the demonstrated completions, every token counting the same.

    A stage that goes on has taken ``start`` steps; the learner is the one it had then.
    """
    guard = guard or Guard()
    chosen = batches(rows, batch_size, epochs=epochs, pad_token=pad_token, seed=seed, start=start)
    for step, batch in enumerate(chosen, start=start + 1):
        started = time.perf_counter()
        weighted = token_mean(batch)
        result = learner.step(weighted, likelihood)
        guard.saw(result, weighted, step=step)
        metrics = step_metrics([result])
        metrics["train/skipped_total"] = float(guard.total)
        metrics["sft/tokens"] = float(batch.mask.sum())
        metrics["time/train"] = time.perf_counter() - started
        on_step(step, metrics)
        guard.check()
    learner.version += 1


def held_out_loss(rows: Sequence[Row], learner: Learner, *, pad_token: int) -> float:
    """Mean negative log-likelihood of the completions' tokens, every token counting the same.

    ``−Σ log π / number of tokens``, without a gradient: the learner is as it was. The order of the
    rows is that of the sum, and micro-batches cannot change it.
    """
    batch = collate_demonstrations(rows, pad_token=pad_token)
    logprobs = learner.infer(batch).need("old_logprobs")[batch.mask]
    return -float(logprobs.double().sum()) / len(logprobs)


def batches(
    rows: Sequence[Row], batch_size: int, *, epochs: int, pad_token: int, seed: int, start: int = 0
) -> Iterator[Batch]:
    """Shuffled batches, ``epochs`` times over all rows; the last one of an epoch may be smaller.

    The first ``start`` of them are left out.
    """
    orders = shuffled(len(rows), batch_size, epochs=epochs, seed=seed)
    for order in itertools.islice(orders, start, None):
        yield collate_demonstrations([rows[index] for index in order], pad_token=pad_token)


def shuffled(count: int, batch_size: int, *, epochs: int, seed: int) -> Iterator[list[int]]:
    """Which rows make each batch: every epoch is a new permutation, the seed decides them all.

    >>> [len(batch) for batch in shuffled(5, 2, epochs=2, seed=0)]
    [2, 2, 1, 2, 2, 1]
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).tolist()
        for first in range(0, count, batch_size):
            yield order[first : first + batch_size]


def num_steps(num_rows: int, batch_size: int, *, epochs: int) -> int:
    """How many optimiser steps :func:`train` will take.

    >>> num_steps(10, 4, epochs=2)
    6
    """
    return -(-num_rows // batch_size) * epochs


def likelihood(outputs: Outputs, batch: Batch) -> Terms:
    """The objective: negative log-likelihood; entropy is only monitored."""
    terms = nll(outputs.need("logprobs"), batch)
    if outputs.entropy is None:
        return terms
    return with_entropy(terms, outputs.entropy, batch=batch, coefficient=0.0)
