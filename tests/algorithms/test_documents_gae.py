"""The source documents' numbers on critics and PPO's objective, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
vision notes: δ = 7.2 − 6.0 = +1.2                                     td_error_of_sunny
vision notes: K = 1, 3, 5 at λ = 0.9;  λ = 0, 0.5, 0.9, 1 at K = 4     steps_and_decay_table
vision notes: (K, λ) = (2, 0.3), (10, 0.95), (5, 0.9)                  steps_and_decay_table
vision notes: λ = 1 is pure Monte-Carlo (only if K reaches the end)    monte_carlo_needs
vision notes: δ = V' − V leaves out the reward (wrong at the end)      last_step_needs
vision notes: Monte-Carlo scores 9 and 3, TD estimates 7 and 4         complete_responses
vision notes: the critic says 4, the film gets 3; stop gradient        film_critic
vision notes: .backward() on a detached tensor leaves None (wrong)     stop_gradient
PPO & GRPO notes: r_T = 0.5, V_T = 0.3, V_{T−1} = 0.25                 overfitting_completion
PPO & GRPO notes: γ = 0.99, λ = 0.95, target = Â + V                   overfitting_completion
PPO & GRPO notes: advantages of mean 0 and variance 1                  normalised_advantages
PPO & GRPO notes: value loss ½ (V − R)² and (V − R)² (both)            value_loss
PPO & GRPO notes: c_V = 0.5, c_H = 0.01 in the combined objective      combined_objective
vision notes: L_clip + w₁ H − w₂ KL − w₃ L_critic                      four_term_objective
=====================================================================  ===========================
"""

import math

import pytest
import torch
from enumeration import close, numbers, printed

from posttrain.algorithms import advantages, kl, losses, objective, ops, weights
from posttrain.types import Batch

# "The weather today is" and then: sunny, and, warm, today, which, and one token more.
VALUES = [6.0, 7.2, 7.5, 8.3, 8.1, 8.6]
DELTAS = [1.2, 0.3, 0.8, -0.2, 0.5, 0.0]


def response(values: list[list[float]], token_rewards: list[list[float]]) -> Batch:
    """Responses with a critic's values and with rewards for each token."""
    mask = torch.ones(len(values), len(values[0]), dtype=torch.bool)
    return Batch(
        tokens=mask.long(),
        mask=mask,
        rewards=numbers(*[sum(row) for row in token_rewards]),
        values=numbers(*values),
        token_rewards=numbers(*token_rewards),
    )


def weather() -> Batch:
    """The example's response: the last token is scored 8.6, just as the critic foresaw."""
    return response([VALUES], [[0.0] * 5 + [8.6]])


def first(batch: Batch, **options: float) -> torch.Tensor:
    """The first token's advantage in each response, without discount or normalisation."""
    return advantages.gae(batch, normalise=False, **options).advantages[:, 0]


def test_td_error_of_sunny() -> None:
    batch = advantages.gae(weather(), lam=0.0, normalise=False)
    close(batch.advantages[0, 0], 7.2 - 6.0)
    close(batch.advantages, [DELTAS])


@pytest.mark.parametrize(
    ("steps", "lam", "advantage", "text"),
    [
        (1, 0.9, 1.2, "1.200"),
        (3, 0.9, 1.2 + 0.27 + 0.648, "2.118"),
        (5, 0.9, 1.2 + 0.27 + 0.648 - 0.1458 + 0.32805, "2.300"),
        (4, 0.0, 1.2, "1.200"),
        (4, 0.5, 1.2 + 0.15 + 0.2 - 0.025, "1.525"),
        (4, 0.9, 1.2 + 0.27 + 0.648 - 0.1458, "1.972"),
        (4, 1.0, 1.2 + 0.3 + 0.8 - 0.2, "2.100"),
        (2, 0.3, 1.2 + 0.09, "1.290"),
        (10, 0.95, 1.2 + 0.285 + 0.722 - 0.171475 + 0.407253125, "2.443"),
    ],
)
def test_steps_and_decay_table(steps: int, lam: float, *, advantage: float, text: str) -> None:
    found = first(weather(), steps=steps, lam=lam)
    close(found, [advantage])
    assert printed(found, 3) == [text]


def test_monte_carlo_needs_all_the_steps() -> None:
    """λ = 1: K = 4 still ends in the critic's 8.1; to the end it is the return minus V."""
    close(first(weather(), steps=4, lam=1.0), [8.1 - 6.0])
    scored_5 = response([VALUES], [[0.0] * 5 + [5.0]])
    close(first(scored_5, steps=4, lam=1.0), [2.1])  # the score has not been seen
    close(first(scored_5, lam=1.0), [5.0 - 6.0])


def test_last_step_needs_the_reward() -> None:
    """Without the reward term the return of every response would be 0."""
    silent = response([VALUES], [[0.0] * 6])
    close(first(silent, lam=1.0), [-6.0])
    close(first(weather(), lam=1.0), [8.6 - 6.0])


