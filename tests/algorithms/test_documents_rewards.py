"""The source documents' numbers on rewards and preferences, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
walk-through: sort_distance_reward of three responses: 4, 1, 1         position_matches
walk-through: sort_inclusion_ordering_reward: 7, 3, 6                  inclusion_ordering
walk-through: "more credit to the 3rd response"                        third_response
lecture 17: [3, 1, 0, 2] scores 1, "only 2 is in place" (1 is)         prompt_as_response
lecture 17: [3, 1, 0, 2] scores 3 + 0 = 3 (wrong: 4 + 1 = 5)           prompt_as_response
lecture 17: the exact reward is sparse: 1 or 0                         exact_match
lecture 17: the dense reward has a comfortable wrong answer            constant_answers
PPO & GRPO and vision notes: P = e^a / (e^a + e^b) = σ(a − b)          bradley_terry
=====================================================================  ===========================
"""

import math

import pytest
import torch
from enumeration import close, numbers
from sorting_lists import exactly_sorted, inclusion_ordering, position_matches

from posttrain.algorithms import losses

PROMPT = [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("response", "reward"), [([0, 1, 2, 3], 4.0), ([7, 2, 2, 5], 1.0), ([0, 3, 1, 2], 1.0)]
)
def test_position_matches_of_the_three_responses(response: list[int], reward: float) -> None:
    assert position_matches(PROMPT, response) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [([0, 1, 2, 3], 4 + 3), ([7, 2, 2, 5], 1 + 2), ([0, 3, 1, 2], 4 + 2)],
)
def test_inclusion_ordering_of_the_three_responses(response: list[int], reward: float) -> None:
    assert inclusion_ordering(PROMPT, response) == reward


def test_third_response_gets_more_credit_from_the_second_reward() -> None:
    response, best = [0, 3, 1, 2], sorted(PROMPT)
    assert position_matches(PROMPT, response) / position_matches(PROMPT, best) == 1 / 4
    assert inclusion_ordering(PROMPT, response) / inclusion_ordering(PROMPT, best) == 6 / 7


def test_prompt_as_response_scores_one_and_five() -> None:
    """[3, 1, 0, 2] against [0, 1, 2, 3]: the 1 is in place; 4 are there and 0 ≤ 2 is in order."""
    assert position_matches(PROMPT, PROMPT) == 1.0
    assert position_matches(PROMPT, [9, 1, 9, 9]) == 1.0  # so it was the 1 ...
    assert position_matches(PROMPT, [9, 9, 9, 2]) == 0.0  # ... and not the 2
    assert inclusion_ordering(PROMPT, PROMPT) == 4 + 1


def test_exact_match_is_sparse() -> None:
    responses = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]]
    assert [exactly_sorted([1, 0, 2], response) for response in responses] == [1, 0, 0, 0]


@pytest.mark.parametrize("answer", [0, 1, 2])
def test_constant_answers_earn_three_of_five(answer: int) -> None:
    """A single number, repeated: one token included, two pairs in order, nothing sorted."""
    assert inclusion_ordering([1, 0, 2], [answer] * 3) == 3.0
    assert inclusion_ordering([1, 0, 2], [0, 1, 2]) == 5.0
    assert exactly_sorted([1, 0, 2], [answer] * 3) == 0.0


@pytest.mark.parametrize(
    ("preferred", "other", "probability"),
    [
        pytest.param(math.log(3), 0.0, 3 / 4, id="odds of 3 to 1"),
        pytest.param(0.8, 0.5, 1 / (1 + math.exp(-0.3)), id="σ of the difference"),
        pytest.param(0.5, 0.5, 1 / 2, id="a tie"),
        pytest.param(0.0, math.log(3), 1 / 4, id="the other way round"),
    ],
)
def test_bradley_terry_probability(preferred: float, other: float, *, probability: float) -> None:
    loss = losses.bradley_terry(numbers(preferred), numbers(other))
    close(loss, [-math.log(probability)])
    close(loss, -torch.log_softmax(numbers(preferred, other), dim=0)[:1])  # e^a / (e^a + e^b)
    reverse = losses.bradley_terry(numbers(other), numbers(preferred))
    close((-loss).exp() + (-reverse).exp(), [1.0])
