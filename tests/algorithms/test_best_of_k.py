"""The advantage of pass@k: by hand, against every subset, against the gradient it stands for."""

import itertools
import math
import statistics

import pytest
import torch
from algorithms.batches import close, members, ragged, refuses
from enumeration import every_logprob, numbers, softmax_policy

from posttrain.algorithms.advantages import leave_one_out, pass_at_k, sequence_returns
from posttrain.types import Batch


def every_subset(rewards: list[float], k: int) -> list[float]:
    """``k · (mean of max over the sets of k that hold i − over those that do not)``, by listing."""
    sets = list(itertools.combinations(range(len(rewards)), k))

    def mean(hold: bool, own: int) -> float:
        return statistics.fmean(
            max(rewards[member] for member in each) for each in sets if (own in each) == hold
        )

    return [k * (mean(True, own) - mean(False, own)) for own in range(len(rewards))]


@pytest.mark.parametrize(
    ("rewards", "k", "expected"),
    [
        # Pairs of 0, 1, 3, 6 have the maxima 1, 3, 6, 3, 6, 6. With 0: (1 + 3 + 6) / 3, without:
        # (3 + 6 + 6) / 3. With 1: the same. With 3: (3 + 3 + 6) / 3, without: (1 + 6 + 6) / 3. With
        # 6: (6 + 6 + 6) / 3, without: (1 + 3 + 3) / 3. Each difference is doubled, for k = 2.
        ([0.0, 1.0, 3.0, 6.0], 2, [-10 / 3, -10 / 3, -2 / 3, 22 / 3]),
        ([6.0, 0.0, 3.0, 1.0], 2, [22 / 3, -10 / 3, -2 / 3, -10 / 3]),
        # One right of four. It passes with certainty, and the others without it never: k (1 − 0).
        # A wrong one passes with k = 2 if its one companion of three is the right one, 1/3; without
        # it two of three companions are drawn, 2/3. With k = 3: 2/3, and without it always.
        ([0.0, 1.0, 0.0, 0.0], 2, [-2 / 3, 2.0, -2 / 3, -2 / 3]),
        ([0.0, 1.0, 0.0, 0.0], 3, [-1.0, 3.0, -1.0, -1.0]),
        # Two right of four and k = 2: a right one passes, and without it 2 of the 3 pairs do; a
        # wrong one passes with 2 of its 3 companions, and without it all 3 pairs do.
        ([1.0, 0.0, 1.0, 0.0], 2, [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
        # Three right of four and k = 2: every pair has a right one, so nothing is left to learn.
        ([1.0, 1.0, 1.0, 0.0], 2, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_numbers_by_hand(rewards: list[float], k: int, expected: list[float]) -> None:
    made = pass_at_k(Batch.from_rewards(rewards), k=k).need("advantages")[:, 0]
    close(made, expected)
    assert every_subset(rewards, k) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_subset_of_every_k_agrees(size: int) -> None:
    """Real rewards, ties and negative ones; in a group of n, k goes from 1 to n − 1."""
    generator = torch.Generator().manual_seed(size)
    real = torch.randn(size, generator=generator, dtype=torch.float64).tolist()
    ties = [float(row % 3) - 1.0 for row in range(size)]
    for rewards, k in itertools.product((real, ties), range(1, size)):
        batch = Batch.from_rewards(rewards)
        close(pass_at_k(batch, k=k).need("advantages")[:, 0], every_subset(rewards, k))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_groups_of_several_sizes_in_any_order(k: int) -> None:
    """Broken scores leave groups of 6 and 5; a member of one changes nothing in the other."""
    larger = ragged().replace(groups=(ragged().need("groups") > 6).long())
    for batch in (larger, larger.replace(token_rewards=None)):
        returns = sequence_returns(batch).tolist()
        expected = torch.zeros(12, 10, dtype=torch.float64)
        for rows in members(batch):
            found = every_subset([returns[row] for row in rows], k)
            for row, value in zip(rows, found, strict=True):
                expected[row, batch.active[row]] = value
        close(pass_at_k(batch, k=k).need("advantages"), expected)


def test_by_default_four_are_drawn() -> None:
    batch = Batch.from_rewards([0.0, 1.0, 3.0, 6.0, 2.0, 5.0])
    close(pass_at_k(batch).need("advantages"), pass_at_k(batch, k=4).need("advantages"), rtol=0)


def test_one_drawn_is_leave_one_out() -> None:
    batch = ragged()
    close(pass_at_k(batch, k=1).need("advantages"), leave_one_out(batch).need("advantages"))


@pytest.mark.parametrize(("size", "k"), [(3, 1), (3, 2), (4, 2), (4, 3)])
def test_the_expected_update_is_the_gradient_of_the_best_of_k(size: int, k: int) -> None:
    """Every outcome of ``size`` draws from a policy of three actions, weighted by its probability.

    ``E[1/n Σ A_i ∇log π(a_i)] = ∇ E[max of k rewards]``, whatever the size of the group.
    """
    rewards, chances = [0.0, 1.0, 2.5], [0.5, 0.3, 0.2]
    logits = softmax_policy(chances)
    logprobs = every_logprob(logits)[:, 0]

    def chance(drawn: tuple[int, ...]) -> torch.Tensor:
        return logprobs[list(drawn)].sum().exp()

    best = sum(
        chance(drawn) * max(rewards[action] for action in drawn)
        for drawn in itertools.product(range(3), repeat=k)
    )
    (wanted,) = torch.autograd.grad(best, logits, retain_graph=True)
    found = numbers(0, 0, 0)
    for drawn in itertools.product(range(3), repeat=size):
        batch = Batch.from_rewards([rewards[action] for action in drawn])
        advantages = pass_at_k(batch, k=k).need("advantages")[:, 0]
        (score,) = torch.autograd.grad(
            (advantages * logprobs[list(drawn)]).sum() / size, logits, retain_graph=True
        )
        found = found + chance(drawn).detach() * score
    close(found, wanted)


def test_the_advantages_of_a_group_add_up_to_nothing() -> None:
    rewards = [0.1, 2.0, -3.0, 0.7, 5.0, 5.0, 1e3]
    for k in range(1, 7):
        total = pass_at_k(Batch.from_rewards(rewards), k=k).need("advantages").sum()
        assert abs(float(total)) < 1e-9


def test_equal_rewards_teach_exactly_nothing() -> None:
    for k in range(1, 7):
        made = pass_at_k(Batch.from_rewards([0.7] * 7), k=k).need("advantages")
        assert made.tolist() == [[0.0]] * 7


def test_a_large_group_loses_no_digits() -> None:
    """One right of 200, and k = 100: it is among the k in half of the sets that a wrong one is in.

    A wrong one passes with 99 of 199 companions drawn, 99/199; without it with 100 of 199.
    """
    rewards = [1.0] + [0.0] * 199
    made = pass_at_k(Batch.from_rewards(rewards), k=100).need("advantages")[:, 0]
    close(made[0], 100.0, rtol=1e-12)
    close(made[1:], [-100 / 199] * 199, rtol=1e-9)


def test_a_group_of_which_no_more_than_k_were_scored_has_nothing_to_compare() -> None:
    batch = Batch.from_rewards([1.0, 0.0, math.nan, 1.0, 0.0, 0.0], groups=[0, 0, 0, 1, 1, 1])
    batch = batch.replace(valid=torch.tensor([True, True, False, True, True, True]))
    made = pass_at_k(batch, k=2).need("advantages")[:, 0]
    close(made, [0.0, 0.0, 0.0, 2.0, -1.0, -1.0])


def test_a_group_of_k_and_a_k_of_nothing_are_refused() -> None:
    batch = Batch.from_rewards([1.0, 0.0, 0.5])
    with refuses(
        "groups: group 0 has 3 members, and 4 at least are compared; sample 4 or more completions "
        "for each prompt (rl.group_size in a recipe), or choose an advantage that compares with no "
        "other completion: return, constant_baseline, moving_baseline, greedy_baseline, "
        "batch_whitened, return_to_go, turn_return_to_go, gae, towards_teacher"
    ):
        pass_at_k(batch, k=3)
    pass_at_k(batch, k=2)
    with refuses("k: must be >= 1, got 0"):
        pass_at_k(batch, k=0)


def test_equal_rewards_below_zero_teach_nothing_beside_a_broken_one() -> None:
    """What stands in for the broken score is no anchor: against 0, rounding would be left over."""
    batch = Batch.from_rewards([-0.7] * 6 + [math.nan]).replace(valid=torch.arange(7) < 6)
    for k in range(1, 6):
        assert pass_at_k(batch, k=k).need("advantages").tolist() == [[0.0]] * 7