def test_complete_responses_vary_more_than_the_critics_estimates() -> None:
    """From V = 6: "sunny" is thought 7 and turns out 9, "terrible" is thought 4 and turns out 3."""
    batch = response([[6.0, 7.0], [6.0, 4.0]], [[0.0, 9.0], [0.0, 3.0]])
    monte_carlo, difference = first(batch, lam=1.0), first(batch, lam=0.0)
    close(monte_carlo, [3.0, -3.0])
    close(difference, [1.0, -2.0])
    both = torch.ones(2, dtype=torch.bool)
    close(ops.masked_variance(monte_carlo, both), 9.0)
    close(ops.masked_variance(difference, both), 2.25)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [(0.99, 0.95, [0.047 + 0.9405 * 0.2, 0.2]), (1.0, 0.95, [0.05 + 0.95 * 0.2, 0.2])],
)
def test_overfitting_completion(gamma: float, lam: float, *, expected: list[float]) -> None:
    """δ_{T−1} = γ 0.3 − 0.25 and δ_T = 0.5 − 0.3; the critic's targets are Â + V."""
    batch = response([[0.25, 0.3]], [[0.0, 0.5]])
    batch = advantages.gae(batch, gamma=gamma, lam=lam, normalise=False)
    close(batch.advantages, [expected])
    close(batch.returns, [[expected[0] + 0.25, 0.5]])


def test_normalised_advantages_have_mean_0_and_variance_1() -> None:
    """3, 2, −3, −1 have the mean ¼ and the variance 23/4 − 1/16; the critic's targets stay."""
    batch = response([[6.0, 7.0], [6.0, 4.0]], [[0.0, 9.0], [0.0, 3.0]])
    batch = advantages.gae(batch, lam=1.0)
    close(batch.advantages, numbers([2.75, 1.75], [-3.25, -1.25]) / math.sqrt(5.6875))
    close(ops.masked_mean(batch.advantages, batch.mask), 0.0)
    close(ops.masked_variance(batch.advantages, batch.mask), 1.0)
    close(batch.returns, [[9.0, 9.0], [3.0, 3.0]])


def test_film_critic_moves_towards_the_rating() -> None:
    """It said 4 stars, the film got 3: ½ (4 − 3)², slope +1, and the rating stays as it is."""
    said, rating = numbers([4.0]).requires_grad_(), numbers([3.0]).requires_grad_()
    loss = losses.squared(said, Batch.from_rewards([3.0]).replace(returns=rating)).loss
    close(loss, [[0.5]])
    slope, moved = torch.autograd.grad(loss.sum(), [said, rating], allow_unused=True)
    close(slope, [[1.0]])
    assert moved is None


def test_stop_gradient_example_raises() -> None:
    """Nothing in that loss asks for a gradient, so backward is an error, not a gradient of None."""
    x = numbers(1.0).requires_grad_()
    loss = (x * 2).detach() * 3
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.sum().backward()


def test_value_loss_is_half_the_square_so_a_coefficient_of_05_is_1_here() -> None:
    said = numbers([0.3]).requires_grad_()
    batch = Batch.from_rewards([0.0]).replace(returns=numbers([0.5]))
    loss = losses.squared(said, batch).loss
    close(loss, [[0.02]])  # ½ (0.3 − 0.5)² = 0.5 · (0.3 − 0.5)²
    close(torch.autograd.grad(loss.sum(), said)[0], [[-0.2]])


def overfitting_token() -> tuple[torch.Tensor, Batch]:
    """The token "overfitting": log π_old = −2.1, log π = −1.8, Â = 0.2; V = 0.3, target 0.5."""
    batch = Batch.from_rewards([0.5]).replace(
        advantages=numbers([0.2]), old_logprobs=numbers([-2.1]), returns=numbers([0.5])
    )
    return numbers([-1.8]), weights.token_mean(batch)


def test_combined_objective() -> None:
    """0.24 − 0.5 · (0.3 − 0.5)² + 0.01 · log 2, to be maximised: the loss is its negative."""
    logprobs, batch = overfitting_token()
    terms = losses.clipped(logprobs, batch)
    undecided = ops.entropy(numbers(0.5, 0.5).log())[None, None]
    terms = objective.with_entropy(terms, undecided, batch=batch, coefficient=0.01)
    critic = losses.squared(numbers([0.3]), batch)
    loss = weights.total(terms.loss + critic.loss, batch)
    close(-loss, 0.24 - 0.02 + 0.01 * math.log(2))
    assert printed(-loss, 4) == ["0.2269"]


def test_four_term_objective() -> None:
    """w₁ = 0.01 of the rigged coin's entropy, w₂ = 0.1 of a KL, w₃ = 0.5 of the squared error."""
    logprobs, batch = overfitting_token()
    batch = batch.replace(ref_logprobs=numbers([-2.3]))
    terms = losses.clipped(logprobs, batch)
    rigged = ops.entropy(numbers(0.99, 0.01).log())[None, None]
    terms = objective.with_entropy(terms, rigged, batch=batch, coefficient=0.01)
    terms = objective.with_kl(terms, logprobs, batch=batch, coefficient=0.1)
    loss = weights.total(terms.loss + losses.squared(numbers([0.3]), batch).loss, batch)
    divergence = math.exp(-0.5) + 0.5 - 1  # k3 with log π_ref − log π = −0.5
    close(kl.estimate(logprobs, batch.ref_logprobs), [[divergence]])
    entropy = -0.99 * math.log(0.99) - 0.01 * math.log(0.01)
    close(-loss, 0.24 + 0.01 * entropy - 0.1 * divergence - 0.02)
