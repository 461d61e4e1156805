"""The source documents' numbers on groups of completions, each computed by the library.

Both documents with a worked example divide by G (population); the code divides by G − 1 (sample).

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
guide: 1 1 0 1 0: mean 0.6, std 0.49, +0.82, −1.22 (population)        five_answers
guide: every token of an output gets that output's advantage           every_token
guide: 1 0 1 0: mean 0.5, std 0.5, ±1.0 (population)                   four_answers
PPO & GRPO notes: 1.0 0.8 0.4 0.2: mean 0.6, std 0.32 (population);    four_completions
  ±1.25 (of the rounded std; it is ±1.26), ±0.63
PPO & GRPO notes: the ranking defines the advantages (wrong)           ranking_alone
PPO & GRPO notes: normalisation bounds the advantages                  bounded_advantages
lecture 17, walk-through: δ = R, centred, normalised, max              deltas_of_the_sorting
walk-through: max_rewards, R − mean in the formula, R in the code      deltas_of_the_sorting
lecture 17: max over "the batch" (it is over the group)                maximum_of_each_prompt
lecture 17: all rewards 3.0, so centred δ = 0                          equal_rewards
lecture 17: normalised δ do not know the scale of the reward           scale
guide: formula 1/G Σ 1/|o| Σ, code .mean() over tokens (they differ)   averaging
=====================================================================  ===========================
"""

import math

import pytest
import torch
from enumeration import close, numbers, printed
from sorting_lists import inclusion_ordering

from posttrain.algorithms import advantages, losses, ops, weights
from posttrain.types import Batch

SORT_PROMPT = [3, 1, 0, 2]
SORT_RESPONSES = [[0, 1, 2, 3], [7, 2, 2, 5], [0, 3, 1, 2]]


def normalised(rewards: list[float], deviation: str) -> torch.Tensor:
    """GRPO's advantages [G], with no ε in the denominator."""
    batch = Batch.from_rewards(rewards)
    return advantages.group_normalised(batch, deviation=deviation, epsilon=0.0).advantages[:, 0]


def spread(rewards: list[float], deviation: str) -> float:
    """The standard deviation of one group."""
    values, group = numbers(*rewards), torch.zeros(len(rewards), dtype=torch.long)
    return float(ops.group_deviation(values, group, deviation=deviation)[0])


def test_five_answers() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0]
    right, wrong = math.sqrt(2 / 3), -math.sqrt(3 / 2)  # 0.4 / √0.24 and −0.6 / √0.24
    close(advantages.update_baseline(None, Batch.from_rewards(rewards)), 0.6)
    close(spread(rewards, "population"), math.sqrt(0.24))
    assert printed(spread(rewards, "population"), 2) == ["0.49"]
    found = normalised(rewards, "population")
    close(found, [right, right, wrong, right, wrong])
    assert printed(found, 2) == ["0.82", "0.82", "-1.22", "0.82", "-1.22"]
    sample = normalised(rewards, "sample")
    close(sample, math.sqrt(4 / 5) * found)
    assert printed(sample[1:3], 2) == ["0.73", "-1.10"]


def test_every_token_of_an_answer_gets_its_advantage() -> None:
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    batch = Batch(
        tokens=mask.long(), mask=mask, rewards=numbers(1.0, 0.0), groups=torch.tensor([0, 0])
    )
    found = advantages.group_normalised(batch, deviation="population", epsilon=0.0).advantages
    close(found, [[0, 1, 1, 1], [0, -1, 0, 0]])


def test_four_answers() -> None:
    rewards = [1.0, 0.0, 1.0, 0.0]
    close(advantages.update_baseline(None, Batch.from_rewards(rewards)), 0.5)
    close(spread(rewards, "population"), 0.5)
    close(normalised(rewards, "population"), [1.0, -1.0, 1.0, -1.0])
    close(spread(rewards, "sample"), math.sqrt(1 / 3))
    close(normalised(rewards, "sample"), math.sqrt(3 / 4) * numbers(1, -1, 1, -1))


def test_four_completions_are_normalised_to_126_not_125() -> None:
    rewards = [1.0, 0.8, 0.4, 0.2]
    close(advantages.update_baseline(None, Batch.from_rewards(rewards)), 0.6)
    close(spread(rewards, "population"), math.sqrt(0.1))  # (0.16 + 0.04 + 0.04 + 0.16) / 4
    assert printed(spread(rewards, "population"), 2) == ["0.32"]
    found = normalised(rewards, "population")
    close(found, [math.sqrt(1.6), math.sqrt(0.4), -math.sqrt(0.4), -math.sqrt(1.6)])
    assert printed(found, 2) == ["1.26", "0.63", "-0.63", "-1.26"]
    centred = advantages.group_centred(Batch.from_rewards(rewards)).advantages[:, 0]
    close(centred / 0.32, [1.25, 0.625, -0.625, -1.25])  # the print: of the rounded deviation
    assert printed(normalised(rewards, "sample")[:2], 2) == ["1.10", "0.55"]


