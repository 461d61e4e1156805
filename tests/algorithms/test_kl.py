"""Divergence: estimators by hand and by enumeration, and the coefficient that steers it."""

import math
from collections.abc import Callable

import pytest
import torch
from algorithms.batches import close, refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses import penalised
from posttrain.algorithms.objective import with_kl
from posttrain.types import Batch, Terms

INF = math.inf
LOGITS = torch.tensor([0.3, -1.0, 1.4, 0.0], dtype=torch.float64)
OTHER = torch.tensor([1.0, 0.2, -0.5, 0.1], dtype=torch.float64)


def float64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(softmax first ‖ softmax second), from its definition."""
    p, q = torch.softmax(first, -1), torch.softmax(second, -1)
    return (p * (p / q).log()).sum()


def gradient(value: Tensor, parameters: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(value, parameters)
    return result


# With π = 1/2: π_ref = 1/4 gives d = −log 2; π_ref = 1 gives d = log 2; π_ref = π gives d = 0.
LOG2 = math.log(2.0)
TABLE = {
    ("k1", "reverse"): [LOG2, -LOG2, 0.0],
    ("k2", "reverse"): [LOG2**2 / 2, LOG2**2 / 2, 0.0],
    ("k3", "reverse"): [0.5 + LOG2 - 1, 2 - LOG2 - 1, 0.0],
    ("k1", "forward"): [-LOG2 / 2, 2 * LOG2, 0.0],
    ("k2", "forward"): [LOG2**2 / 2, LOG2**2 / 2, 0.0],
    ("k3", "forward"): [-LOG2 / 2 - 0.5 + 1, 2 * LOG2 - 2 + 1, 0.0],
}


@pytest.mark.parametrize(("estimator", "direction"), TABLE)
def test_estimators_by_hand(estimator: kl.Estimator, direction: kl.Direction) -> None:
    half, ref = float64([0.5] * 3).log(), float64([0.25, 1.0, 0.5]).log()
    found = kl.estimate(half, ref, estimator=estimator, direction=direction)
    close(found, TABLE[estimator, direction])


def test_the_estimate_is_the_reverse_k3_unless_told() -> None:
    half, ref = float64([0.5]).log(), float64([0.25]).log()
    close(kl.estimate(half, ref), TABLE["k3", "reverse"][:1])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: kl.Estimator, direction: kl.Direction) -> None:
    policy, ref = torch.log_softmax(LOGITS, -1), torch.log_softmax(OTHER, -1)
    each = kl.estimate(policy, ref, estimator=estimator, direction=direction)
    pair = (LOGITS, OTHER) if direction == "reverse" else (OTHER, LOGITS)
    close((policy.exp() * each).sum(), divergence(*pair))


def test_k2_is_biased() -> None:
    policy, ref = torch.log_softmax(LOGITS, -1), torch.log_softmax(OTHER, -1)
    mean = (policy.exp() * kl.estimate(policy, ref, estimator="k2")).sum()
    assert abs(mean - divergence(LOGITS, OTHER)) > 0.01


def expected_gradient(estimator: kl.Estimator, **options: object) -> Tensor:
    """``E_π[∇ penalty]``: the gradient that a loss gets, as tokens are drawn from π held still."""
    return drawn_gradient(LOGITS, estimator, **options)


def drawn_gradient(old: Tensor, estimator: kl.Estimator, **options: object) -> Tensor:
    """The same with tokens drawn from ``old``: every token of the vocabulary, by its probability.

    Each token is a sequence of its own in the batch, and the whole objective is asked.
    """
    logits = LOGITS.clone().requires_grad_()
    sampled = torch.log_softmax(old, -1)
    batch = Batch.from_rewards([0.0] * 4).replace(
        old_logprobs=sampled[:, None], ref_logprobs=torch.log_softmax(OTHER, -1)[:, None]
    )
    nothing = Terms(loss=torch.zeros(4, 1, dtype=torch.float64))
    policy = torch.log_softmax(logits, -1)[:, None]
    terms = with_kl(nothing, policy, batch=batch, coefficient=1.0, estimator=estimator, **options)
    return gradient((sampled.exp() * terms.loss[:, 0]).sum(), logits)


def squares(under: str) -> Callable[[Tensor], Tensor]:
    """``½ E[d²]`` with tokens drawn from π or from the reference, as a function of π's logits."""

    def value(logits: Tensor) -> Tensor:
        policy, ref = torch.log_softmax(logits, -1), torch.log_softmax(OTHER, -1)
        return ((policy if under == "π" else ref).exp() * (ref - policy).square()).sum() / 2

    return value


