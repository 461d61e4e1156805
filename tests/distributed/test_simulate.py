"""The simulated cluster against times that can be derived by hand."""

from dataclasses import replace

import pytest

from posttrain.distributed.plans.simulate import (
    Costs,
    Layout,
    LinearTime,
    Prediction,
    balanced,
    communication,
    pool_seconds,
    sampling_seconds,
    simulate,
)

# Every completion has 10 tokens: a pass costs 0.1 s, whatever is in it. 4 prompts × 2 completions
# of 10 + 2 tokens are 96 tokens to learn, 0.05 s each, and 8 to grade, 0.025 s each.
SAMPLING, GRADING, TRAINING, SYNC = 10 * 0.1, 8 * 0.025, 0.4 + 96 * 0.05, 3.0
COSTS = Costs(
    decode=LinearTime(0.1, 0.0),
    grading=0.025,
    train=LinearTime(0.4, 0.05),
    weight_bytes=300.0,
    groups=[[10, 10]],
    prompt=2.0,
)
LAYOUT = Layout(
    learners=1,
    engines=1,
    max_lag=0,
    prompts_per_step=4,
    group_size=2,
    bandwidth=100.0,
    learner_bandwidth=100.0,
)
VARIED = replace(COSTS, groups=[[1, 9], [4, 4], [20, 2], [7, 13], [30, 1]])


def predicted(costs: Costs = COSTS, **changes: float) -> Prediction:
    return simulate(costs, replace(LAYOUT, **changes), steps=40)


def test_without_a_lag_everything_comes_after_the_other() -> None:
    found = predicted()
    step = SAMPLING + GRADING + TRAINING + SYNC
    assert found.step == pytest.approx(step, rel=1e-9)
    assert found.fastest == pytest.approx(found.slowest, rel=1e-9)
    assert found.samples_per_second == pytest.approx(8 / step, rel=1e-9)
    assert found.tokens_per_second == pytest.approx(80 / step, rel=1e-9)
    assert found.engine_idle == pytest.approx(1 - SAMPLING / step, rel=1e-9)
    assert found.learner_idle == pytest.approx(1 - TRAINING / step, rel=1e-9)
    assert found.bottleneck == "training"


@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_with_a_lag_the_longer_side_decides(max_lag: int) -> None:
    """Weights change while neither works, so the sync comes on top of either."""
    assert predicted(max_lag=max_lag).step == pytest.approx(TRAINING + SYNC, rel=1e-9)
    slow = replace(COSTS, decode=LinearTime(1.0, 0.0))
    found = predicted(slow, max_lag=max_lag)
    assert found.step == pytest.approx(10 + GRADING + SYNC, rel=1e-9)
    assert found.bottleneck == "sampling"


def test_an_engine_on_the_learners_device_overlaps_grading_alone() -> None:
    found = predicted(engines=0, max_lag=1)
    assert found.step == pytest.approx(SAMPLING + TRAINING, rel=1e-9)
    graded = replace(COSTS, grading=1.0)
    assert predicted(graded, engines=0, max_lag=1).step == pytest.approx(SAMPLING + 8, rel=1e-9)
    # So do engines that have no place of their own; a driver beside two learners does not wait.
    beside = predicted(engines=1, max_lag=1, colocate=True)
    assert beside.step == pytest.approx(SAMPLING + TRAINING + SYNC, rel=1e-9)
    driver = predicted(engines=0, learners=2, max_lag=1)
    assert driver.step == pytest.approx(driver.training + SYNC, rel=1e-9)
    alone = predicted(engines=0)
    assert alone.step == pytest.approx(SAMPLING + GRADING + TRAINING, rel=1e-9)
    assert alone.sync == 0


def test_engines_divide_what_a_sequence_costs_and_not_what_a_pass_costs() -> None:
    by_row = replace(COSTS, decode=LinearTime(0.0, 0.1))
    times = {count: predicted(by_row, engines=count).sampling for count in (1, 2, 4)}
    assert times == pytest.approx({1: 8.0, 2: 4.0, 4: 2.0}, rel=1e-9)
    assert predicted(engines=4).sampling == pytest.approx(SAMPLING, rel=1e-9)
    # A group stays whole: more engines than groups have nothing to do.
    many = predicted(by_row, engines=8)
    assert many.sampling == pytest.approx(2.0, rel=1e-9)
    assert many.engine_balance == pytest.approx(0.5, rel=1e-9)


def test_learners_divide_tokens_and_pay_for_what_they_exchange() -> None:
    """Two ranks have 48 tokens each and exchange half of 300 bytes three times, 100 a second."""
    found = predicted(learners=2)
    assert found.training == pytest.approx(0.4 + 48 * 0.05 + 3 * 300 / 2 / 100, rel=1e-9)
    assert found.learner_balance == pytest.approx(1.0, rel=1e-9)
    # Three ranks: 8 sequences of 12 tokens are 3, 3 and 2.
    uneven = predicted(learners=3)
    assert uneven.learner_balance == pytest.approx(32 / 36, rel=1e-9)