def test_ranking_alone_does_not_make_the_advantage() -> None:
    """The same order as 1.0 0.8 0.4 0.2, but the second best is now below the mean of 0.4."""
    found = normalised([1.0, 0.3, 0.2, 0.1], "population")
    close(found, numbers(6, -1, -2, -3) / math.sqrt(12.5))
    assert printed(found, 2) == ["1.70", "-0.28", "-0.57", "-0.85"]


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_bounded_advantages(size: int) -> None:
    """The most one answer can get is √(G − 1): when it alone is right."""
    lonely = normalised([1.0] + [0.0] * (size - 1), "population")
    close(lonely[0], math.sqrt(size - 1))
    close(lonely[1:], [-1 / math.sqrt(size - 1)] * (size - 1))
    sample = normalised([1e6] + [0.0] * (size - 1), "sample")
    close(sample[0], (size - 1) / math.sqrt(size))


def test_deltas_of_the_sorting_responses() -> None:
    rewards = [inclusion_ordering(SORT_PROMPT, response) for response in SORT_RESPONSES]
    assert rewards == [7.0, 3.0, 6.0]
    batch = Batch.from_rewards(rewards)
    close(advantages.plain_return(batch).advantages[:, 0], [7, 3, 6])
    centred = [5 / 3, -7 / 3, 2 / 3]  # the mean is 16/3
    close(advantages.group_centred(batch).advantages[:, 0], centred)
    found = advantages.group_normalised(batch, deviation="sample", epsilon=1e-5)
    deviation = math.sqrt(13 / 3)  # (25 + 49 + 4) / 9 / 2
    close(found.advantages[:, 0], numbers(*centred) / (deviation + 1e-5))
    assert printed(found.advantages, 2) == ["0.80", "-1.12", "0.32"]
    close(advantages.max_only(batch).advantages[:, 0], [7, 0, 0])  # the code
    formula = advantages.max_only(batch, keeps="centred")
    close(formula.advantages[:, 0], [5 / 3, 0, 0])


def test_maximum_of_each_prompt_counts() -> None:
    batch = Batch.from_rewards([7.0, 3.0, 5.0, 4.0, 5.0], groups=[0, 0, 1, 1, 1])
    close(advantages.max_only(batch).advantages[:, 0], [7, 0, 5, 0, 5])  # and both of a tie


@pytest.mark.parametrize("deviation", ["sample", "population"])
def test_equal_rewards_of_three_teach_nothing(deviation: str) -> None:
    """Five answers to [1, 0, 2], none the same as another, and 3.0 points for each."""
    answers = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [1, 2, 1], [2, 1, 1]]
    rewards = [inclusion_ordering([1, 0, 2], answer) for answer in answers]
    assert rewards == [3.0] * 5
    batch = Batch.from_rewards(rewards)
    close(advantages.plain_return(batch).advantages[:, 0], [3.0] * 5)
    assert advantages.group_centred(batch).advantages.tolist() == [[0.0]] * 5
    assert normalised(rewards, deviation).tolist() == [0.0] * 5


def test_scale_and_offset_of_the_reward_do_not_matter_when_normalised() -> None:
    plain, scaled = [7.0, 3.0, 6.0], [170.0, 130.0, 160.0]
    close(normalised(scaled, "sample"), normalised(plain, "sample"))
    close(normalised(plain, "sample"), numbers(5, -7, 2) / math.sqrt(39))
    centred = advantages.group_centred(Batch.from_rewards(scaled)).advantages[:, 0]
    close(centred, [50 / 3, -70 / 3, 20 / 3])


def test_averaging_by_tokens_is_not_averaging_by_answers() -> None:
    """A right answer of two tokens, a wrong one of six: the formula says 0, the code −1/2."""
    mask = torch.arange(6)[None] < torch.tensor([[2], [6]])
    old = torch.full((2, 6), -1.0, dtype=torch.float64)
    batch = Batch(
        tokens=mask.long(),
        mask=mask,
        rewards=numbers(1.0, 0.0),
        groups=torch.tensor([0, 0]),
        old_logprobs=old,
    )
    batch = advantages.group_normalised(batch, deviation="population", epsilon=0.0)
    gain = -losses.clipped(old, batch).loss
    close(weights.total(gain, weights.sequence_mean(batch)), 0.0)  # 1/G Σ_i 1/|o_i| Σ_t
    close(weights.total(gain, weights.token_mean(batch)), (2 - 6) / 8)  # .mean(), with a mask
