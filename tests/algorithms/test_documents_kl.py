"""The source documents' numbers on KL and entropy, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
vision notes: KL(B ‖ A) of the weather: −0.092 + 0.122 + 0             weather_models
vision notes: "total 0.030" (of rounded terms; it is 0.029)            weather_models
vision notes: KL(P ‖ Q) ≠ KL(Q ‖ P); 0 for the same distribution       weather_models
vision notes: penalise KL(π_orig ‖ π), elsewhere KL(π ‖ π_orig)        weather_models
lecture 17: the sampled log π − log π_ref estimates the KL             sampled_estimates
walk-through: q/p − log(q/p) − 1 does too, because E[q/p] = 1          sampled_estimates
lecture 17: an estimate with lower variance                            k3_is_quieter
lecture 17: "(π_ref/π)(log π − log π_ref)" does (wrong)                alternative_estimate
walk-through, PPO & GRPO notes: Σ_t π(a_t) log(…) (wrong)              weighting_twice
walk-through: k3 summed over [… vocab] (wrong)                         summing_k3
walk-through: β · k3 in the loss penalises KL(π ‖ π_ref) (nearly)      penalty_gradients
walk-through: the reference is frozen                                  reference_is_frozen
PPO & GRPO notes: 0.8 − 6 × 0.05 = 0.5                                 reward_with_kl
PPO & GRPO notes: −β KL_t before the end, R − β KL_T at the end        reward_with_kl_per_token
PPO & GRPO notes: β grows above the target KL and shrinks below        adaptive_coefficient
vision notes: entropy 0.69 of a fair coin, 0.06 of a rigged one        entropies
vision notes: four kinds of weather, as likely each; one at 95 %       entropies
vision notes: H = −E[log π(a_t)] as a bonus on samples (wrong)         sampled_entropy
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

from posttrain.algorithms import kl, losses, objective, ops, shaping
from posttrain.types import Batch, Terms

MODEL_A = [0.7, 0.2, 0.1]  # sunny, rainy, cloudy
MODEL_B = [0.6, 0.3, 0.1]
KL_B_A = 0.6 * math.log(6 / 7) + 0.3 * math.log(3 / 2)
KL_A_B = 0.7 * math.log(7 / 6) + 0.2 * math.log(2 / 3)


def weather() -> tuple[Tensor, Batch]:
    """Model B is the policy, with every outcome at its probability; model A is the reference."""
    batch = every_action(MODEL_B, [0.0, 0.0, 0.0])
    reference = numbers(*MODEL_A).log()[:, None]
    return softmax_policy(MODEL_B), batch.replace(ref_logprobs=reference)


def expectation(values: Tensor, batch: Batch) -> float:
    """``Σ_a π(a) x_a``, exactly."""
    return float((batch.need("weights") * values).sum())


def test_weather_models() -> None:
    logits, batch = weather()
    terms = batch.weights * kl.estimate(
        every_logprob(logits).detach(), batch.ref_logprobs, estimator="k1"
    )
    close(terms[:, 0], [0.6 * math.log(0.6 / 0.7), 0.3 * math.log(0.3 / 0.2), 0.0])
    assert printed(terms[:2], 3) == ["-0.092", "0.122"]
    current, original = numbers(*MODEL_B).log(), numbers(*MODEL_A).log()
    close(kl.exact(current, original), KL_B_A)
    assert printed(kl.exact(current, original), 4) == ["0.0291"]  # not 0.030
    close(kl.exact(current, original, direction="forward"), KL_A_B)
    close(kl.exact(original, current), KL_A_B)
    assert printed(KL_A_B, 4) == ["0.0268"]
    close(kl.exact(current, current), 0.0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize(("direction", "value"), [("reverse", KL_B_A), ("forward", KL_A_B)])
def test_sampled_estimates_have_the_right_mean(
    estimator: str, direction: str, *, value: float
) -> None:
    logits, batch = weather()
    logprobs = every_logprob(logits).detach()
    sampled = kl.estimate(logprobs, batch.ref_logprobs, estimator=estimator, direction=direction)
    close(expectation(sampled, batch), value)
    assert bool((sampled < 0).any()) == (estimator == "k1")  # k3 is never negative


def test_k3_is_quieter_than_k1() -> None:
    logits, batch = weather()
    logprobs = every_logprob(logits).detach()
    variances = []
    for estimator in ("k1", "k3"):
        away = kl.estimate(logprobs, batch.ref_logprobs, estimator=estimator) - KL_B_A
        variances.append(expectation(away.square(), batch))
    close(variances[0], 0.6 * math.log(6 / 7) ** 2 + 0.3 * math.log(1.5) ** 2 - KL_B_A**2)
    k3 = [7 / 6 - math.log(7 / 6) - 1, 2 / 3 - math.log(2 / 3) - 1]
    close(variances[1], 0.6 * k3[0] ** 2 + 0.3 * k3[1] ** 2 - KL_B_A**2)
    assert variances[0] > 70 * variances[1]


def test_alternative_estimate_is_minus_the_forward_kl() -> None:
    """Its mean is −0.027 where the KL is +0.029: as a penalty it would reward drifting away."""
    logits, batch = weather()
    logprobs = every_logprob(logits).detach()
    log_ratio = kl.estimate(logprobs, batch.ref_logprobs, estimator="k1")
    alternative = (batch.ref_logprobs - logprobs).exp() * log_ratio
    forward = kl.estimate(logprobs, batch.ref_logprobs, estimator="k1", direction="forward")
    close(alternative, -forward)
    close(expectation(alternative, batch), -KL_A_B)
    assert printed(expectation(alternative, batch), 4) == ["-0.0268"]


def test_weighting_twice_is_not_the_kl() -> None:
    """π(a_t) log(π/π_ref) of a sampled token counts its probability again: −0.019, not +0.029."""
    logits, batch = weather()
    logprobs = every_logprob(logits).detach()
    log_ratio = kl.estimate(logprobs, batch.ref_logprobs, estimator="k1")
    twice = expectation(logprobs.exp() * log_ratio, batch)
    close(twice, 0.36 * math.log(6 / 7) + 0.09 * math.log(1.5))
    assert printed(twice, 3) == ["-0.019"]


def test_summing_k3_over_the_vocabulary_is_not_the_kl() -> None:
    logits, batch = weather()
    k3 = kl.estimate(every_logprob(logits).detach(), batch.ref_logprobs)
    close(k3.sum(), 7 / 6 + 2 / 3 - 2 - math.log(7 / 6) - math.log(2 / 3))
    assert printed(k3.sum(), 4) == ["0.0846"]
    close(expectation(k3, batch), KL_B_A)


def test_penalty_gradients_of_the_estimators() -> None:
    """In the loss, k2 has the gradient of KL(π ‖ π_ref), k3 that of KL(π_ref ‖ π), k1 none."""
    logits, batch = weather()
    reference = numbers(*MODEL_A).log()
    (reverse,) = torch.autograd.grad(kl.exact(logits, reference), logits)
    (forward,) = torch.autograd.grad(kl.exact(logits, reference, direction="forward"), logits)
    close(reverse, numbers(*MODEL_B) * (numbers(math.log(6 / 7), math.log(1.5), 0.0) - KL_B_A))
    close(forward, [-0.1, 0.1, 0.0])  # π − π_ref
    zero = Terms(loss=torch.zeros(3, 1, dtype=torch.float64))
    for estimator, gradient in [("k1", 0 * forward), ("k2", reverse), ("k3", forward)]:
        loss = objective.with_kl(
            zero, every_logprob(logits), batch=batch, coefficient=2.0, estimator=estimator
        ).loss
        close(-expected_gradient(loss, logits, batch=batch), 2 * gradient)


def test_reference_is_frozen_even_if_its_logprobs_carry_a_graph() -> None:
    logprobs = numbers([0.6]).log().requires_grad_()
    batch = Batch.from_rewards([0.0]).replace(ref_logprobs=logprobs + math.log(7 / 6))
    zero = Terms(loss=torch.zeros(1, 1, dtype=torch.float64))
    loss = objective.with_kl(zero, logprobs, batch=batch, coefficient=1.0).loss
    close(torch.autograd.grad(loss.sum(), logprobs)[0], [[1 - 7 / 6]])  # unfrozen it would be 0


def test_reward_with_kl() -> None:
    batch = Batch.from_rewards([0.8]).replace(
        old_logprobs=numbers([-1.0]), ref_logprobs=numbers([-1.05])
    )
    close(shaping.kl_in_reward(batch, coefficient=6.0).token_rewards, [[0.5]])


def test_reward_with_kl_per_token() -> None:
    """A prompt token, then KL 0.01, 0.01 and 0.03: −0.06, −0.06, 0.8 − 0.18, together 0.5."""
    mask = torch.tensor([[False, True, True, True]])
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    batch = Batch(
        tokens=mask.long(),
        mask=mask,
        rewards=numbers(0.8),
        old_logprobs=old,
        ref_logprobs=old - numbers(9.0, 0.01, 0.01, 0.03),
    )
    shaped = shaping.kl_in_reward(batch, coefficient=6.0)
    close(shaped.token_rewards, [[0.0, -0.06, -0.06, 0.62]])
    close(shaped.token_rewards.sum(), 0.5)


@pytest.mark.parametrize(("target", "factor"), [(0.02, 2.0), (0.05, 1.0), (0.2, 0.5)])
def test_adaptive_coefficient(target: float, factor: float) -> None:
    """A KL of 0.05 at β = 6: β doubles above the target, and halves below it."""
    doubling = kl.Coefficient(value=6.0, rule="doubling", target=target)
    close(doubling.update(0.05).value, 6 * factor)
    gentle = kl.Coefficient(value=6.0, rule="proportional", target=target, horizon=100)
    error = min(max(0.05 / target - 1, -0.2), 0.2)
    close(gentle.update(0.05, num_sequences=10).value, 6 * (1 + error / 10))


@pytest.mark.parametrize(
    ("probabilities", "entropy", "text"),
    [
        ([0.5, 0.5], math.log(2), "0.69"),
        ([0.99, 0.01], -0.99 * math.log(0.99) - 0.01 * math.log(0.01), "0.06"),
        ([0.25] * 4, math.log(4), "1.39"),
        ([0.95, 0.05], -0.95 * math.log(0.95) - 0.05 * math.log(0.05), "0.20"),
    ],
)
def test_entropies(probabilities: list[float], entropy: float, *, text: str) -> None:
    found = ops.entropy(numbers(*probabilities).log())
    close(found, entropy)
    assert printed(found, 2) == [text]


def test_sampled_entropy_has_the_right_mean_and_no_gradient() -> None:
    """−log π of a sampled token averages to H, but its gradient averages to 0: it is no bonus."""
    logits, batch = softmax_policy([0.99, 0.01]), every_action([0.99, 0.01], [0.0, 0.0])
    surprise = losses.nll(every_logprob(logits), batch).loss
    entropy = ops.entropy(logits)
    close(expectation(surprise.detach(), batch), entropy.detach())
    close(expected_gradient(surprise, logits, batch=batch), [0.0, 0.0])
    (bonus,) = torch.autograd.grad(entropy, logits)
    slope = 0.99 * 0.01 * math.log(99)
    close(bonus, [-slope, slope])  # the whole distribution: towards the fair coin
    assert printed(bonus, 4) == ["-0.0455", "0.0455"]
