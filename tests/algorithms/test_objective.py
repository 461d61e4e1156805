"""The objective put together: correction, divergence and entropy on top of a policy loss."""

import math

import pytest
import torch
from algorithms.batches import close, moved, ready, refuses
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.losses import clipped
from posttrain.algorithms.objective import (
    with_correction,
    with_entropy,
    with_kl,
    with_mismatch,
    with_values,
)
from posttrain.types import Batch, Terms

SHAPE = "every [B, T] tensor is indexed by the token it is about"


def started() -> tuple[Batch, Tensor, Terms]:
    """A batch, the current log-probs with gradient, and a policy loss to add to."""
    batch = ready()
    batch = batch.replace(correction=batch.need("values").abs() * batch.active)
    logprobs = moved(batch).requires_grad_()
    return batch, logprobs, clipped(logprobs, batch)


def gradient(loss: Tensor, by: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss.sum(), by, retain_graph=True)
    return result


def keeps_reports(made: Terms, terms: Terms, name: str) -> None:
    """A stage adds its own report, without gradient, and drops none."""
    assert list(made.means) == [*terms.means, name]
    assert all(made.means[key] is terms.means[key] for key in terms.means)
    assert made.maxima == terms.maxima
    assert not made.means[name].requires_grad


def test_the_correction_multiplies_the_policy_term() -> None:
    batch, logprobs, terms = started()
    correction = batch.need("correction")
    made = with_correction(terms, batch)
    close(made.loss.detach(), terms.loss.detach() * correction)
    close(gradient(made.loss, logprobs), gradient(terms.loss, logprobs) * correction)
    close(made.means["correction"], correction, rtol=0)
    keeps_reports(made, terms, "correction")


def test_the_correction_is_a_constant_and_zero_where_nothing_counts() -> None:
    batch, logprobs, terms = started()
    clean = with_correction(terms, batch)
    spoilt = batch.need("correction").masked_fill(~batch.active, math.nan).requires_grad_()
    made = with_correction(terms, batch.replace(correction=spoilt))
    close(made.means["correction"], clean.means["correction"], rtol=0)
    close(gradient(made.loss, logprobs), gradient(clean.loss, logprobs), rtol=0)


def test_without_a_correction_nothing_changes() -> None:
    batch, _, terms = started()
    assert with_correction(terms, batch.replace(correction=None)) is terms


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_is_added_to_every_active_token(
    estimator: kl.Estimator, direction: kl.Direction
) -> None:
    batch, logprobs, terms = started()
    made = with_kl(
        terms, logprobs, batch=batch, coefficient=0.3, estimator=estimator, direction=direction
    )
    each = kl.estimate(
        logprobs, batch.need("ref_logprobs"), estimator=estimator, direction=direction
    )
    each = each * batch.active
    close(made.loss.detach(), (terms.loss + 0.3 * each).detach())
    wanted = gradient(terms.loss, logprobs) + 0.3 * gradient(each, logprobs)
    close(gradient(made.loss, logprobs), wanted)
    close(made.means["kl"], each.detach())
    keeps_reports(made, terms, "kl")


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_weighted_divergence_is_multiplied_by_the_ratio_and_its_gradient_goes_through(
    estimator: kl.Estimator, direction: kl.Direction
) -> None:
    batch, logprobs, terms = started()
    made = with_kl(
        terms,
        logprobs,
        batch=batch,
        coefficient=0.3,
        estimator=estimator,
        direction=direction,
        weighted=True,
    )
    each = kl.estimate(
        logprobs, batch.need("ref_logprobs"), estimator=estimator, direction=direction
    )
    each = each * (logprobs - batch.need("old_logprobs")).exp() * batch.active
    close(made.loss.detach(), (terms.loss + 0.3 * each).detach())
    wanted = gradient(terms.loss, logprobs) + 0.3 * gradient(each, logprobs)
    close(gradient(made.loss, logprobs), wanted)
    close(made.means["kl"], each.detach())
    keeps_reports(made, terms, "kl")


