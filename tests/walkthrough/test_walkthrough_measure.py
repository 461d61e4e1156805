"""What the walk-through measures: exact expectations by hand, gradient noise against theory."""

import torch

from posttrain.walkthrough.analysis import effect
from posttrain.walkthrough.measure import (
    entropy,
    expected,
    gradient_noise,
    likeliest,
    one_token_changes,
)
from posttrain.walkthrough.settings import LARGEST, REWARDS, Configuration, Schedule, prompts
from posttrain.walkthrough.sorting_policy import Policies, initial_policies


def uniform() -> Policies:
    """One lane that gives every response the probability 1/125: all its logits are 0."""
    return Policies(
        embedding=torch.zeros(1, 5, 10),
        encode=torch.zeros(1, 3, 10, 10),
        decode=torch.zeros(1, 3, 10, 10),
    )


def drawn(*seeds: int) -> Policies:
    return initial_policies([torch.Generator().manual_seed(seed) for seed in seeds])


def test_expected_reward_of_the_uniform_policy_by_hand():
    # Inclusion: each of 3 tokens is among 3 uniform draws with probability 1 − (4/5)³ = 0.488.
    # Ordering: each of 2 pairs of uniform draws is in order with probability 15/25 = 0.6.
    by_hand = {
        "inclusion_ordering": 3 * 0.488 + 2 * 0.6,
        "position_matches": 3 / 5,
        "exactly_sorted": 1 / 125,
    }
    for name, value in by_hand.items():
        result = expected(uniform(), REWARDS[name])
        torch.testing.assert_close(result, torch.tensor([value]), rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy(uniform()), torch.tensor([5.0]).log())


def test_the_largest_rewards_are_those_of_the_sorted_prompt():
    answers = prompts().sort(-1).values.unsqueeze(1)
    for name, largest in LARGEST.items():
        assert REWARDS[name](prompts(), answers).unique().tolist() == [largest]


def test_the_likeliest_response_has_the_largest_probability():
    policies = drawn(0, 1)
    best = policies.logprobs(prompts(), likeliest(policies))
    samples = torch.randint(5, (2, 3, 50, 3))
    assert (best >= policies.logprobs(prompts(), samples)).all()


def test_the_mean_gradient_is_that_of_the_expected_reward():
    """E[g] = (1 − 1/G) / N · ∇E[R]: centring by a mean that holds R itself costs 1/G of it."""
    policies = drawn(3)
    responses = torch.cartesian_prod(*[torch.arange(5)] * 3).expand(1, 3, -1, -1)
    probabilities = policies.logprobs(prompts(), responses).sum(-1).exp()
    value = (probabilities * REWARDS["inclusion_ordering"](prompts(), responses)).sum(-1).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, policies.parameters())])
    for delta, factor in (("rewards", 1 / 3), ("centered", 0.9 / 3)):
        noise = gradient_noise(policies, Configuration(delta=delta), seeds=[3], num_batches=4000)
        exact = (factor * gradient).square().sum()
        assert abs(noise.signal.item() / exact.item() - 1) < 0.05


def test_the_noise_falls_with_the_number_of_responses_and_with_centring():
    policies, configuration = drawn(0, 1, 2), Configuration(delta="rewards")
    few, many, centred = (
        gradient_noise(
            policies,
            each,
            seeds=[0, 1, 2],
            num_batches=3000,
            schedule=Schedule(num_responses=num_responses),
        )
        for each, num_responses in (
            (configuration, 10),
            (configuration, 20),
            (Configuration(delta="centered"), 10),
        )
    )
    torch.testing.assert_close(few.noise / many.noise, torch.full((3,), 2.0), rtol=0.06, atol=0)
    assert centred.ratio() < few.ratio() / 4


def test_the_three_losses_have_one_gradient_at_the_first_step():
    ratios = [
        gradient_noise(
            drawn(7), Configuration(delta="centered", loss=loss), seeds=[7], num_batches=50
        )
        for loss in ("naive", "unclipped", "clipped")
    ]
    for other in ratios[1:]:
        torch.testing.assert_close(other.noise, ratios[0].noise)
        torch.testing.assert_close(other.signal, ratios[0].signal)


def test_no_gradient_is_no_ratio():
    configuration = Configuration(delta="centered", reward="exactly_sorted")
    policies = uniform()
    policies.embedding[0, 4, 0] = 1.0  # still no gradient: every product with a zero matrix is 0
    assert gradient_noise(policies, configuration, seeds=[0], num_batches=8).ratio() is None


def test_effect_pairs_runs_of_one_seed_and_averages_over_the_rest():
    base = {"kl": "off", "reward": "exactly_sorted"}
    rows = [
        {**base, "delta": "rewards", "loss": "naive", "final_rewards": [1.0, 2.0]},
        {**base, "delta": "centered", "loss": "naive", "final_rewards": [2.0, 4.0]},
        {**base, "delta": "rewards", "loss": "clipped", "final_rewards": [0.0, 0.0]},
        {**base, "delta": "centered", "loss": "clipped", "final_rewards": [1.0, 4.0]},
    ]
    choice = ("", "delta", "centered", "rewards")
    # Seed 0 gains (1 + 1) / 2 = 1, seed 1 gains (2 + 4) / 2 = 3: mean 2, standard error √2 / √2.
    mean, error = effect(rows, choice, reward="exactly_sorted")
    assert mean == 2.0
    assert abs(error - 1.0) < 1e-12
    assert effect(rows, choice, reward="position_matches") is None


def test_partial_credit_has_traps_and_position_matches_has_none():
    """The 125 responses to [1, 0, 2]: from 16 of them no change of one token earns more."""
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    traps = {}
    for name in ("inclusion_ordering", "position_matches"):
        responses = every[:, None, None, :].expand(-1, 3, -1, -1)  # each response, to each prompt
        earned = REWARDS[name](prompts(), responses)[..., 0]
        nearby = REWARDS[name](prompts(), one_token_changes(responses)).amax(-1)
        traps[name] = ((earned < LARGEST[name]) & (nearby <= earned)).sum(0).tolist()
    assert traps == {"inclusion_ordering": [16, 16, 15], "position_matches": [0, 0, 0]}
