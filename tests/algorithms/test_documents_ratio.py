"""The source documents' numbers on importance weights, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
guide: 0.7 / 0.5 = 1.4, 0.1 / 0.3 = 0.33, 0.6 / 0.4 = 1.5; 100 ×       importance_weights
guide: ratio 1.0, 1.5, 0.7: unchanged, 50 % more, 30 % less likely     importance_weights
PPO & GRPO notes: e^(−1.8 + 2.1) = 1.35                                importance_weights
guide: importance weights correct for the old policy                   reused_data
walk-through: ten naive steps on the same responses (wrong)            reused_data
guide: the weight of each token corrects the shift (nearly right)      token_weights_approximate
walk-through: log_probs / old_log_probs (wrong)                        dividing_logprobs
lecture 17: log_probs − old_log_probs, clipped about 1 (wrong)         log_difference
lecture 17, walk-through: p / p_old has no gradient unless frozen      unfrozen_ratio
PPO & GRPO notes: the first pass has r = 1, and still a gradient       frozen_ratio
PPO & GRPO notes: old policy = reference policy (wrong)                old_and_reference
=====================================================================  ===========================
"""

import math

import pytest
import torch
from enumeration import (
    close,
    every_action,
    every_logprob,
    expected_gradient,
    numbers,
    printed,
    softmax_policy,
)
from torch import Tensor

from posttrain.algorithms import advantages, corrections, losses, objective, ops
from posttrain.types import Batch, Terms


def one_token(*, old: float, new: float, advantage: float = 1.0) -> tuple[Tensor, Batch]:
    """A token whose probability went from ``old`` to ``new``."""
    batch = Batch.from_rewards([advantage]).replace(
        advantages=numbers(advantage)[:, None], old_logprobs=numbers(old)[:, None].log()
    )
    return numbers(new)[:, None].log().requires_grad_(), batch


@pytest.mark.parametrize(
    ("old", "new", "ratio", "text"),
    [
        pytest.param(0.5, 0.7, 7 / 5, "1.40", id="Paris"),
        pytest.param(0.3, 0.1, 1 / 3, "0.33", id="Lyon"),
        pytest.param(0.4, 0.6, 3 / 2, "1.50", id="five"),
        pytest.param(0.4, 0.4, 1.0, "1.00", id="unchanged"),
        pytest.param(0.5, 0.35, 7 / 10, "0.70", id="30 % less likely"),
        pytest.param(0.005, 0.5, 100.0, "100.00", id="exploded"),
        pytest.param(math.exp(-2.1), math.exp(-1.8), math.exp(0.3), "1.35", id="overfitting"),
    ],
)
def test_importance_weights(old: float, new: float, *, ratio: float, text: str) -> None:
    logprobs, batch = one_token(old=old, new=new)
    terms = losses.unclipped(logprobs, batch)
    close(terms.means["ratio"], [[ratio]])
    close(-terms.loss, [[ratio]])  # with A = 1
    assert printed(terms.means["ratio"], 2) == [text]


def test_reused_data_needs_the_importance_weight() -> None:
    """Sampled from the old policy, learned by the new one; only "Paris" is right: J = π(Paris)."""
    old, new = [0.5, 0.3, 0.2], [0.7, 0.1, 0.2]  # Paris, Lyon, the
    logits = softmax_policy(new)
    logprobs = every_logprob(logits)
    batch = advantages.plain_return(every_action(old, [1.0, 0.0, 0.0]))
    corrected = losses.unclipped(logprobs, batch).loss
    close(expected_gradient(corrected, logits, batch=batch), [0.21, -0.07, -0.14])  # 0.7 · score
    naive = losses.naive(logprobs, batch).loss
    close(expected_gradient(naive, logits, batch=batch), [0.15, -0.05, -0.10])  # 0.5 · score


def test_token_weights_approximate_and_their_product_is_exact() -> None:
    """Two tokens, right if both are 0; old policy 0.5 each, new policy 0.7 each: J = 0.49."""
    logits = numbers([0.7, 0.3], [0.7, 0.3]).log().requires_grad_()  # [T, V]
    tokens = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    logprobs = ops.gather_logprobs(logits.expand(4, 2, 2), tokens)
    sampler = torch.full((4, 2), math.log(0.5), dtype=torch.float64)
    batch = Batch(
        tokens=tokens,
        mask=torch.ones(4, 2, dtype=torch.bool),
        rewards=numbers(1, 0, 0, 0),
        sampler_logprobs=sampler,
        old_logprobs=sampler,
        weights=torch.full((4, 2), 0.25, dtype=torch.float64),
    )
    batch = advantages.plain_return(batch)
    by_token = losses.unclipped(logprobs, batch).loss
    close(expected_gradient(by_token, logits, batch=batch)[:, 0], [0.105, 0.105])  # 0.7·0.3·0.5

    current = batch.replace(old_logprobs=logprobs.detach())
    whole = corrections.truncated(current, cap=10.0, level="sequence")
    close(whole.correction[0], [1.96, 1.96])  # 1.4²
    exact = objective.with_correction(losses.naive(logprobs, whole), whole).loss
    close(expected_gradient(exact, logits, batch=whole)[:, 0], [0.147, 0.147])  # 0.7·0.3·0.7


