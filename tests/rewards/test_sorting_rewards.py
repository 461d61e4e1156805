"""The sorting rewards: worked by hand, and tensor twins equal on every possible response."""

import itertools
from operator import eq

import pytest
import sorting_lists
import torch

from posttrain.walkthrough import sorting_rewards


def _credit(prompt: list[int], response: list[int]) -> int:
    included = sum(token in response for token in prompt)
    return included + sum(x <= y for x, y in itertools.pairwise(response))


TWINS = [
    (lambda x, y: sum(map(eq, sorted(x), y)), sorting_rewards.position_matches),
    (_credit, sorting_rewards.inclusion_ordering),
    (lambda x, y: y == sorted(x), sorting_rewards.exactly_sorted),
]
PROMPTS = [[1, 0, 2], [3, 2, 4], [1, 2, 3], [2, 2, 0]]  # the last has a token twice


@pytest.mark.parametrize(
    ("response", "matches", "credit"),
    [
        ([0, 1, 2, 3], 4.0, 7.0),  # sorted: 4 positions; 4 tokens + 3 pairs
        ([7, 2, 2, 5], 1.0, 3.0),  # the second 2 is in place; the 2 occurs, 2 ≤ 2 and 2 ≤ 5
        ([0, 3, 1, 2], 1.0, 6.0),  # the 0 is in place; 4 tokens, 0 ≤ 3 and 1 ≤ 2
        ([3, 2, 1, 0], 0.0, 4.0),  # reversed: all tokens, no pair in order
        ([9, 8, 7, 6], 0.0, 0.0),
    ],
)
def test_worked_by_hand(response, matches, credit):
    prompt = [3, 1, 0, 2]
    assert sorting_lists.position_matches(prompt, response) == matches
    assert sorting_lists.inclusion_ordering(prompt, response) == credit
    assert sorting_lists.exactly_sorted(prompt, response) == float(response == [0, 1, 2, 3])


def test_a_token_twice_in_the_prompt_earns_twice_and_twice_in_the_response_once():
    assert sorting_lists.inclusion_ordering([2, 2, 0], [2, 1, 1]) == 2 + 1
    assert sorting_lists.inclusion_ordering([2, 1, 0], [2, 2, 2]) == 1 + 2


@pytest.mark.parametrize(("plain", "batched"), TWINS)
def test_tensors_agree_on_every_response(plain, batched):
    responses = list(itertools.product(range(5), repeat=3))
    tensor = torch.tensor(responses).expand(2, len(PROMPTS), -1, -1)  # [2, P, 125, 3]
    expected = torch.tensor(
        [[float(plain(prompt, list(y))) for y in responses] for prompt in PROMPTS]
    )
    assert torch.equal(batched(torch.tensor(PROMPTS), tensor), expected.expand(2, -1, -1))


@pytest.mark.parametrize("batched", [batched for _, batched in TWINS])
def test_lengths_must_agree(batched):
    with pytest.raises(ValueError, match=r"expected shape \[..., P, G, N\]"):
        batched(torch.tensor([[1, 0, 2]]), torch.zeros(1, 4, 2, dtype=torch.long))
