"""Averaging as data: the weights by hand and against plain loops."""

import math

import pytest
import torch
from algorithms.batches import BROKEN, EMPTY, chosen, close, ragged, refuses

from posttrain.algorithms.weights import (
    WEIGHTS,
    sequence_mean,
    sequence_sum,
    token_mean,
    total,
)
from posttrain.types import Batch


def test_the_table_holds_the_three_averages() -> None:
    assert {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "sequence_sum": sequence_sum,
    } == WEIGHTS


def test_weights_equal_the_loop() -> None:
    batch = ragged()
    lengths = [len(chosen(batch, row)) for row in range(12)]
    assert lengths[EMPTY] == lengths[BROKEN] == 0
    num_sequences = sum(length > 0 for length in lengths)
    by_token, by_sequence, summed, over_seven = torch.zeros(4, 12, 10, dtype=torch.float64)
    for row in range(12):
        for column in chosen(batch, row):
            by_token[row, column] = 1 / sum(lengths)
            by_sequence[row, column] = 1 / (num_sequences * lengths[row])
            summed[row, column] = 1 / num_sequences
            over_seven[row, column] = 1 / (num_sequences * 7)
    close(token_mean(batch).need("weights"), by_token)
    close(sequence_mean(batch).need("weights"), by_sequence)
    close(sequence_sum(batch).need("weights"), summed)
    close(sequence_sum(batch, length=7).need("weights"), over_seven)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_means_have_weights_that_add_up_to_one(name: str) -> None:
    close(WEIGHTS[name](ragged()).need("weights").sum(), 1.0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_batch_without_an_active_token_weighs_nothing(name: str) -> None:
    batch = ragged().replace(valid=torch.zeros(12, dtype=torch.bool))
    assert WEIGHTS[name](batch).need("weights").tolist() == [[0.0] * 10] * 12


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_single_token_weighs_one(name: str) -> None:
    mask = torch.tensor([[False, True, False], [False, False, False]])
    batch = Batch(tokens=mask.long(), mask=mask)
    assert WEIGHTS[name](batch).need("weights").tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_take_the_floating_type_of_the_log_probs(name: str) -> None:
    assert WEIGHTS[name](ragged()).need("weights").dtype == torch.float64
    batch = ragged().replace(old_logprobs=torch.zeros(12, 10, dtype=torch.float32))
    assert WEIGHTS[name](batch).need("weights").dtype == torch.float32


def test_total_is_the_weighted_sum_over_active_tokens() -> None:
    batch = ragged()
    terms = batch.need("values").masked_fill(~batch.active, math.nan)
    expected = math.fsum(
        float(terms[row, column]) * (row + 10 * column)
        for row in range(12)
        for column in chosen(batch, row)
    )
    places = torch.arange(12.0)[:, None] + 10 * torch.arange(10.0)
    close(total(terms, batch.replace(weights=places.double())), expected)


def test_bad_weights_are_refused() -> None:
    with refuses("length: must be >= 1, got 0"):
        sequence_sum(ragged(), length=0)
    with refuses(
        "terms: expected shape [12, 10], got [12]; every [B, T] tensor is indexed by the token "
        "it is about"
    ):
        total(torch.zeros(12), token_mean(ragged()))
    with refuses(
        "weights: this batch has none; it is added by a function of posttrain.algorithms.weights"
    ):
        total(torch.zeros(12, 10), ragged())