def reverse(logits: Tensor) -> Tensor:
    return divergence(logits, OTHER)


def forward(logits: Tensor) -> Tensor:
    return divergence(OTHER, logits)


WHOSE: dict[str, Callable[[Tensor], Tensor]] = {
    "0: noise alone": lambda logits: 0.0 * logits.sum(),
    "∇ KL(π ‖ π_ref)": reverse,
    "∇ KL(π_ref ‖ π)": forward,
    "∇ ½ E_π[d²]": squares("π"),
    "∇ ½ E_ref[d²]": squares("ref"),
    "∇ {KL(π_ref ‖ π) + ½ E_ref[d²]}": lambda logits: forward(logits) + squares("ref")(logits),
}


def test_the_gradients_that_are_told_apart_differ() -> None:
    logits = LOGITS.clone().requires_grad_()
    found = [gradient(value(logits), logits) for value in WHOSE.values()]
    for place, one in enumerate(found):
        assert all(float((one - other).norm()) > 0.1 for other in found[:place])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("estimator", "direction"), kl.GRADIENTS)
def test_every_gradient_is_what_explain_says(
    estimator: kl.Estimator, direction: kl.Direction, weighted: bool
) -> None:
    """Plain: on-policy. Weighted by ρ: the same where the tokens come from another policy."""
    said = kl.GRADIENTS[estimator, direction][weighted]
    logits = LOGITS.clone().requires_grad_()
    wanted = gradient(WHOSE[said](logits), logits)
    options = {"direction": direction, "weighted": weighted}
    close(expected_gradient(estimator, **options), wanted)
    stale = LOGITS + float64([0.5, -0.2, 0.0, 0.3])
    elsewhere = drawn_gradient(stale, estimator, **options)
    if weighted:
        close(elsewhere, wanted)
    else:
        assert float((elsewhere - wanted).norm()) > 0.01


def test_every_estimator_and_direction_has_its_gradient() -> None:
    assert set(kl.GRADIENTS) == set(TABLE)


def test_as_a_loss_k1_has_no_gradient_at_all() -> None:
    close(expected_gradient("k1"), torch.zeros(4))


def test_as_a_loss_k2_has_the_gradient_of_the_reverse_divergence() -> None:
    logits = LOGITS.clone().requires_grad_()
    close(expected_gradient("k2"), gradient(divergence(logits, OTHER), logits))


def test_as_a_loss_k3_has_the_gradient_of_the_forward_divergence() -> None:
    logits = LOGITS.clone().requires_grad_()
    close(expected_gradient("k3"), gradient(divergence(OTHER, logits), logits))


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_the_penalty_is_unbiased_under_the_old_policy(coefficient: float) -> None:
    old, logits = torch.log_softmax(OTHER, -1), LOGITS.clone().requires_grad_()
    batch = Batch.from_rewards([0.0] * 4)
    batch = batch.replace(old_logprobs=old[:, None], advantages=torch.zeros(4, 1).double())
    logprobs = torch.log_softmax(logits, -1)[:, None]
    each = penalised(logprobs, batch, coefficient=coefficient).loss[:, 0]
    mean = (old.exp() * each).sum()
    again = LOGITS.clone().requires_grad_()
    wanted = coefficient * divergence(OTHER, again)
    close(mean.detach(), wanted.detach())
    close(gradient(mean, logits), gradient(wanted, again))


