"""The source documents' numbers on the policy gradient, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
guide: log 0.85 ≈ −0.16                                                scoring
guide: "sample: pick the highest probability" (wrong)                  picking_the_highest
guide: r_t = 0, then 1 or 0 at the end; R(τ) = Σ r_t                   sparse_rewards
guide: J = 0.7 means 70 % are solved                                   expected_return
guide: P = 0.3, ∇ log P = 3.33, 0.3 × 3.33 = 1                         log_derivative
guide: score functions of [0.5, 0.3, 0.2], weighted sum [0, 0, 0]      score_function_table
guide: b = 0.9 gives +0.1, −0.9;  b = 0.7 gives +0.3, −0.7             baseline_table
guide, lecture 17: a baseline b(s) adds no bias                        baselines_do_not_bias
guide, lecture 17: R = 0 makes no update                               wrong_answers
lecture 17: why not reward −1 for a wrong answer?                      reward_of_minus_one
lecture 17: the policy gradient is SFT weighted by the reward          policy_gradient_is_sft
lecture 17: "9 > 2 pushes the policy towards A2 in S1" (wrong)         two_states_push
lecture 17: loss summed or averaged over positions                     sum_over_positions
vision notes: −log 0.0001; products become sums                        negative_log_likelihood
=====================================================================  ===========================
"""

import math

import pytest
import torch
from enumeration import (
    close,
    every_action,
    every_gradient,
    every_logprob,
    expected_gradient,
    numbers,
    printed,
    softmax_policy,
)

from posttrain.algorithms import advantages, losses, ops, shaping, weights
from posttrain.types import Batch

THREE_TOKENS = [0.5, 0.3, 0.2]  # π(A), π(B), π(C)
SCORES = [[0.5, -0.3, -0.2], [-0.5, 0.7, -0.2], [-0.5, -0.3, 0.8]]  # ∇_z log π, row by row


def test_scoring_paris_at_85_percent() -> None:
    logits = numbers(0.85, 0.05, 0.03, 0.07).log()  # Paris, Lyon, the, everything else
    score = ops.gather_logprobs(logits, torch.tensor(0))
    close(score, math.log(0.85))
    assert printed(score, 2) == ["-0.16"]


def test_log_derivative_at_probability_03() -> None:
    probability = numbers(0.3).requires_grad_()  # ∇P = 1: P is its own parameter
    logits = torch.stack([probability, 1 - probability], dim=-1).log()
    logprob = ops.gather_logprobs(logits, torch.tensor([0]))
    (of_log,) = torch.autograd.grad(logprob.sum(), probability, retain_graph=True)
    (direct,) = torch.autograd.grad(logprob.exp().sum(), probability)
    close(of_log, [1 / 0.3])
    assert printed(of_log, 2) == ["3.33"]
    close(direct, [1.0])
    close(0.3 * of_log, direct)


def test_score_function_table_sums_to_zero() -> None:
    logits = softmax_policy(THREE_TOKENS)
    batch = every_action(THREE_TOKENS, [1.0, 1.0, 1.0])
    likelihood = losses.nll(every_logprob(logits), batch).loss
    scores = every_gradient(likelihood, logits)
    close(scores, SCORES)
    weighted = [[0.25, -0.15, -0.10], [-0.15, 0.21, -0.06], [-0.10, -0.06, 0.16]]
    close(batch.weights * scores, weighted)
    close(expected_gradient(likelihood, logits, batch=batch), [0.0, 0.0, 0.0])


