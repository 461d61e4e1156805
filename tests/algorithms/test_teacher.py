"""Distillation in numbers: derived by hand, exact expectations, and the limits of a divergence."""

import math

import pytest
import torch
from algorithms.batches import refuses
from enumeration import close, every_action, every_logprob, numbers, softmax_policy

from posttrain.algorithms import weights
from posttrain.algorithms.advantages import group_normalised, towards_teacher
from posttrain.algorithms.kl import exact, jensen_shannon
from posttrain.algorithms.losses import teacher_divergence, unclipped
from posttrain.algorithms.pieces import asks_teacher, divergence_of
from posttrain.types import Batch

POLICY, TEACHER = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)


def scored() -> Batch:
    """One sequence of four tokens, of which the third is a tool's."""
    return Batch.from_tensors(
        torch.tensor([[1, 1, 0, 1]]),
        old_logprobs=numbers(0.5, 0.25, math.nan, 0.5).log()[None],
        teacher_logprobs=numbers(0.25, 0.5, math.nan, 0.125).log()[None],
        rewards=numbers(0.0),
        groups=torch.tensor([0]),
    )


def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token() -> None:
    """log of ½, 2 and ¼; discounted by ½, over the policy's tokens alone."""
    two = math.log(2)
    close(towards_teacher(scored()).need("advantages"), [[-two, two, 0.0, -2 * two]])
    half = towards_teacher(scored(), coefficient=3.0, discount=0.5).need("advantages")
    close(half, [[3 * (-two + two / 2 - 2 * two / 4), 3 * (two - two), 0.0, -6 * two]])
    whole = towards_teacher(scored(), discount=1.0).need("advantages")  # of the whole sequence
    close(whole, [[-2 * two, -two, 0.0, -2 * two]])


def test_a_mixture_adds_the_advantage_of_the_reward() -> None:
    one = Batch.from_rewards([1.0, 0.0, 1.0]).replace(
        old_logprobs=numbers(0.5, 0.5, 0.5).log()[:, None],
        teacher_logprobs=numbers(0.25, 0.5, 1.0).log()[:, None],
    )
    two = math.log(2)
    expected = 0.5 * numbers(-two, 0, two)[:, None] + 2 * group_normalised(one).need("advantages")
    close(towards_teacher(one, coefficient=0.5, reward=2.0).need("advantages"), expected)


def test_a_broken_teacher_is_an_error() -> None:
    broken = scored().replace(teacher_logprobs=torch.full((1, 4), -torch.inf))
    with refuses(
        "teacher_logprobs: -inf at [0, 0] (3 in all); mark what could not be scored in `valid` "
        "instead of passing NaN or infinity on"
    ):
        towards_teacher(broken)


def test_its_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over every action, not sampled: ∇ E[−ρ A] = ∇ KL(π ‖ π_teacher)."""
    logits = softmax_policy(POLICY)
    batch = every_action(POLICY, [0.0, 0.0, 0.0])
    logprobs = every_logprob(logits)
    batch = batch.replace(
        old_logprobs=logprobs.detach(), teacher_logprobs=numbers(*TEACHER).log()[:, None]
    )
    loss = weights.total(unclipped(logprobs, towards_teacher(batch)).loss, batch)
    (found,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(exact(logits, numbers(*TEACHER).log()), logits)
    close(found, wanted)
    assert wanted.abs().max() > 0.1


def test_jensen_shannon_by_hand() -> None:
    """p = (½, ½), q = (¼, ¾): the mixture of β = ¼ is m = ¾ p + ¼ q = (7/16, 9/16)."""
    p, q = numbers(0.5, 0.5), numbers(0.25, 0.75)
    log = math.log
    to_ref = 0.25 * log(0.25 / (7 / 16)) + 0.75 * log(0.75 / (9 / 16))
    to_own = 0.5 * log(0.5 / (7 / 16)) + 0.5 * log(0.5 / (9 / 16))
    close(jensen_shannon(p.log(), q.log(), beta=0.25), 0.25 * to_ref + 0.75 * to_own)
    close(jensen_shannon(p.log(), q.log(), beta=1.0), 0.5 * log(2) + 0.5 * log(2 / 3))
    close(jensen_shannon(p.log(), q.log(), beta=0.0), 0.25 * log(0.5) + 0.75 * log(1.5))


def test_the_limits_of_jensen_shannon_are_both_kls() -> None:
    own, ref = numbers(*POLICY).log(), numbers(*TEACHER).log()
    for beta, direction in ((1e-6, "forward"), (1 - 1e-6, "reverse")):
        found = jensen_shannon(own, ref, beta=beta) / min(beta, 1 - beta)
        torch.testing.assert_close(found, exact(own, ref, direction=direction), rtol=1e-5, atol=0)
    close(jensen_shannon(own, ref, beta=0.3), jensen_shannon(ref, own, beta=0.7))
    close(jensen_shannon(own, own, beta=0.3), 0.0)


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_every_divergence_has_its_gradient(beta: float) -> None:
    own = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ref = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda logits: jensen_shannon(logits, ref, beta=beta), own.requires_grad_()
    )


@pytest.mark.parametrize("beta", [0.25, 1.0])
def test_a_token_that_neither_can_emit_adds_nothing(beta: float) -> None:
    own, ref = numbers(*POLICY, 0.0).log().requires_grad_(), numbers(*TEACHER, 0.0).log()
    found = jensen_shannon(own, ref, beta=beta)
    found.backward()
    close(found, jensen_shannon(numbers(*POLICY).log(), numbers(*TEACHER).log(), beta=beta))
    assert own.grad is not None
    assert own.grad.isfinite().all()


def test_the_loss_is_the_divergence_and_a_share_of_the_reward() -> None:
    batch = scored().replace(
        divergence=numbers(1.0, 2.0, math.nan, 4.0)[None], advantages=numbers(1, -1, 0, 2)[None]
    )
    logprobs = batch.need("old_logprobs")
    close(teacher_divergence(logprobs, batch).loss, [[1.0, 2.0, 0.0, 4.0]])
    mixed = teacher_divergence(logprobs, batch, reward=0.5)  # at ρ = 1: −A
    close(mixed.loss, [[0.5, 2.5, 0.0, 3.0]])
    close(mixed.means["divergence"], [[1.0, 2.0, 0.0, 4.0]])


def test_pieces_say_what_they_ask_a_teacher() -> None:
    own, ref = numbers(*POLICY).log(), numbers(*TEACHER).log()
    divergence = divergence_of(teacher_divergence)
    assert divergence is not None
    close(divergence(own, ref), exact(own, ref))
    assert asks_teacher(print, teacher_divergence)
    assert asks_teacher(towards_teacher)
    assert not asks_teacher(unclipped, group_normalised)