@settings(derandomize=True, database=None, max_examples=100, deadline=None)
@given(st.integers(-300, 1), st.floats(1.0, 9.9), st.booleans())
def test_k3_is_never_negative(exponent: int, mantissa: float, negative: bool) -> None:
    difference = float64([(-mantissa if negative else mantissa) * 10.0**exponent])
    for direction in ("reverse", "forward"):
        found = kl.estimate(torch.zeros(1).double(), difference, direction=direction)
        assert found.item() >= 0
        if abs(difference.item()) < 1e-3:  # d²/2 to leading order
            rounding = abs(difference.item()) * 1e-15
            square = difference.item() ** 2 / 2
            assert found.item() == pytest.approx(square, rel=1e-3, abs=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [-60.0, -90.0, -800.0, -INF])
def test_forward_estimates_reach_their_limits(step: float, dtype: torch.dtype) -> None:
    zero, ref = torch.zeros(1, dtype=dtype), torch.tensor([step], dtype=dtype)
    found = kl.estimate(zero, ref, direction="forward").item()
    assert found == pytest.approx(1.0, rel=1e-6)
    found = kl.estimate(zero, ref, estimator="k1", direction="forward").item()
    assert found == pytest.approx(0.0, abs=1e-18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [50.0, 90.0, 800.0, INF])
def test_a_token_the_policy_has_abandoned_costs_much_but_not_infinity(
    step: float, dtype: torch.dtype
) -> None:
    policy, zero = torch.tensor([-step], dtype=dtype).requires_grad_(), torch.zeros(1, dtype=dtype)
    held = math.exp(50.0)
    for direction, estimator, value in [
        ("reverse", "k3", held - 51.0),
        ("forward", "k1", 50.0 * held),
        ("forward", "k3", 50.0 * held - held + 1.0),
    ]:
        found = kl.estimate(policy, zero, estimator=estimator, direction=direction)
        assert found.item() == pytest.approx(value, rel=1e-5)
        assert gradient(found.sum(), policy).isfinite().all()
    assert kl.estimate(policy, zero, estimator="k1").item() == -step


def test_a_token_the_reference_cannot_emit_is_infinitely_far() -> None:
    zero, never = torch.zeros(1), torch.tensor([-INF])
    for estimator in ("k1", "k2", "k3"):
        assert kl.estimate(zero, never, estimator=estimator).item() == INF


def test_exact_divergence_by_hand_both_ways() -> None:
    p, q = [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]
    policy, ref = float64([p, q]).log() + 7.0, float64([q, q]).log() - 3.0
    there = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    back = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    close(kl.exact(policy, ref), [there, 0.0])
    close(kl.exact(policy, ref, direction="reverse"), [there, 0.0])
    close(kl.exact(policy, ref, direction="forward"), [back, 0.0])


def test_exact_divergence_where_tokens_are_impossible() -> None:
    logits = float64([0.0, 0.0, -INF]).requires_grad_()
    found = kl.exact(logits, float64([0.0, 0.0, 0.0]))
    close(found.detach(), math.log(1.5))
    close(gradient(found, logits), [0.0, 0.0, 0.0])
    assert kl.exact(torch.zeros(3), torch.tensor([0.0, 0.0, -INF])).item() == INF
    both = float64([0.0, -INF])
    assert kl.exact(both, both).item() == 0.0
    assert kl.exact(float64([0.0, -900.0]), both).item() == 0.0  # underflows, so cannot be drawn


def test_a_fixed_coefficient_stays() -> None:
    coefficient = Coefficient(value=0.1)
    assert (coefficient.rule, coefficient.target, coefficient.horizon) == ("fixed", None, 10_000)
    assert coefficient.update(5.0) is coefficient
    assert Coefficient(value=0.0).update(math.nan).value == 0.0