def test_a_weighted_divergence_by_hand() -> None:
    """π = 1/2, π_old = 2/5, π_ref = 1/4: ρ = 5/4, d = −log 2, k3 = 1/2 + log 2 − 1 = log 2 − 1/2.

    ℓ = 2 · 5/4 (log 2 − 1/2), and by log π: 2 · 5/4 (k3 + 1 − e^d) = 5/2 log 2.
    """
    batch = Batch.from_rewards([0.0]).replace(
        old_logprobs=torch.tensor([[0.4]], dtype=torch.float64).log(),
        ref_logprobs=torch.tensor([[0.25]], dtype=torch.float64).log(),
    )
    logprobs = torch.tensor([[0.5]], dtype=torch.float64).log().requires_grad_()
    zero = Terms(loss=torch.zeros(1, 1, dtype=torch.float64))
    made = with_kl(zero, logprobs, batch=batch, coefficient=2.0, weighted=True)
    close(made.loss.detach(), [[2.5 * (math.log(2) - 0.5)]])
    assert list(made.parts) == ["policy", "kl"]
    close(made.parts["kl"].detach(), made.loss.detach(), rtol=0)
    close(gradient(made.loss, logprobs), [[2.5 * math.log(2)]])


def test_the_old_policy_and_the_reference_of_a_weighted_divergence_are_constants() -> None:
    batch, logprobs, terms = started()
    old = batch.need("old_logprobs").clone().requires_grad_()
    ref = batch.need("ref_logprobs").clone().requires_grad_()
    given = batch.replace(old_logprobs=old, ref_logprobs=ref)
    with_kl(terms, logprobs, batch=given, coefficient=1.0, weighted=True).loss.sum().backward()
    assert (old.grad, ref.grad) == (None, None)


def test_a_weighted_divergence_needs_the_old_policy() -> None:
    batch, logprobs, terms = started()
    with refuses(
        "old_logprobs: this batch has none; it is added by Learner.infer, before the first "
        "optimiser step"
    ):
        with_kl(
            terms,
            logprobs,
            batch=batch.replace(old_logprobs=None),
            coefficient=0.1,
            weighted=True,
        )


def test_divergence_in_the_loss_is_the_reverse_k3_unless_told() -> None:
    batch, logprobs, terms = started()
    made = with_kl(terms, logprobs, batch=batch, coefficient=1.0)
    each = kl.estimate(logprobs.detach(), batch.need("ref_logprobs"), estimator="k3")
    close(made.means["kl"], each * batch.active)


def test_the_reference_is_a_constant() -> None:
    batch, logprobs, terms = started()
    ref = batch.need("ref_logprobs").requires_grad_()
    made = with_kl(terms, logprobs, batch=batch.replace(ref_logprobs=ref), coefficient=1.0)
    made.loss.sum().backward()
    assert ref.grad is None


def test_entropy_is_a_bonus_at_every_active_token() -> None:
    batch, logprobs, terms = started()
    entropy = batch.need("values").abs().masked_fill(~batch.active, math.nan).requires_grad_()
    made = with_entropy(terms, entropy, batch=batch, coefficient=0.2)
    kept = entropy.detach().nan_to_num(0.0)
    close(made.loss.detach(), terms.loss.detach() - 0.2 * kept)
    close(gradient(made.loss, entropy), -0.2 * batch.active.double())
    close(gradient(made.loss, logprobs), gradient(terms.loss, logprobs), rtol=0)
    close(made.means["entropy"], kept, rtol=0)
    keeps_reports(made, terms, "entropy")
    assert list(made.parts) == ["policy", "entropy"]
    close(made.parts["entropy"].detach(), -0.2 * kept)
    # Without a coefficient it is reported, and is no part of the loss.
    assert not with_entropy(terms, entropy, batch=batch, coefficient=0.0).parts


