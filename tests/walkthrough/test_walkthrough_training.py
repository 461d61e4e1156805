"""The walk-through trains as it says: lanes apart, equal rewards silent, the lecture's digits."""

import pytest
import torch

from posttrain.algorithms import kl
from posttrain.types import Batch
from posttrain.walkthrough.measure import expected
from posttrain.walkthrough.published import EPOCHS, PUBLISHED, rerun
from posttrain.walkthrough.settings import DELTAS, REWARDS, Configuration, Schedule, prompts
from posttrain.walkthrough.training import History, Moment, train

SHORT = Schedule(num_epochs=12)


def equal(first: History, second: History, *, lanes: tuple[int, int]) -> bool:
    """Whether two lanes went the same way, to the last bit."""
    one, other = lanes
    pairs = [
        *zip(first.final.parameters(), second.final.parameters(), strict=True),
        (first.rewards, second.rewards),
        (first.losses, second.losses),
    ]
    return all(torch.equal(a[one], b[other]) for a, b in pairs)


def test_the_lectures_runs_come_out_digit_for_digit():
    rows = rerun()
    assert {row["delta"]: row["mean_reward"] for row in rows} == {
        delta: list(values) for delta, values in PUBLISHED.items()
    }
    assert all(row["matches"] and row["epochs"] == list(EPOCHS) for row in rows)


@pytest.mark.parametrize(("loss", "kl_setting"), [("naive", "off"), ("clipped", "on")])
def test_a_seed_learns_the_same_whoever_runs_beside_it(loss, kl_setting):
    one, other = (
        Configuration(delta=delta, loss=loss, kl=kl_setting, reward=reward)
        for delta, reward in (("centered", "inclusion_ordering"), ("rewards", "position_matches"))
    )
    alone = train([one], seeds=[3], schedule=SHORT)
    beside = train([other, one], seeds=[8, 1, 3], schedule=SHORT)
    assert equal(alone, beside, lanes=(0, 5))
    assert not equal(alone, beside, lanes=(0, 4))  # another seed goes another way
    assert not equal(alone, beside, lanes=(0, 2))  # and so does another configuration


@pytest.mark.parametrize("delta", DELTAS)
def test_equal_rewards_teach_nothing_once_they_are_centred(delta, monkeypatch):
    monkeypatch.setitem(REWARDS, "exactly_sorted", lambda _, y: torch.full(y.shape[:-1], 0.7))
    history = train(
        [Configuration(delta=delta, reward="exactly_sorted")], seeds=[0, 1], schedule=SHORT
    )
    pairs = zip(history.initial.parameters(), history.final.parameters(), strict=True)
    stands_still = all(torch.equal(before, after) for before, after in pairs)
    assert stands_still == (delta in {"centered", "normalized", "max_centred"})


def test_centred_beats_raw_rewards_over_seeds():
    seeds, schedule = range(10), Schedule(num_epochs=40)
    configurations = [Configuration(delta=delta) for delta in ("rewards", "centered")]
    history = train(configurations, seeds=seeds, schedule=schedule)
    final = expected(history.final, REWARDS["inclusion_ordering"]).view(2, 10)
    start = expected(history.initial, REWARDS["inclusion_ordering"]).view(2, 10)
    assert torch.equal(start[0], start[1])
    difference = final[1] - final[0]
    assert difference.mean() > 3 * difference.std() / 10**0.5
    assert final[1].mean() > start[1].mean() + 0.7


def test_kl_holds_the_policy_and_a_fresh_reference_lets_it_go():
    def drift(kl_setting: str, **options: float) -> float:
        schedule = Schedule(num_epochs=10, kl_coefficient=1.0, **options)
        configuration = Configuration(delta="centered", kl=kl_setting)
        history = train([configuration], seeds=range(4), schedule=schedule)
        logits = [each.logits(prompts()) for each in (history.final, history.initial)]
        return kl.exact(*logits).mean().item()

    held, released, free = (
        drift("on", reference_period=10),
        drift("on", reference_period=1),
        drift("off"),
    )
    assert 0 < held < 0.5 * released < 0.5 * free


def test_the_log_sees_every_step_before_its_update():
    moments: list[Moment] = []
    configuration = Configuration(delta="centered", loss="unclipped")
    train([configuration], seeds=[5], schedule=Schedule(num_epochs=2), watch=moments.append)
    assert [(each.epoch, each.step) for each in moments] == [
        (e, s) for e in (0, 1) for s in range(10)
    ]
    for each in moments:
        on_policy = torch.equal(each.logprobs, each.batch.old_logprobs)
        assert on_policy == (each.step == 0)
    # At ratio 1 the unclipped loss is minus the mean advantage, and that is 0.
    assert abs(moments[0].losses.item()) < 1e-6


def test_configurations_of_different_losses_cannot_train_together():
    with pytest.raises(ValueError, match="calls of their own"):
        train([Configuration(loss="naive"), Configuration(loss="clipped")], seeds=[0])


def test_a_wrong_name_says_what_there_is():
    with pytest.raises(ValueError, match="choose one of rewards, centered"):
        Configuration(delta="centred")


def test_the_early_policy_is_that_of_a_tenth_of_the_epochs():
    configuration = Configuration(delta="normalized")
    long, short = (
        train([configuration], seeds=[2], schedule=Schedule(num_epochs=num_epochs))
        for num_epochs in (20, 2)
    )
    for one, other in zip(long.early.parameters(), short.final.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_deltas_and_the_clip_are_the_lectures_by_hand():
    # Rewards 5, 3, 3, 1: mean 3, squares 4 + 0 + 0 + 4, sample deviation √(8/3).
    batch = Batch.from_rewards([5.0, 3.0, 3.0, 1.0])
    normalized = 2 / ((8 / 3) ** 0.5 + 1e-5)
    by_hand = {
        "rewards": [5.0, 3.0, 3.0, 1.0],
        "centered": [2.0, 0.0, 0.0, -2.0],
        "normalized": [normalized, 0.0, 0.0, -normalized],
        "max_reward": [5.0, 0.0, 0.0, 0.0],
        "max_centred": [2.0, 0.0, 0.0, 0.0],
    }
    assert by_hand.keys() == DELTAS.keys()
    for delta, values in by_hand.items():
        result = Configuration(delta=delta).advantage()(batch).advantages[:, 0]
        expected_result = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(result, expected_result, rtol=1e-9, atol=0)
    # A ratio of 1.5 on a token with advantage 2 is clipped to 1.01.
    moved = Batch.from_rewards([2.0]).replace(
        advantages=torch.full((1, 1), 2.0), old_logprobs=torch.tensor([[0.4]]).log()
    )
    for loss, value in (("unclipped", -3.0), ("clipped", -2.02)):
        terms = Configuration(loss=loss).policy_loss()(torch.tensor([[0.6]]).log(), moved)
        torch.testing.assert_close(terms.loss, torch.tensor([[value]]))