def test_picking_the_highest_probability_is_not_sampling() -> None:
    """Greedy actions do not average the score to zero, so a baseline would then bias."""
    logits = softmax_policy(THREE_TOKENS)
    greedy = every_action([1.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    loss = losses.nll(every_logprob(logits), greedy).loss
    close(expected_gradient(loss, logits, batch=greedy), SCORES[0])


@pytest.mark.parametrize("baseline", [-3.0, 0.25, 0.9, 1.0, 100.0])
def test_baselines_do_not_bias(baseline: float) -> None:
    logits, rewards = softmax_policy(THREE_TOKENS), [1.0, 0.0, 2.0]
    batch = every_action(THREE_TOKENS, rewards)
    logprobs = every_logprob(logits)
    without = losses.naive(logprobs, advantages.plain_return(batch)).loss
    baselined = advantages.constant_baseline(batch, baseline=baseline)
    with_baseline = losses.naive(logprobs, baselined).loss
    expected = [0.05, -0.27, 0.22]  # 1 · 0.5 · score(A) + 2 · 0.2 · score(C)
    close(expected_gradient(without, logits, batch=batch), expected)
    close(expected_gradient(with_baseline, logits, batch=baselined), expected)
    assert not torch.allclose(
        every_gradient(without, logits), every_gradient(with_baseline, logits)
    )


@pytest.mark.parametrize(
    ("baseline", "correct", "wrong"), [(0.9, 0.1, -0.9), (0.7, 0.3, -0.7), (0.0, 1.0, 0.0)]
)
def test_baseline_table(baseline: float, correct: float, wrong: float) -> None:
    batch = advantages.constant_baseline(Batch.from_rewards([1.0, 0.0]), baseline=baseline)
    close(batch.advantages, [[correct], [wrong]])


def test_sparse_rewards_reach_the_last_token_and_add_up() -> None:
    """A prompt token, then a right answer of three tokens or a half right one of two."""
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    batch = Batch(tokens=mask.long(), mask=mask, rewards=numbers(1.0, 0.5))
    shaped = shaping.score_at_last_token(batch)
    close(shaped.token_rewards, [[0, 0, 0, 1.0], [0, 0, 0.5, 0]])
    close(advantages.sequence_returns(shaped), [1.0, 0.5])


def test_expected_return_of_07_is_seven_in_ten() -> None:
    batch = Batch.from_rewards([1, 0, 1, 1, 0, 1, 1, 0, 1, 1])
    close(advantages.update_baseline(None, batch), 0.7)


def test_wrong_answers_make_no_update() -> None:
    logits = softmax_policy(THREE_TOKENS)
    batch = advantages.plain_return(every_action(THREE_TOKENS, [1.0, 0.0, 0.0]))
    gradients = every_gradient(losses.naive(every_logprob(logits), batch).loss, logits)
    close(gradients, [SCORES[0], [0, 0, 0], [0, 0, 0]])


def test_reward_of_minus_one_is_a_baseline_of_one_half_twice_as_strong() -> None:
    logits = softmax_policy(THREE_TOKENS)
    logprobs = every_logprob(logits)
    signed = advantages.plain_return(every_action(THREE_TOKENS, [1.0, -1.0, -1.0]))
    binary = every_action(THREE_TOKENS, [1.0, 0.0, 0.0])
    half = advantages.constant_baseline(binary, baseline=0.5)
    close(signed.advantages, [[1.0], [-1.0], [-1.0]])
    close(signed.advantages, 2 * half.advantages)
    # 2 · 0.5 · score(A): twice the expected gradient of the binary reward, sample noise apart.
    push = expected_gradient(losses.naive(logprobs, signed).loss, logits, batch=signed)
    close(push, [0.5, -0.3, -0.2])
    plain = advantages.plain_return(binary)
    close(push, 2 * expected_gradient(losses.naive(logprobs, plain).loss, logits, batch=plain))


def test_policy_gradient_is_sft_weighted_by_the_reward() -> None:
    logprobs = every_logprob(softmax_policy(THREE_TOKENS))
    batch = advantages.plain_return(every_action(THREE_TOKENS, [1.0, 0.0, 3.0]))
    supervised = losses.nll(logprobs, batch).loss
    close(supervised, [[-math.log(0.5)], [-math.log(0.3)], [-math.log(0.2)]])
    close(losses.naive(logprobs, batch).loss, numbers(1, 0, 3)[:, None] * supervised)


@pytest.mark.parametrize(
    ("rewards", "mean", "pushes"),
    [([11.0, 9.0], [0.5, -0.5], [5.5, -4.5]), ([0.0, 2.0], [-0.5, 0.5], [0.0, -1.0])],
)
def test_two_states_push_the_right_way_without_a_baseline(
    rewards: list[float], mean: list[float], pushes: list[float]
) -> None:
    """Single samples of S1 push by +5.5 and −4.5; their mean is +0.5 towards A1, the better one."""
    logits = softmax_policy([0.5, 0.5])
    batch = advantages.plain_return(every_action([0.5, 0.5], rewards))
    loss = losses.naive(every_logprob(logits), batch).loss
    close(every_gradient(loss, logits)[:, 0], pushes)  # on the logit of A1
    close(expected_gradient(loss, logits, batch=batch), mean)


def test_sum_over_positions_is_the_mean_times_their_number() -> None:
    """Two responses of three tokens each, δ = 2 and −1, all tokens at probability 1/e."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    batch = Batch(tokens=mask.long(), mask=mask, rewards=numbers(2.0, -1.0))
    loss = losses.naive(-torch.ones(2, 3).double(), advantages.plain_return(batch)).loss
    summed = weights.total(loss, weights.sequence_sum(batch))
    averaged = weights.total(loss, weights.token_mean(batch))
    close(summed, 3 * (2 - 1) / 2)
    close(averaged, (2 - 1) / 2)


def test_negative_log_likelihood_of_rare_events_and_of_products() -> None:
    rare = losses.nll(numbers(1e-4)[:, None].log(), Batch.from_rewards([0.0])).loss
    close(rare, [[4 * math.log(10)]])
    assert printed(rare, 2) == ["9.21"]
    mask = torch.ones(1, 3, dtype=torch.bool)
    batch = weights.sequence_sum(Batch(tokens=mask.long(), mask=mask, rewards=numbers(0.0)))
    joint = losses.nll(numbers(0.5, 0.3, 0.2).log()[None], batch).loss
    close(weights.total(joint, batch), -math.log(0.5 * 0.3 * 0.2))
