"""Likelihood and preferences: numbers by hand, and Plackett–Luce by multiplying out."""

import itertools
import math

import pytest
import torch
from algorithms.batches import close, moved, ready, refuses
from torch import Tensor

from posttrain.algorithms.losses import (
    DIRECT_LOSSES,
    PREFERENCE_LOSSES,
    bradley_terry,
    dpo,
    ipo,
    kto,
    nll,
    orpo,
    plackett_luce,
    simpo,
)
from posttrain.types import Batch

SHAPE = "every [B, T] tensor is indexed by the token it is about"


def float64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def ranked(scores: list[float], margin: float = 0.0) -> float:
    """``−log Π_k e^{s_k − m} / (e^{s_k − m} + Σ_{j > k} e^{s_j})``, multiplied out."""
    probability = 1.0
    for place, score in enumerate(scores):
        lead = math.exp(score - margin)
        rest = sum(math.exp(other) for other in scores[place + 1 :])
        probability *= lead / (lead + rest)
    return -math.log(probability)


def test_the_tables_hold_the_losses() -> None:
    assert {
        "bradley_terry": bradley_terry,
        "plackett_luce": plackett_luce,
    } == PREFERENCE_LOSSES
    assert {"dpo": dpo, "ipo": ipo, "kto": kto, "orpo": orpo, "simpo": simpo} == DIRECT_LOSSES


def test_nll_is_minus_the_log_prob_of_active_tokens() -> None:
    batch = ready()
    logprobs = moved(batch).requires_grad_()
    terms = nll(logprobs, batch)
    close(terms.loss.detach(), -logprobs.detach() * batch.active)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    close(gradient, -batch.active.double(), rtol=0)
    assert (terms.means, terms.maxima) == ({}, {})
    with refuses(f"logprobs: expected shape [1, 1], got [1, 2]; {SHAPE}"):
        nll(torch.zeros(1, 2), Batch.from_rewards([0.0]))


def test_bradley_terry_by_hand() -> None:
    good, bad = float64([1.0, 2.0, -3.0]), float64([1.0, 0.0, 4.0])
    close(bradley_terry(good, bad), [math.log(2.0), softplus(-2.0), softplus(7.0)])
    close(bradley_terry(good, bad, margin=0.5), [softplus(0.5), softplus(-1.5), softplus(7.5)])
    margins = bradley_terry(good, bad, margin=float64([0.0, 1.0, 2.0]))
    close(margins, [math.log(2.0), softplus(-1.0), softplus(9.0)])


def test_bradley_terry_stays_finite_and_pushes_both_ways() -> None:
    good, bad = float64([-800.0, 0.0]).requires_grad_(), float64([800.0, 0.0]).requires_grad_()
    loss = bradley_terry(good, bad)
    close(loss.detach(), [1600.0, math.log(2.0)])
    loss.sum().backward()
    close(good.grad, [-1.0, -0.5])
    close(bad.grad, [1.0, 0.5])


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_plackett_luce_equals_the_product(margin: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    expected = [ranked(row, margin) for row in scores.tolist()]
    close(plackett_luce(scores, margin=margin), expected)


def test_the_probabilities_of_all_orders_add_up_to_one() -> None:
    orders = float64(list(itertools.permutations([0.3, -1.2, 2.0, 0.9])))
    close((-plackett_luce(orders)).exp().sum(), 1.0)


def test_a_ranking_of_two_is_bradley_terry() -> None:
    scores = float64([[1.0, 0.2], [-1.0, 3.0]])
    for margin in (0.0, 0.4, float64([0.4, -0.3])):
        pairs = bradley_terry(scores[:, 0], scores[:, 1], margin=margin)
        close(plackett_luce(scores, margin=margin), pairs)


def test_plackett_luce_takes_one_margin_a_set() -> None:
    scores = float64([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 3.0, 2.0]])
    margins = [0.1, 0.2, 0.3]
    expected = [ranked(row, m) for row, m in zip(scores.tolist(), margins, strict=True)]
    close(plackett_luce(scores, margin=float64(margins)), expected)