def test_every_micro_batch_gathers_the_weights() -> None:
    layout = replace(LAYOUT, learners=4, moves=5)
    once = 5 * 300 * 3 / 4 / 100
    assert communication(COSTS, layout, tokens=96) == pytest.approx(once, rel=1e-9)
    small = replace(layout, micro_batch_tokens=40)
    assert communication(COSTS, small, tokens=96) == pytest.approx(3 * once, rel=1e-9)
    split = replace(layout, minibatches=2)
    assert communication(COSTS, split, tokens=96) == pytest.approx(2 * once, rel=1e-9)
    assert communication(COSTS, replace(layout, learners=1), tokens=96) == 0


@pytest.mark.parametrize(
    ("slots", "seconds"),
    [
        # Passes 1–2 hold 3 sequences, 3–4 hold 2, pass 5 one: 1 s and 0.5 s for each.
        (None, 2 * 2.5 + 2 * 2.0 + 1.5),
        # 5 and 2 begin; the 4 takes the slot of the 2: passes 1–5 hold 2, pass 6 one.
        (2, 5 * 2.0 + 1.5),
        (1, 11 * 1.5),
    ],
)
def test_a_slot_is_refilled_as_its_sequence_ends(slots: int | None, seconds: float) -> None:
    found = sampling_seconds([5, 2, 4], LinearTime(1.0, 0.5), slots=slots)
    assert found == pytest.approx(seconds, rel=1e-9)


def test_ranks_have_even_shares() -> None:
    assert balanced([3.0, 3.0, 3.0, 1.0, 1.0, 1.0], 3) == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("changes", "busy"),
    [
        # One piece each: 2 groups and 2 groups, at once.
        ({"rounds": 1}, [4.0, 8.0]),
        # One group a piece, the next for whoever is free: beside the 4 the others.
        ({"rounds": 2}, [4.0, 1.0 + 1.0 + 8.0]),
        ({"rounds": 9}, [4.0, 1.0 + 1.0 + 8.0]),  # a group is never cut
        ({"rounds": 2, "call": 1.0}, [5.0, 2.0 + 2.0 + 9.0]),
        ({"rounds": 1, "engines": 0}, [8.0]),  # in the learner's process, all at once
    ],
)
def test_pieces_go_to_whoever_is_free(changes: dict[str, float], busy: list[float]) -> None:
    """A pass costs 1 s: a piece lasts as long as its longest."""
    costs = replace(COSTS, decode=LinearTime(1.0, 0.0))
    layout = replace(LAYOUT, **{"engines": 2, **changes})
    groups = [[4, 4], [1, 1], [1, 1], [8, 8]]
    found = pool_seconds(groups, costs, layout=layout)
    assert sorted(found[1]) == pytest.approx(sorted(busy), rel=1e-9)
    assert found[0] == pytest.approx(max(busy), rel=1e-9)


def test_groups_without_signal_are_drawn_again() -> None:
    """Where none is useful, every round draws all of them, and the last are learned anyway."""
    found = predicted(useful=0.0, max_resamples=2)
    assert found.sampling == pytest.approx(3 * SAMPLING, rel=1e-9)
    assert found.grading == pytest.approx(3 * GRADING, rel=1e-9)
    assert found.training == pytest.approx(TRAINING, rel=1e-9)
    some = predicted(useful=0.5, max_resamples=20)
    assert 1.5 * GRADING < some.grading < 3 * GRADING  # twice as many are drawn on average


def test_a_group_of_another_size_has_lengths_of_one_that_was_measured() -> None:
    apart = replace(COSTS, groups=[[1, 1], [1000, 1000]])
    found = predicted(apart, prompts_per_step=1, group_size=5)
    assert (found.fastest, found.slowest) == pytest.approx(
        (0.1 + 5 * 0.025 + 0.4 + 15 * 0.05 + 3, 100 + 5 * 0.025 + 0.4 + 5010 * 0.05 + 3), rel=1e-9
    )


def test_units_of_time_do_not_matter() -> None:
    slow = replace(
        VARIED,
        decode=LinearTime(0.7, 0.0),
        grading=7 * VARIED.grading,
        train=LinearTime(7 * 0.4, 7 * 0.05),
    )
    wide = predicted(VARIED, max_lag=1, engines=2, learners=2)
    same = predicted(
        slow, max_lag=1, engines=2, learners=2, bandwidth=100 / 7, learner_bandwidth=100 / 7
    )
    assert same.step == pytest.approx(7 * wide.step, rel=1e-9)
    assert same.engine_idle == pytest.approx(wide.engine_idle, rel=1e-9)


def test_a_lag_never_costs_time_and_lengths_that_vary_unbalance_engines() -> None:
    costs = replace(VARIED, decode=LinearTime(0.05, 0.05))
    found = [predicted(costs, engines=2, max_lag=lag) for lag in (0, 1, 2)]
    assert found[0].step > found[1].step
    assert found[2].step == pytest.approx(found[1].step, rel=0.05)
    assert 0.5 < found[0].engine_balance < 1
    assert found[0].fastest < found[0].step < found[0].slowest


def test_the_same_seed_gives_the_same_prediction() -> None:
    assert predicted(VARIED) == predicted(VARIED)
    other = simulate(VARIED, LAYOUT, steps=40, seed=1)
    assert other.step != predicted(VARIED).step


def test_without_lengths_nothing_is_predicted() -> None:
    with pytest.raises(ValueError, match="no completion was measured"):
        predicted(replace(COSTS, groups=[]))
