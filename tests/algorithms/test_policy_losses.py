"""Every policy loss, its gradient and what it reports, token by token against plain Python."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from algorithms.batches import chosen, close, moved, ready, refuses

from posttrain.algorithms.losses import (
    POLICY_LOSSES,
    cispo,
    clipped,
    dual_clip,
    geometric_mean,
    naive,
    penalised,
    sapo,
    sequence_clipped,
    unclipped,
)
from posttrain.algorithms.pieces import facts
from posttrain.types import Batch, Terms

RATIOS = (0.05, 0.5, 0.85, 0.97, 1.0, 1.05, 1.25, 2.0, 4.0, 9.0)
ADVANTAGES = (2.0, 0.4, -1.5, 0.0)
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in ADVANTAGES]
OLD = 0.1  # probability of the token under the old policy


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Loss of one token, its derivative by log π, and whether the loss has stopped it."""

    loss: float
    slope: float
    low: bool = False
    high: bool = False


def run(
    loss: Callable[..., Terms], cases: list[tuple[float, float]], **options: float
) -> tuple[Terms, torch.Tensor]:
    """Terms and gradient of one-token sequences with these ratios and advantages."""
    ratios, advantages = torch.tensor(cases, dtype=torch.float64).T
    old = torch.full((len(cases), 1), math.log(OLD), dtype=torch.float64)
    batch = Batch.from_rewards([0.0] * len(cases))
    batch = batch.replace(old_logprobs=old, advantages=advantages[:, None])
    logprobs = (old + ratios.log()[:, None]).requires_grad_()
    terms = loss(logprobs, batch, **options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    return terms, gradient


def surrogate(ratio: float, advantage: float, low: float, high: float) -> Expected:
    """PPO's clip: what stopped a token is the bound on the side its advantage pushes to."""
    if advantage > 0 and ratio > high:
        return Expected(loss=-high * advantage, slope=0.0, high=True)
    if advantage < 0 and ratio < low:
        return Expected(loss=-low * advantage, slope=0.0, low=True)
    return Expected(loss=-ratio * advantage, slope=-ratio * advantage)


def naive_token(ratio: float, advantage: float) -> Expected:
    return Expected(loss=-advantage * math.log(ratio * OLD), slope=-advantage)


def unclipped_token(ratio: float, advantage: float) -> Expected:
    return Expected(loss=-ratio * advantage, slope=-ratio * advantage)


def clipped_token(
    ratio: float, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Expected:
    return surrogate(ratio, advantage, 1 - clip_low, 1 + clip_high)


def dual_clip_token(
    ratio: float,
    advantage: float,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    floor: float = 3.0,
) -> Expected:
    if advantage < 0 and ratio > floor:
        return Expected(loss=-floor * advantage, slope=0.0, high=True)
    return surrogate(ratio, advantage, 1 - clip_low, 1 + clip_high)


def penalised_token(ratio: float, advantage: float, *, coefficient: float = 1.0) -> Expected:
    loss = -ratio * advantage + coefficient * (ratio - 1 - math.log(ratio))
    return Expected(loss=loss, slope=-ratio * advantage + coefficient * (ratio - 1))


def sequence_token(
    ratio: float, advantage: float, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Expected:
    return surrogate(ratio, advantage, 1 - clip_low, 1 + clip_high)


def geometric_token(
    ratio: float, advantage: float, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Expected:
    return surrogate(ratio, advantage, math.exp(-clip_low), math.exp(clip_high))


def cispo_token(
    ratio: float, advantage: float, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Expected:
    low, high = 1 - clip_low, 1 + clip_high
    weight = min(max(ratio, low), high)
    return Expected(
        loss=-weight * advantage * math.log(ratio * OLD),
        slope=-weight * advantage,
        low=ratio < low,
        high=ratio > high,
    )


def sapo_token(
    ratio: float,
    advantage: float,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Expected:
    temperature = temperature_positive if advantage > 0 else temperature_negative
    gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    loss = -4 / temperature * gate * advantage
    return Expected(loss=loss, slope=-4 * gate * (1 - gate) * ratio * advantage)


# The gradient of a divergence from a teacher is the divergence's own: see test_teacher.
OF_LOG_PROBS = {
    name: loss for name, loss in POLICY_LOSSES.items() if facts(loss).divergence is None
}
ORACLES: dict[Callable[..., Terms], Callable[..., Expected]] = {
    naive: naive_token,
    unclipped: unclipped_token,
    clipped: clipped_token,
    dual_clip: dual_clip_token,
    penalised: penalised_token,
    sequence_clipped: sequence_token,
    geometric_mean: geometric_token,
    cispo: cispo_token,
    sapo: sapo_token,
}
VARIANTS: list[tuple[Callable[..., Terms], dict[str, float]]] = [
    *((loss, {}) for loss in ORACLES),
    (clipped, {"clip_low": 0.1, "clip_high": 0.3}),
    (clipped, {"clip_low": 0.0, "clip_high": 0.0}),
    (clipped, {"clip_low": 1.0, "clip_high": 7.5}),
    (dual_clip, {"clip_low": 0.1, "clip_high": 0.3, "floor": 1.5}),
    (penalised, {"coefficient": 0.25}),
    (penalised, {"coefficient": 0.0}),
    (sequence_clipped, {"clip_low": 0.1, "clip_high": 0.3}),
    (geometric_mean, {"clip_low": 2.0, "clip_high": 0.1}),
    (geometric_mean, {"clip_low": 0.0, "clip_high": 0.0}),
    (cispo, {"clip_low": 0.3, "clip_high": 0.5}),
    (sapo, {"temperature_positive": 0.7, "temperature_negative": 2.0}),
]


def names(variant: object) -> str:
    return variant.__name__ if callable(variant) else str(variant)


def test_every_loss_of_the_table_has_an_oracle() -> None:
    by_the_batch = {name for name, loss in OF_LOG_PROBS.items() if facts(loss).whole_batch}
    assert by_the_batch == {"clip_cov", "kl_cov"}  # theirs are in test_covariance_losses
    assert set(ORACLES) == {OF_LOG_PROBS[name] for name in OF_LOG_PROBS.keys() - by_the_batch}


@pytest.mark.parametrize(("loss", "options"), VARIANTS, ids=names)
def test_loss_and_gradient_of_every_token(
    loss: Callable[..., Terms], options: dict[str, float]
) -> None:
    terms, gradient = run(loss, CASES, **options)
    expected = [ORACLES[loss](ratio, advantage, **options) for ratio, advantage in CASES]
    close(terms.loss.detach()[:, 0], [token.loss for token in expected], rtol=1e-11)
    close(gradient[:, 0], [token.slope for token in expected], rtol=1e-11)


@pytest.mark.parametrize(("loss", "options"), VARIANTS, ids=names)
def test_reports_of_every_token(loss: Callable[..., Terms], options: dict[str, float]) -> None:
    terms, _ = run(loss, CASES, **options)
    expected = [ORACLES[loss](ratio, advantage, **options) for ratio, advantage in CASES]
    ratios = [ratio for ratio, _ in CASES]
    reports = {
        "ratio": ratios,
        "ratio_squared": [ratio**2 for ratio in ratios],
        "approx_kl": [ratio - 1 - math.log(ratio) for ratio in ratios],
        "clip_low": [float(token.low) for token in expected],
        "clip_high": [float(token.high) for token in expected],
    }
    assert list(terms.means) == list(reports)
    for name, values in reports.items():
        close(terms.means[name][:, 0], values, rtol=1e-11)
        assert not terms.means[name].requires_grad
    assert list(terms.maxima) == ["ratio"]
    close(terms.maxima["ratio"][:, 0], ratios, rtol=1e-11)


def test_a_bound_that_is_reached_but_not_passed_stops_nothing() -> None:
    cases = [(1.0, 1.0), (1.0, -1.0)]
    for loss in (clipped, sequence_clipped, geometric_mean, cispo):
        terms, gradient = run(loss, cases, clip_low=0.0, clip_high=0.0)
        assert terms.means["clip_low"].tolist() == [[0.0], [0.0]]
        assert terms.means["clip_high"].tolist() == [[0.0], [0.0]]
        close(gradient[:, 0], [-1.0, 1.0])


def test_the_floor_of_the_dual_clip_stops_only_what_is_past_it() -> None:
    """Whatever rounding does to the ratio, its own value as the floor is reached, not passed."""
    terms, _ = run(unclipped, [(5.0, -1.0)])
    ratio = terms.means["ratio"].item()
    terms, gradient = run(dual_clip, [(5.0, -1.0)], floor=ratio)
    assert terms.means["clip_high"].item() == 0.0
    close(gradient, [[5.0]])


def test_a_policy_that_ran_away_stays_finite() -> None:
    away = [(math.exp(30.0), -1.0), (math.exp(-30.0), 1.0), (math.exp(25.0), 1.0)]
    terms, gradient = run(unclipped, away)
    close(terms.loss.detach()[:, 0], [math.exp(20.0), -math.exp(-20.0), -math.exp(20.0)])
    close(gradient, torch.zeros(3, 1), rtol=0)
    for loss in OF_LOG_PROBS.values():
        terms, _ = run(loss, away)
        close(terms.means["ratio"][:, 0], [math.exp(20.0), math.exp(-20.0), math.exp(20.0)])
        assert terms.loss.isfinite().all()


def test_naive_reports_no_ratio_without_an_old_policy() -> None:
    batch = Batch.from_rewards([1.0]).replace(advantages=torch.ones(1, 1))
    terms = naive(torch.tensor([[-2.0]]), batch)
    assert (terms.loss.item(), terms.means, terms.maxima) == (2.0, {}, {})


@pytest.mark.parametrize("loss", OF_LOG_PROBS.values(), ids=names)
def test_old_log_probs_and_advantages_are_constants(loss: Callable[..., Terms]) -> None:
    batch = ready()
    old, advantages = batch.need("old_logprobs"), batch.need("advantages")
    batch = batch.replace(
        old_logprobs=old.clone().requires_grad_(), advantages=advantages.clone().requires_grad_()
    )
    logprobs = moved(batch).detach().requires_grad_()
    loss(logprobs, batch).loss.sum().backward()
    assert batch.need("old_logprobs").grad is None
    assert batch.need("advantages").grad is None
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() > 1


@pytest.mark.parametrize("options", [{}, {"clip_low": 0.2, "clip_high": 0.1}])
def test_sequence_clipped_has_one_ratio_for_the_whole_sequence(options: dict[str, float]) -> None:
    batch = ready()
    logprobs = moved(batch).requires_grad_()
    terms = sequence_clipped(logprobs, batch, **options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    steps = (logprobs.detach() - batch.need("old_logprobs")).tolist()
    losses, slopes, ratios = torch.zeros(3, 12, 10, dtype=torch.float64)
    for row in range(12):
        columns = chosen(batch, row)
        if columns:
            ratio = math.exp(sum(steps[row][column] for column in columns) / len(columns))
        for column in columns:
            token = sequence_token(ratio, float(batch.need("advantages")[row, column]), **options)
            losses[row, column], slopes[row, column] = token.loss, token.slope
            ratios[row, column] = ratio
    close(terms.loss.detach(), losses)
    close(gradient, slopes)
    close(terms.means["ratio"], ratios)


@pytest.mark.parametrize("options", [{}, {"clip_low": 0.3, "clip_high": 0.1}])
def test_geometric_mean_of_the_clipped_ratios(options: dict[str, float]) -> None:
    """Token by token in plain Python: all tokens of a sequence have its value, and a stopped one
    has no gradient."""
    batch = ready()
    logprobs = moved(batch).requires_grad_()
    terms = geometric_mean(logprobs, batch, **options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    steps = (logprobs.detach() - batch.need("old_logprobs")).tolist()
    low, high = -options.get("clip_low", 0.4), options.get("clip_high", 0.4)
    losses, slopes, ratios = torch.zeros(3, 12, 10, dtype=torch.float64)
    lows, highs = torch.zeros(2, 12, 10, dtype=torch.float64)
    for row in range(12):
        columns, held = chosen(batch, row), {}
        for column in columns:
            step, advantage = steps[row][column], float(batch.need("advantages")[row, column])
            held[column] = min(step, high) if advantage > 0 else max(step, low)
            lows[row, column] = advantage < 0 and step < low
            highs[row, column] = advantage > 0 and step > high
        for column in columns:
            mean = math.exp(sum(held.values()) / len(columns))
            losses[row, column] = -mean * batch.need("advantages")[row, column]
            stopped = held[column] != steps[row][column]
            slopes[row, column] = 0.0 if stopped else losses[row, column]
            ratios[row, column] = math.exp(steps[row][column])
    assert lows.any()
    assert highs.any()
    close(terms.loss.detach(), losses)
    close(gradient, slopes)
    close(terms.means["ratio"], ratios)  # of the token itself
    close(terms.means["clip_low"], lows)
    close(terms.means["clip_high"], highs)


def test_geometric_mean_is_the_papers_sequence_objective() -> None:
    """With one advantage a sequence, averaged over its tokens: ``−A · (Π_t ρ_t)^(1/|o|)``.

    Moves of 0.2, 0.9 and −0.5 with A = 2: (0.2 + 0.4 − 0.5) / 3 = 1/30, so ℓ = −2 e^(1/30). Its
    derivative by a move is ℓ / 3, and 0 for the second, which is stopped at 0.4.
    """
    batch = Batch.from_rewards([2.0]).replace(
        tokens=torch.zeros(1, 3),
        mask=torch.ones(1, 3).bool(),
        advantages=torch.full((1, 3), 2.0, dtype=torch.float64),
        old_logprobs=torch.full((1, 3), -1.0, dtype=torch.float64),
    )
    logprobs = torch.tensor([[-0.8, -0.1, -1.5]], dtype=torch.float64).requires_grad_()
    loss = geometric_mean(logprobs, batch).loss.mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    close(loss.detach(), -2 * math.exp(1 / 30))
    close(loss.detach(), -2.0677902, rtol=1e-7)
    close(gradient, [[loss.item() / 3, 0.0, loss.item() / 3]])


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=names)
def test_log_probs_of_another_shape_are_refused(loss: Callable[..., Terms]) -> None:
    with refuses(
        "logprobs: expected shape [12, 10], got [12, 9]; every [B, T] tensor is indexed by the "
        "token it is about"
    ):
        loss(torch.zeros(12, 9), ready())