@pytest.mark.parametrize(
    ("divergence", "factor"),
    [(0.3001, 2.0), (0.3, 1.0), (0.2, 1.0), (0.1334, 1.0), (0.1333, 0.5), (-1.0, 0.5)],
)
def test_doubling_acts_outside_a_factor_of_one_and_a_half(divergence: float, factor: float) -> None:
    coefficient = Coefficient(value=0.4, rule="doubling", target=0.2, horizon=5)
    after = coefficient.update(divergence)
    assert after == Coefficient(value=0.4 * factor, rule="doubling", target=0.2, horizon=5)


@pytest.mark.parametrize("divergence", [1.5 * 0.2, 0.2 / 1.5])
def test_doubling_leaves_a_divergence_on_the_bound_alone(divergence: float) -> None:
    coefficient = Coefficient(value=0.4, rule="doubling", target=0.2)
    assert coefficient.update(divergence) == coefficient


@pytest.mark.parametrize(
    ("divergence", "error"), [(0.2, 0.0), (0.22, 0.1), (0.18, -0.1), (9.0, 0.2), (-9.0, -0.2)]
)
@pytest.mark.parametrize(("num_sequences", "share"), [(1, 0.01), (25, 0.25), (100, 1), (999, 1)])
def test_proportional_moves_by_the_clipped_error(
    divergence: float, error: float, num_sequences: int, share: float
) -> None:
    coefficient = Coefficient(value=0.4, rule="proportional", target=0.2, horizon=100)
    after = coefficient.update(divergence, num_sequences=num_sequences)
    assert after.value == pytest.approx(0.4 * (1 + error * share), rel=1e-12)


def test_proportional_counts_one_sequence_unless_told() -> None:
    coefficient = Coefficient(value=1.0, rule="proportional", target=0.2)
    assert coefficient.update(9.0).value == pytest.approx(1 + 0.2 / 10_000, rel=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": -0.1}, "value: must be >= 0, got -0.1"),
        ({"value": math.nan}, "value: must be >= 0, got nan"),
        ({"value": 1.0, "horizon": 0}, "horizon: must be >= 1, got 0"),
        (
            {"value": 1.0, "rule": "double"},
            "rule: unknown 'double'; choose one of fixed, proportional, doubling",
        ),
        (
            {"value": 1.0, "target": 0.1},
            "target: a fixed coefficient ignores it; set rule or drop target",
        ),
        (
            {"value": 1.0, "rule": "doubling"},
            "target: rule 'doubling' needs the KL to steer to, in nats",
        ),
        (
            {"value": 1.0, "rule": "proportional", "target": 0.0},
            "target: must be > 0, got 0.0",
        ),
        ({"value": 0.0, "rule": "doubling", "target": 0.1}, "value: must be > 0, got 0.0"),
    ],
)
def test_impossible_coefficients_are_refused(options: dict[str, object], message: str) -> None:
    with refuses(message):
        Coefficient(**options)


def test_a_coefficient_is_not_steered_by_nonsense() -> None:
    coefficient = Coefficient(value=0.4, rule="doubling", target=0.2)
    with refuses("kl: must be finite, got nan"):
        coefficient.update(math.nan)
    with refuses("num_sequences: must be >= 0, got -1"):
        coefficient.update(0.2, num_sequences=-1)
    assert coefficient.update(0.2, num_sequences=0) == coefficient


def test_names_and_shapes_of_divergences_are_checked() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    shape = "expected shape [1], got [2]; every [B, T] tensor is indexed by the token it is about"
    with refuses("estimator: unknown 'k4'; choose one of k1, k2, k3"):
        kl.estimate(one, one, estimator="k4")
    with refuses("direction: unknown 'back'; choose one of reverse, forward"):
        kl.estimate(one, one, direction="back")
    with refuses(f"ref_logprobs: {shape}"):
        kl.estimate(one, two)
    with refuses("direction: unknown 'back'; choose one of reverse, forward"):
        kl.exact(one, one, direction="back")
    with refuses(f"ref_logits: {shape}"):
        kl.exact(one, two)