def test_dividing_logprobs_is_no_ratio_and_learns_backwards() -> None:
    """Its derivative is 1 / log π_old < 0: a rewarded token would be made less likely."""
    logprobs, batch = one_token(old=0.5, new=0.7)
    divided = logprobs / batch.old_logprobs
    (wrong,) = torch.autograd.grad(divided.sum(), logprobs)
    assert printed(divided, 4) == ["0.5146"]  # below 1, though the token became more likely
    close(wrong, [[1 / math.log(0.5)]])
    assert printed(wrong, 2) == ["-1.44"]
    terms = losses.unclipped(logprobs, batch)
    (right,) = torch.autograd.grad(-terms.loss.sum(), logprobs)
    close(terms.means["ratio"], [[1.4]])
    close(right, [[1.4]])


def test_log_difference_is_not_the_ratio() -> None:
    """log 0.7 − log 0.5 = 0.34, below 1 − ε: clipped about 1, nothing is ever inside the range."""
    logprobs, batch = one_token(old=0.5, new=0.7)
    difference = logprobs - batch.old_logprobs
    assert printed(difference, 2) == ["0.34"]
    terms = losses.clipped(logprobs, batch, clip_low=0.5, clip_high=0.5)
    close(terms.means["ratio"], difference.exp())
    close(-terms.loss, [[1.4]])
    same, on_policy = one_token(old=0.5, new=0.5)
    close(same - on_policy.old_logprobs, [[0.0]])
    close(-losses.clipped(same, on_policy).loss, [[1.0]])


def test_unfrozen_ratio_has_no_gradient() -> None:
    w = numbers(2.0).requires_grad_()
    logprobs = ops.gather_logprobs(torch.stack([w, torch.zeros_like(w)], dim=-1), torch.tensor([0]))
    close(logprobs.exp(), torch.sigmoid(w))  # the toy: p = sigmoid(w)
    unfrozen = logprobs.exp() / logprobs.exp()
    (gradient,) = torch.autograd.grad(unfrozen.sum(), w, retain_graph=True)
    close(gradient, [0.0])
    frozen = logprobs.exp() / logprobs.exp().detach()
    (gradient,) = torch.autograd.grad(frozen.sum(), w)
    close(gradient, [1 / (1 + math.exp(2))])  # 1 − sigmoid(2)
    assert printed(gradient, 4) == ["0.1192"]


@pytest.mark.parametrize("name", sorted(losses.POLICY_LOSSES.keys() - {"teacher_divergence"}))
def test_frozen_ratio_in_every_loss_even_if_the_old_logprobs_carry_a_graph(name: str) -> None:
    """At r = 1 every loss has the gradient of REINFORCE: −A · (1 − sigmoid(w))."""
    w = numbers(2.0).requires_grad_()
    logits = torch.stack([w, torch.zeros_like(w)], dim=-1)[None]
    logprobs = ops.gather_logprobs(logits, torch.tensor([[0]]))
    batch = Batch.from_rewards([3.0]).replace(
        advantages=numbers(3.0)[:, None] * torch.sigmoid(w) / torch.sigmoid(w).detach(),
        old_logprobs=logprobs,
    )
    terms = losses.POLICY_LOSSES[name](logprobs, batch)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), w)
    close(terms.means["ratio"], [[1.0]])
    close(gradient, [-3 / (1 + math.exp(2))])


def test_old_and_reference_policy_are_different_models() -> None:
    """Sunny: 0.6 now and when sampled, 0.7 under the reference. The ratio is 1, the KL is not 0."""
    logprobs, batch = one_token(old=0.6, new=0.6)
    batch = batch.replace(ref_logprobs=numbers(0.7)[:, None].log())
    terms = losses.clipped(logprobs, batch)
    close(terms.means["ratio"], [[1.0]])
    close(terms.means["approx_kl"], [[0.0]])  # to the old policy: what early stopping watches
    zero = Terms(loss=torch.zeros(1, 1, dtype=torch.float64))
    penalty = objective.with_kl(zero, logprobs, batch=batch, coefficient=1.0, estimator="k1").loss
    close(penalty, [[math.log(6 / 7)]])
    merged = losses.clipped(logprobs, batch.replace(old_logprobs=batch.ref_logprobs))
    close(merged.means["ratio"], [[6 / 7]])  # the reference in the ratio: wrong before any step
