"""The source documents' numbers on clipping, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
guide: clip row 0.5 0.8 1.0 1.2 1.5 2.0 → 0.8 0.8 1.0 1.2 1.2 1.2      clip_row
guide: table for A > 0: 0.8A, 1.0A, 1.2A, 1.2A                         positive_advantage_table
guide: table for A < 0: "−1.2A … −0.8A" (the sign is wrong)            negative_advantage_table
guide: "stops decreasing, no more penalty" (it stops increasing)       negative_advantage_table
guide: worked example 1.5 → 1.20 and 0.5 → −0.80; clipped share        two_token_example
PPO & GRPO notes: r = 1.35, A = 0.2: min(0.27, 0.24) = 0.24            overfitting_token
vision notes: 0.3 / 0.1 = 3 → 1.2 A (only for A > 0)                   unlimited_token
guide, vision notes: clipping bounds the policy's change (wrong)       clipping_does_not_bound
PPO & GRPO notes: a clip or a penalty form of the objective            kl_penalty_pulls_back
vision notes: GRPO clips π(r|p) / π_old(r|p) "as PPO does" (wrong)     response_ratio
walk-through: ε = 0.01 in the code, [0.1, 0.2] in the text             epsilon_of_the_code
=====================================================================  ===========================
"""

import math

import pytest
import torch
from enumeration import close, numbers, printed, softmax_policy
from torch import Tensor

from posttrain.algorithms import losses, ops, weights
from posttrain.algorithms.diagnostics import tally
from posttrain.types import Batch, Terms


def tokens(ratios: list[float], advantage: float) -> tuple[Tensor, Batch]:
    """One token for each ratio to an old probability of 0.4, all with the same advantage."""
    old = torch.full((len(ratios), 1), 0.4, dtype=torch.float64).log()
    batch = Batch.from_rewards([advantage] * len(ratios)).replace(
        advantages=torch.full_like(old, advantage), old_logprobs=old
    )
    return (old + numbers(*ratios)[:, None].log()).requires_grad_(), batch


