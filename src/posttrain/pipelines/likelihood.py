"""Supervised training: the batches and the objective of demonstrations, for ``fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posttrain.algorithms.losses import nll
from posttrain.algorithms.objective import with_entropy
from posttrain.algorithms.weights import token_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.pipelines.fit import shuffled
from posttrain.protocols import Learner, Objective, Outputs
from posttrain.types import Batch, Terms

Row = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and which of them to learn."""


def batches(
    rows: Sequence[Row], batch_size: int, *, steps: int, pad_token: int, seed: int, start: int = 0
) -> Iterator[Batch]:
    """So many shuffled batches, all rows in every epoch, every token counting the same."""
    for order in shuffled(len(rows), batch_size, steps=steps, seed=seed, start=start):
        chosen = [rows[index] for index in order]
        yield token_mean(collate_demonstrations(chosen, pad_token=pad_token))


def held_out_loss(rows: Sequence[Row], learner: Learner, *, pad_token: int) -> float:
    """Mean negative log-likelihood of the completions' tokens, every token counting the same.

    ``−Σ log π / number of tokens``, without a gradient: the learner does not change. Rows are
    summed in their order, which micro-batches cannot change.
    """
    batch = collate_demonstrations(rows, pad_token=pad_token)
    logprobs = learner.infer(batch).need("old_logprobs")[batch.mask]
    return -float(logprobs.double().sum()) / len(logprobs)


def likelihood_terms(outputs: Outputs, batch: Batch) -> Terms:
    """Negative log-likelihood of every token; entropy is only monitored. Shapes: [B, T]."""
    terms = nll(outputs.need("logprobs"), batch)
    if outputs.entropy is None:
        return terms
    return with_entropy(terms, outputs.entropy, batch=batch, coefficient=0.0)


likelihood = Objective(likelihood_terms)
