"""The shift, log-probabilities, entropy, and sums over windows of tokens."""

import math

import pytest
import torch
from algorithms.batches import close, refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms import ops

INF = math.inf
LOGITS_ERROR = (
    "logits: a row is NaN or leaves no token possible; look for a diverged model or for "
    "a filter (top-k, bad words) that removed the whole vocabulary"
)


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_shift_moves_each_prediction_to_the_token_it_is_about() -> None:
    predictions = float64([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])
    close(ops.shift(predictions), [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]], rtol=0)
    vectors = torch.arange(12, dtype=torch.float64).reshape(1, 4, 3)
    close(ops.shift(vectors), [[[0, 0, 0], [0, 1, 2], [3, 4, 5], [6, 7, 8]]], rtol=0)


def test_shift_sends_the_gradient_back_to_the_prediction() -> None:
    predictions = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    (ops.shift(predictions) * float64([[5.0, 7.0, 11.0]])).sum().backward()
    close(predictions.grad, [[7.0, 11.0, 0.0]], rtol=0)


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1e6])
def test_log_softmax_of_odds_one_to_three(offset: float) -> None:
    logits = float64([0.0, math.log(3.0)]) + offset
    close(ops.log_softmax(logits), [math.log(0.25), math.log(0.75)], rtol=1e-9)


def test_log_softmax_gives_infinite_logits_their_limit() -> None:
    logits = float64([[0.0, -INF, 0.0], [1.0, INF, -INF], [INF, 7.0, INF], [0.0, 0.0, -INF]])
    half = math.log(0.5)
    expected = [[half, -INF, half], [-INF, 0.0, -INF], [half, -INF, half], [half, half, -INF]]
    close(ops.log_softmax(logits), expected)
    close(ops.log_softmax(logits.reshape(2, 2, 3)), float64(expected).reshape(2, 2, 3))
    close(ops.log_softmax(logits[1]), expected[1])


def test_log_softmax_gradient_stays_finite_beside_infinite_logits() -> None:
    logits = float64([[0.0, math.log(3.0), -INF], [0.0, INF, 1.0]]).requires_grad_()
    ops.log_softmax(logits)[:, 1].sum().backward()
    close(logits.grad, [[-0.25, 0.25, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("row", [[0.0, math.nan], [-INF, -INF]])
def test_log_softmax_refuses_a_row_that_means_nothing(row: list[float]) -> None:
    with refuses(LOGITS_ERROR):
        ops.log_softmax(float64([[0.0, 0.0], row, [1.0, 2.0]]))


def test_gather_logprobs_takes_each_position_its_own_token() -> None:
    logits = float64([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    close(ops.gather_logprobs(logits, torch.tensor([[1, 0]])), [[math.log(0.75), math.log(0.5)]])
    with refuses(
        "tokens: expected shape [1, 2], got [1, 3]; every [B, T] tensor is indexed by the token "
        "it is about"
    ):
        ops.gather_logprobs(logits, torch.tensor([[1, 0, 0]]))


def test_a_vocabulary_of_one_leaves_no_choice() -> None:
    assert ops.gather_logprobs(float64([[3.0]]), torch.tensor([0])).tolist() == [0.0]


def test_token_logprobs_score_a_token_by_the_logits_before_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    tokens = torch.randint(4, (3, 6), generator=generator)
    actual = ops.token_logprobs(logits, tokens)
    for row in range(3):
        for column in range(1, 6):
            before = logits[row, column - 1].tolist()
            total = math.log(sum(math.exp(logit) for logit in before))
            assert math.isclose(actual[row, column], before[tokens[row, column]] - total)


def test_entropy_of_coins_dice_and_certainty() -> None:
    logits = float64([[0.0, 0.0, -INF], [2.0, 2.0, 2.0], [0.0, -INF, -INF], [INF, 0.0, 0.0]])
    close(ops.entropy(logits), [math.log(2.0), math.log(3.0), 0.0, 0.0])
    odds = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    close(ops.entropy(float64([5.0, 5.0 + math.log(3.0)])), odds)


def test_entropy_gradient_is_that_of_the_formula_and_finite_where_nothing_is_possible() -> None:
    # dH/dz_v = −p_v (log p_v + H)
    logits = float64([0.0, math.log(3.0), -INF, -800.0]).requires_grad_()
    entropy = ops.entropy(logits)
    entropy.backward()
    value = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    expected = [-p * (math.log(p) + value) for p in (0.25, 0.75)]
    close(logits.grad, [*expected, 0.0, 0.0])


def test_keep_drops_value_and_gradient_even_of_nan() -> None:
    values = float64([1.0, math.nan, -INF]).requires_grad_()
    kept = ops.keep(values, torch.tensor([True, False, False]))
    kept.square().sum().backward()
    close(kept.detach(), [1.0, 0.0, 0.0], rtol=0)
    close(values.grad, [2.0, 0.0, 0.0], rtol=0)


def test_noise_floor_is_sixteen_roundings() -> None:
    assert ops.noise_floor(torch.float64) == 2.0**-48
    assert ops.noise_floor(torch.float32) == 2.0**-19


MASKS = st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4)


@settings(derandomize=True, database=None, max_examples=30, deadline=None)
@given(MASKS)
def test_compact_closes_the_gaps_and_keeps_the_order(rows: list[list[bool]]) -> None:
    order = ops.compact(torch.tensor(rows))
    for row, columns in zip(rows, order.tolist(), strict=True):
        taken = [column for column in range(7) if row[column]]
        assert columns == taken + [column for column in range(7) if not row[column]]


def test_compact_keeps_the_order_of_long_rows() -> None:
    """Short rows are sorted in order even by a sort that does not promise it."""
    mask = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)) < 0.5
    for row, columns in zip(mask, ops.compact(mask), strict=True):
        assert (
            columns.tolist()
            == row.nonzero().flatten().tolist() + (~row).nonzero().flatten().tolist()
        )


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("steps", [None, 0, 1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_window_sum_equals_the_loop(discount: float, steps: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    expected = torch.zeros(2, 7, dtype=torch.float64)
    for row in range(2):
        for start in range(7):
            for ahead in range(min(7 - start, 7 if steps is None else steps)):
                expected[row, start] += discount**ahead * values[row, start + ahead]
    close(ops.window_sum(values, discount, steps=steps), expected)


def test_window_sum_runs_along_the_last_dimension() -> None:
    values = torch.arange(30, dtype=torch.float64).reshape(2, 3, 5)
    for steps in (None, 2, 4):
        rows = [ops.window_sum(row, 0.5, steps=steps) for row in values]
        close(ops.window_sum(values, 0.5, steps=steps), torch.stack(rows))


def test_window_sum_refuses_to_look_back() -> None:
    with refuses("steps: must be >= 0, got -1"):
        ops.window_sum(torch.ones(1, 2), 0.5, steps=-1)