def objective_and_slope(terms: Terms, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """What is maximised, and its derivative by the log-probability, for each token."""
    (slope,) = torch.autograd.grad(-terms.loss.sum(), logprobs)
    return -terms.loss[:, 0], slope[:, 0]


def test_clip_row() -> None:
    """CISPO's gradient is clip(ρ) · A: the bare clip function, on both sides."""
    logprobs, batch = tokens([0.5, 0.8, 1.0, 1.2, 1.5, 2.0], 1.0)
    terms = losses.cispo(logprobs, batch, clip_low=0.2, clip_high=0.2)
    _, slope = objective_and_slope(terms, logprobs)
    close(slope, [0.8, 0.8, 1.0, 1.2, 1.2, 1.2])


def test_positive_advantage_table() -> None:
    advantage, ratios = 0.5, [0.5, 0.8, 1.0, 1.2 - 1e-12, 1.5]
    logprobs, batch = tokens(ratios, advantage)
    unclipped, _ = objective_and_slope(losses.unclipped(logprobs, batch), logprobs)
    used, slope = objective_and_slope(losses.clipped(logprobs, batch), logprobs)
    close(unclipped / advantage, [0.5, 0.8, 1.0, 1.2, 1.5])
    close(used / advantage, [0.5, 0.8, 1.0, 1.2, 1.2])  # capped, and no floor at 0.8
    close(slope / advantage, [0.5, 0.8, 1.0, 1.2, 0.0])


def test_negative_advantage_table() -> None:
    """The objective is ρ·A = −ρ·|A|: at ρ = 0.5 it is held at 0.8·A, which is −0.8·|A|."""
    advantage, ratios = -0.5, [1.5, 1.2, 1.0, 0.8 + 1e-12, 0.5]
    logprobs, batch = tokens(ratios, advantage)
    unclipped, _ = objective_and_slope(losses.unclipped(logprobs, batch), logprobs)
    used, slope = objective_and_slope(losses.clipped(logprobs, batch), logprobs)
    close(unclipped / advantage, [1.5, 1.2, 1.0, 0.8, 0.5])
    close(used / advantage, [1.5, 1.2, 1.0, 0.8, 0.8])
    close(used / abs(advantage), [-1.5, -1.2, -1.0, -0.8, -0.8])
    assert bool((used.diff()[:-1] > 0).all())  # it grows as ρ falls, until it stops growing
    close(slope / advantage, [1.5, 1.2, 1.0, 0.8, 0.0])  # ρ > 1 + ε is never let off


def test_two_token_example() -> None:
    """The token "5" (0.4 → 0.6, A = +1) and the token "6" (0.3 → 0.15, A = −1)."""
    batch = Batch.from_rewards([1.0, 0.0]).replace(
        advantages=numbers([1.0], [-1.0]), old_logprobs=numbers([0.4], [0.3]).log()
    )
    logprobs = numbers([0.6], [0.15]).log().requires_grad_()
    ratios = losses.unclipped(logprobs, batch)
    close(ratios.means["ratio"], [[1.5], [0.5]])
    close(-ratios.loss, [[1.50], [-0.50]])
    terms = losses.clipped(logprobs, batch)
    used, slope = objective_and_slope(terms, logprobs)
    close(used, [1.20, -0.80])
    close(slope, [0.0, 0.0])  # both have moved far enough
    close(weights.total(-terms.loss, weights.sequence_mean(batch)), 0.20)  # step 4: their mean
    close(terms.means["clip_high"], [[1.0], [0.0]])  # "5" is stopped above, "6" below
    close(terms.means["clip_low"], [[0.0], [1.0]])
    close(tally(terms, batch.active).summary()["clip_high"], 0.5)  # the clip fraction


def test_overfitting_token() -> None:
    ratio = math.exp(0.3)
    logprobs, batch = tokens([ratio], 0.2)
    unclipped, _ = objective_and_slope(losses.unclipped(logprobs, batch), logprobs)
    used, _ = objective_and_slope(losses.clipped(logprobs, batch), logprobs)
    close(unclipped, [0.2 * ratio])
    close(used, [0.24])
    assert printed(torch.cat([unclipped, used]), 2) == ["0.27", "0.24"]


@pytest.mark.parametrize(("advantage", "factor"), [(0.7, 1.2), (-0.7, 3.0)])
def test_unlimited_token_is_clipped_only_where_it_is_good(advantage: float, factor: float) -> None:
    batch = Batch.from_rewards([0.0]).replace(
        advantages=numbers([advantage]), old_logprobs=numbers([0.1]).log()
    )
    terms = losses.clipped(numbers([0.3]).log(), batch)
    close(terms.means["ratio"], [[3.0]])
    close(-terms.loss, [[factor * advantage]])


def test_clipping_does_not_bound_the_step() -> None:
    """One step of size 2 from 1/2 takes the ratio to 1 + tanh 1 = 1.76; then nothing pulls back."""
    logits = softmax_policy([0.5, 0.5])
    token = torch.tensor([[0]])
    old = ops.gather_logprobs(logits[None, None], token).detach()
    batch = Batch.from_rewards([1.0]).replace(advantages=numbers([1.0]), old_logprobs=old)

    def slope(point: Tensor) -> tuple[Terms, Tensor]:
        terms = losses.clipped(ops.gather_logprobs(point[None, None], token), batch)
        return terms, torch.autograd.grad(terms.loss.sum(), point)[0]

    _, gradient = slope(logits)
    close(gradient, [-0.5, 0.5])
    moved = (logits - 2 * gradient).detach().requires_grad_()
    terms, gradient = slope(moved)
    close(terms.means["ratio"], [[1 + math.tanh(1)]])
    assert printed(terms.means["ratio"], 2) == ["1.76"]
    close(-terms.loss, [[1.2]])
    close(gradient, [0.0, 0.0])


def test_kl_penalty_pulls_back_what_clipping_lets_go() -> None:
    """By log ρ, −ρ + β (ρ − 1 − log ρ) has the slope β (ρ − 1) − ρ: positive at ρ = 1.76, β = 4."""
    ratio = 1 + math.tanh(1)
    logprobs, batch = tokens([ratio], 1.0)
    held, slope = objective_and_slope(losses.penalised(logprobs, batch, coefficient=4.0), logprobs)
    close(held, [ratio - 4 * (ratio - 1 - math.log(ratio))])
    close(-slope, [4 * math.tanh(1) - ratio])
    assert float(-slope) > 1.2  # descent lowers ρ


def test_response_ratio_is_not_the_token_ratio() -> None:
    """Two tokens at ρ = 1.15: each is inside the range, their product 1.3225 is not."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    batch = Batch(
        tokens=mask.long(), mask=mask, rewards=numbers(1.0), old_logprobs=old, advantages=-old
    )
    logprobs = old + math.log(1.15)
    by_token = losses.clipped(logprobs, batch)
    close(weights.total(-by_token.loss, weights.sequence_mean(batch)), 1.15)
    # The whole response as one action: its log-probability is the sum of its tokens'.
    response = Batch.from_rewards([1.0]).replace(
        advantages=numbers([1.0]), old_logprobs=old.sum(dim=1, keepdim=True)
    )
    whole = losses.clipped(logprobs.sum(dim=1, keepdim=True), response)
    close(whole.means["ratio"], [[1.3225]])
    close(-whole.loss, [[1.2]])
    # GSPO's compromise: the geometric mean, again 1.15 here.
    geometric = losses.sequence_clipped(logprobs, batch, clip_low=0.2, clip_high=0.2)
    close(-geometric.loss, [[1.15, 1.15]])


def test_epsilon_of_the_code_is_far_tighter_than_the_text() -> None:
    logprobs, batch = tokens([1.05], 1.0)
    code, slope = objective_and_slope(
        losses.clipped(logprobs, batch, clip_low=0.01, clip_high=0.01), logprobs
    )
    close(code, [1.01])
    close(slope, [0.0])
    text, slope = objective_and_slope(losses.clipped(logprobs, batch), logprobs)
    close(text, [1.05])
    close(slope, [1.05])