def test_sets_shorter_than_the_widest_ignore_their_padding() -> None:
    scores = float64([[1.0, 0.5, math.nan], [2.0, 1.0, 3.0], [7.0, math.inf, -math.inf]])
    present = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    scores.requires_grad_()
    loss = plackett_luce(scores, present)
    close(loss.detach(), [ranked([1.0, 0.5]), ranked([2.0, 1.0, 3.0]), 0.0])
    loss.sum().backward()
    assert scores.grad is not None
    push = 1 / (1 + math.exp(0.5))  # 1 − P(first before second)
    close(scores.grad[0], [-push, push, 0.0])
    close(scores.grad[2], [0.0, 0.0, 0.0], rtol=0)
    close(scores.grad.sum(1), [0.0, 0.0, 0.0])


def test_a_set_of_one_has_nothing_to_rank() -> None:
    assert plackett_luce(float64([[3.0], [-1.0]]), margin=0.5).tolist() == [0.0, 0.0]


def test_plackett_luce_stays_finite_for_scores_far_apart() -> None:
    close(plackett_luce(float64([[-900.0, 900.0, 0.0]])), [1800.0])


@pytest.mark.parametrize("beta", [None, 0.5])
def test_dpo_by_hand(beta: float | None) -> None:
    terms = {
        "chosen": float64([-1.0, -4.0]).requires_grad_(),
        "rejected": float64([-2.0, -1.0]).requires_grad_(),
        "ref_chosen": float64([-1.5, -3.0]).requires_grad_(),
        "ref_rejected": float64([-1.0, -2.5]).requires_grad_(),
    }
    good, bad = terms["chosen"], terms["rejected"]
    references = {"ref_chosen": terms["ref_chosen"], "ref_rejected": terms["ref_rejected"]}
    loss = dpo(good, bad, **references, **({} if beta is None else {"beta": beta}))
    scale = 0.1 if beta is None else beta
    # (−1 + 1.5) − (−2 + 1) = 1.5, and (−4 + 3) − (−1 + 2.5) = −2.5
    margins = [1.5 * scale, -2.5 * scale]
    close(loss.detach(), [softplus(-margin) for margin in margins])
    loss.sum().backward()
    pushes = [scale / (1 + math.exp(margin)) for margin in margins]
    close(good.grad, [-push for push in pushes])
    close(bad.grad, pushes)
    assert references["ref_chosen"].grad is None
    assert references["ref_rejected"].grad is None


def pairs() -> dict[str, Tensor]:
    """Two pairs with margins over the reference of 1.5 and −2.5, as above."""
    return {
        "chosen": float64([-1.0, -4.0]).requires_grad_(),
        "rejected": float64([-2.0, -1.0]).requires_grad_(),
        "ref_chosen": float64([-1.5, -3.0]).requires_grad_(),
        "ref_rejected": float64([-1.0, -2.5]).requires_grad_(),
    }


def test_dpo_with_smoothed_labels_by_hand() -> None:
    """ε = 0.2, β = 0.5, so βh = 0.75 and −1.25. As softplus(x) = softplus(−x) + x, the loss is
    softplus(−βh) + ε βh: 0.38687101 + 0.15 and 1.50192908 − 0.25."""
    given = pairs()
    loss = dpo(**given, beta=0.5, label_smoothing=0.2)
    by_hand = [0.8 * softplus(-m) + 0.2 * softplus(m) for m in (0.75, -1.25)]
    close(loss.detach(), by_hand)
    close(loss.detach(), [0.53687101, 1.25192908], rtol=1e-7)
    loss.sum().backward()
    # dℓ/dh = β (σ(βh) − (1 − ε)) = 0.5 (0.67917870 − 0.8) and 0.5 (0.22270014 − 0.8)
    slopes = [0.5 * (1 / (1 + math.exp(-m)) - 0.8) for m in (0.75, -1.25)]
    close(given["chosen"].grad, slopes)
    close(given["chosen"].grad, [-0.06041065, -0.28864993], rtol=1e-6)
    close(given["rejected"].grad, [-slope for slope in slopes])
    assert given["ref_chosen"].grad is None
    assert given["ref_rejected"].grad is None


