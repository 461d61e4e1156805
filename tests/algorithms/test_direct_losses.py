"""DPO's kin: numbers by hand in float64, gradients, and what TRL's own code makes of a batch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithms.batches import refuses
from torch import Tensor

from posttrain.algorithms.losses import dpo, ipo, kto, orpo, simpo
from posttrain.algorithms.pieces import needed

TRL: dict[str, Any] = json.loads(
    (Path(__file__).parent / "fixtures" / "trl_losses.json").read_text()
)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def close(found: Tensor, *expected: float) -> None:
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_ipo_by_the_token() -> None:
    """h = (−2 − −3) / 2 − (−8 − −6) / 4 = ½ + ½ = 1; 1 / (2 · 0.25) = 2; (1 − 2)² = 1.

    The gradient by log π_c is 2 (h − 2) / 2 = −1, and by log π_r −2 (h − 2) / 4 = ½.
    """
    chosen, rejected = float64(-2.0), float64(-8.0)
    loss = ipo(
        chosen,
        rejected,
        ref_chosen=float64(-3.0),
        ref_rejected=float64(-6.0),
        chosen_length=torch.tensor([2]),
        rejected_length=torch.tensor([4]),
        beta=0.25,
    )
    close(loss, 1.0)
    loss.sum().backward()
    close(chosen.grad, -1.0)
    close(rejected.grad, 0.5)


def test_kto_by_hand() -> None:
    """h − z = 3 − 1 = 2 and −1 − 1 = −2, β = ½: 1 − σ(1) three times, and 1 − σ(−(−1)) = 1 − σ(1).

    Of the second, β (z − h) = 1 too. Gradients: −3 · ½ σ(1) (1 − σ(1)), and + ½ · ½ of it.
    """
    logprobs, ref = float64(-2.0, -6.0), float64(-5.0, -5.0)
    loss = kto(
        logprobs,
        ref,
        desirable=torch.tensor([True, False]),
        divergence=torch.tensor(1.0),
        beta=0.5,
        desirable_weight=3.0,
        undesirable_weight=0.5,
    )
    close(loss, 3 * (1 - sigmoid(1)), 0.5 * (1 - sigmoid(1)))
    loss.sum().backward()
    slope = 0.5 * sigmoid(1) * (1 - sigmoid(1))
    close(logprobs.grad, -3 * slope, 0.5 * slope)
    assert ref.grad is None


def test_kto_without_a_divergence_is_a_step_from_one_half() -> None:
    """Where policy and reference agree, h is 0: ½ whatever the label."""
    same = float64(-3.0, -3.0)
    close(kto(same, same, desirable=torch.tensor([True, False])), 0.5, 0.5)


def test_orpo_by_hand() -> None:
    """p_c = ½ and p_r = ¼ by the token: odds 1 and ⅓, log ratio log 3, σ(log 3) = ¾.

    The loss is log 2 − 2 log ¾. By log p_c it falls by 1 + 2 · ¼ / (1 − ½) = 2, a token of two
    half of that; by log p_r it rises by 2 · ¼ / (1 − ¼) = ⅔, over one token.
    """
    chosen, rejected = float64(2 * math.log(0.5)), float64(math.log(0.25))
    loss = orpo(chosen, rejected, chosen_length=2.0, rejected_length=1.0, beta=2.0)
    close(loss, math.log(2) - 2 * math.log(0.75))
    loss.sum().backward()
    close(chosen.grad, -1.0)
    close(rejected.grad, 2 / 3)


@pytest.mark.parametrize("chosen", [0.0, -0.5])
def test_orpo_is_finite_where_a_completion_is_certain(chosen: float) -> None:
    better, worse = float64(chosen), float64(0.0)
    loss = orpo(better, worse)
    loss.sum().backward()
    assert all(bool(each.isfinite().all()) for each in (loss, better.grad, worse.grad))


def test_simpo_by_hand() -> None:
    """β (−1 − −1.5) − γ = 2 · ½ − 1.5 = −½: log(1 + e^½), slope −σ(½) · 2 over the lengths."""
    chosen, rejected = float64(-2.0), float64(-6.0)
    loss = simpo(chosen, rejected, chosen_length=2.0, rejected_length=4.0, beta=2.0, gamma=1.5)
    close(loss, math.log1p(math.exp(0.5)))
    loss.sum().backward()
    close(chosen.grad, -sigmoid(0.5))
    close(rejected.grad, sigmoid(0.5) / 2)


def test_each_says_what_it_needs() -> None:
    assert needed(dpo) == {"ref_logprobs"}
    assert needed(ipo) == {"ref_logprobs", "lengths"}
    assert needed(kto) == {"ref_logprobs", "baseline"}
    assert needed(orpo) == needed(simpo) == {"lengths"}


def test_what_cannot_be_meant_is_refused() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    for loss in (orpo, simpo):
        with refuses("beta: must be > 0, got 0.0"):
            loss(one, one, beta=0.0)
        with pytest.raises(ValueError, match=r"^rejected: expected shape \[2\]"):
            loss(two, one)
    with pytest.raises(ValueError, match=r"^gamma: "):
        simpo(one, one, gamma=-1.0)
    with refuses("beta: must be > 0, got -1.0"):
        kto(one, one, desirable=one.bool(), beta=-1.0)
    with pytest.raises(ValueError, match=r"^undesirable_weight: "):
        kto(one, one, desirable=one.bool(), undesirable_weight=-0.1)
    with pytest.raises(ValueError, match=r"^desirable: expected shape \[2\]"):
        kto(two, two, desirable=one.bool())


def trl(name: str) -> Tensor:
    return torch.tensor(TRL[name], dtype=torch.float64)


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    chosen, rejected = values.chunk(2)
    return chosen, rejected


def test_dpo_ipo_and_simpo_are_those_of_trl() -> None:
    """The same log-probs through TRL's code, recorded by scripts/record_trl_losses.py."""
    chosen, rejected = pairs(trl("policy").sum(1))
    ref_chosen, ref_rejected = pairs(trl("reference").sum(1))
    reference = {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    long = dict(zip(("chosen_length", "rejected_length"), pairs(trl("mask").sum(1)), strict=True))
    beta, found = TRL["beta"], TRL["trl_losses"]
    assert float(dpo(chosen, rejected, **reference, beta=beta).mean()) == pytest.approx(
        found["sigmoid"], rel=1e-6
    )
    smoothed = dpo(chosen, rejected, **reference, beta=beta, label_smoothing=TRL["label_smoothing"])
    assert smoothed.tolist() == pytest.approx(found["smoothed"], rel=1e-6)
    by_token = ipo(chosen, rejected, **reference, **long, beta=beta)
    assert float(by_token.mean()) == pytest.approx(found["ipo"], rel=1e-6)
    simple = simpo(chosen, rejected, **long, beta=beta, gamma=TRL["gamma"])
    assert simple.tolist() == pytest.approx(found["simpo"], rel=1e-6)


def test_orpo_is_that_of_trl_and_the_likelihood_of_the_completion() -> None:
    chosen, rejected = pairs(trl("policy").sum(1))
    lengths = pairs(trl("mask").sum(1))
    loss = orpo(
        chosen, rejected, chosen_length=lengths[0], rejected_length=lengths[1], beta=TRL["beta"]
    )
    odds = loss + chosen / lengths[0]
    # TRL computes this one in float32.
    assert odds.tolist() == pytest.approx(TRL["trl_losses"]["orpo_odds"], rel=1e-6)


def test_kto_is_that_of_trl() -> None:
    strange = (trl("strange") - trl("strange_reference")).sum(1).mean().clamp_min(0.0)
    assert float(strange) > 0.1  # it says something
    loss = kto(
        trl("policy").sum(1),
        trl("reference").sum(1),
        desirable=torch.tensor(TRL["labels"]),
        divergence=strange,
        **{name: TRL[name] for name in ("beta", "desirable_weight", "undesirable_weight")},
    )
    assert float(loss.mean()) == pytest.approx(TRL["trl_losses"]["kto"], rel=1e-6)