def test_a_negative_entropy_coefficient_is_a_penalty() -> None:
    zero, batch = Terms(loss=torch.zeros(1, 1)), Batch.from_rewards([0.0])
    made = with_entropy(zero, torch.tensor([[0.5]]), batch=batch, coefficient=-0.5)
    assert made.loss.item() == 0.25


def test_the_mismatch_of_engine_and_trainer_is_reported() -> None:
    batch, _, terms = started()
    sampler = batch.need("sampler_logprobs").requires_grad_()
    batch = batch.replace(sampler_logprobs=sampler)
    made = with_mismatch(terms, batch)
    expected = (batch.need("old_logprobs") - sampler.detach()).abs() * batch.active
    assert made.loss is terms.loss
    close(made.means["mismatch"], expected)
    close(made.maxima["mismatch"], expected)
    assert list(made.means) == [*terms.means, "mismatch"]
    assert list(made.maxima) == [*terms.maxima, "mismatch"]
    assert not made.means["mismatch"].requires_grad


@pytest.mark.parametrize("missing", ["sampler_logprobs", "old_logprobs"])
def test_without_both_views_there_is_no_mismatch_to_report(missing: str) -> None:
    batch, _, terms = started()
    assert with_mismatch(terms, batch.replace(**{missing: None})) is terms


def test_bad_objectives_are_refused() -> None:
    batch, logprobs, terms = started()
    with refuses("coefficient: must be >= 0, got -0.1"):
        with_kl(terms, logprobs, batch=batch, coefficient=-0.1)
    with refuses("estimator: unknown 'k9'; choose one of k1, k2, k3"):
        with_kl(terms, logprobs, batch=batch, coefficient=0.1, estimator="k9")
    with refuses(f"logprobs: expected shape [12, 10], got [1, 10]; {SHAPE}"):
        with_kl(terms, logprobs[:1], batch=batch, coefficient=0.1)
    with refuses("coefficient: must be finite, got nan"):
        with_entropy(terms, logprobs, batch=batch, coefficient=math.nan)
    with refuses(f"entropy: expected shape [12, 10], got [12, 1]; {SHAPE}"):
        with_entropy(terms, logprobs[:, :1], batch=batch, coefficient=0.1)
    with refuses(
        "ref_logprobs: this batch has none; it is added by Learner.infer with a reference model"
    ):
        with_kl(terms, logprobs, batch=batch.replace(ref_logprobs=None), coefficient=0.1)


def test_the_critics_loss_is_added_with_its_numbers() -> None:
    """1 + 0.5 · 4 = 3 and −2 + 0.5 · 6 = 1; each keeps the name of its part and its diagnostics."""
    policy = Terms(
        loss=torch.tensor([[1.0, -2.0]]),
        means={"clip_fraction": torch.tensor([[0.25, 0.0]])},
        maxima={"ratio": torch.tensor([[1.5, 1.0]])},
    )
    critic = Terms(
        loss=torch.tensor([[4.0, 6.0]]),
        means={"value_clip": torch.tensor([[1.0, 0.0]])},
        maxima={"value_error": torch.tensor([[2.0, 3.0]])},
    )
    both = with_values(policy, critic, coefficient=0.5)
    assert both.loss.tolist() == [[3.0, 1.0]]
    assert {name: part.tolist() for name, part in both.parts.items()} == {
        "policy": [[1.0, -2.0]],
        "value": [[2.0, 3.0]],
    }
    assert {name: mean.tolist() for name, mean in both.means.items()} == {
        "clip_fraction": [[0.25, 0.0]],
        "value_clip": [[1.0, 0.0]],
    }
    assert {name: most.tolist() for name, most in both.maxima.items()} == {
        "ratio": [[1.5, 1.0]],
        "value_error": [[2.0, 3.0]],
    }
    assert with_values(policy, critic, coefficient=0.0).loss.tolist() == [[1.0, -2.0]]
    with pytest.raises(ValueError, match=r"^coefficient: .*-0\.1"):
        with_values(policy, critic, coefficient=-0.1)