def test_smoothed_labels_are_least_at_the_odds_of_being_right() -> None:
    """dℓ/dh = 0 where σ(βh) = 1 − ε, that is h = log((1 − ε) / ε) / β."""
    best = math.log(0.9 / 0.1) / 0.4
    good = float64([best - 0.1, best, best + 0.1]).requires_grad_()
    zero = torch.zeros(3, dtype=torch.float64)
    dpo(
        good, zero, ref_chosen=zero, ref_rejected=zero, beta=0.4, label_smoothing=0.1
    ).sum().backward()
    assert good.grad[0] < 0 < good.grad[2]
    close(good.grad[1], 0.0, atol=1e-15)


def test_without_smoothing_labels_are_taken_as_they_are() -> None:
    given = pairs()
    assert torch.equal(dpo(**given, label_smoothing=0.0), dpo(**given))


@pytest.mark.parametrize("beta", [None, 0.5])
def test_ipo_by_hand(beta: float | None) -> None:
    """(h − 1/(2β))², with h of 1.5 and −2.5 as above: the goal is 5 at β = 0.1, 1 at β = 0.5."""
    given = pairs()
    loss = ipo(**given, **({} if beta is None else {"beta": beta}))
    goal = 5.0 if beta is None else 1.0
    close(loss.detach(), [12.25, 56.25] if beta is None else [0.25, 12.25])
    loss.sum().backward()
    close(given["chosen"].grad, [2 * (1.5 - goal), 2 * (-2.5 - goal)])
    close(given["rejected"].grad, [-2 * (1.5 - goal), -2 * (-2.5 - goal)])
    assert given["ref_chosen"].grad is None
    assert given["ref_rejected"].grad is None


def test_preferences_of_other_shapes_are_refused() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with refuses(f"rejected: expected shape [2], got [3]; {SHAPE}"):
        bradley_terry(two, three)
    with refuses(f"margin: expected shape [2], got [2, 1]; {SHAPE}"):
        bradley_terry(two, two, margin=torch.zeros(2, 1))
    with refuses(f"margin: expected shape [3], got [2]; {SHAPE}"):
        plackett_luce(torch.zeros(3, 3), margin=torch.zeros(2))
    with refuses("scores: expected shape [N, K], got [2]"):
        plackett_luce(two)
    with refuses(f"present: expected shape [1, 3], got [1, 2]; {SHAPE}"):
        plackett_luce(torch.zeros(1, 3), torch.ones(1, 2).bool())
    with refuses("present: the members of a set must come before its padding"):
        plackett_luce(torch.zeros(1, 3), torch.tensor([[True, False, True]]))
    for name in ("rejected", "ref_chosen", "ref_rejected"):
        shapes = {"rejected": two, "ref_chosen": two, "ref_rejected": two, name: three}
        with refuses(f"{name}: expected shape [2], got [3]; {SHAPE}"):
            dpo(two, **shapes)
        with refuses(f"{name}: expected shape [2], got [3]; {SHAPE}"):
            ipo(two, **shapes)


@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan])
def test_dpo_and_ipo_need_a_positive_beta(beta: float) -> None:
    zero = torch.zeros(1)
    for loss in (dpo, ipo):
        with refuses(f"beta: must be > 0, got {beta}"):
            loss(zero, zero, ref_chosen=zero, ref_rejected=zero, beta=beta)


@pytest.mark.parametrize("share", [-0.1, 0.6, math.nan])
def test_at_most_half_of_the_labels_can_be_wrong(share: float) -> None:
    zero = torch.zeros(1)
    with refuses(f"label_smoothing: must be >= 0 and <= 0.5, got {share}"):
        dpo(zero, zero, ref_chosen=zero, ref_rejected=zero, label_smoothing=share)
