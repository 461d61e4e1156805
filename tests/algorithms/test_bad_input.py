"""Bad input: an error that names the argument and the fix, never a silent NaN."""

import math

import pytest
import torch
from algorithms.batches import BROKEN, moved, ragged, ready, refuses
from algorithms.recipes import ADVANTAGE_VARIANTS

from posttrain.algorithms import checks
from posttrain.algorithms.advantages import (
    ADVANTAGES,
    constant_baseline,
    moving_baseline,
    optimal_baseline,
    sequence_returns,
    update_baseline,
    without_siblings,
)
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.types import Batch

NOT_A_NUMBER = [math.nan, math.inf, -math.inf]
MARK = "mark what could not be scored in `valid` instead of passing NaN or infinity on"

ADDED_BY = {
    "rewards": "collate (from the scores)",
    "groups": "collate",
    "sampler_logprobs": "collate (from the engine)",
    "old_logprobs": "Learner.infer, before the first optimiser step",
    "ref_logprobs": "Learner.infer with a reference model",
    "values": "Learner.infer with a critic",
    "turns": "collate (where a rollout has several turns of the policy)",
    "turn_rewards": "collate (where a rollout earned something before its end)",
    "token_rewards": "posttrain.algorithms.shaping.score_at_last_token",
    "advantages": "a function of posttrain.algorithms.advantages",
    "returns": "posttrain.algorithms.advantages.gae",
    "weights": "a function of posttrain.algorithms.weights",
    "baseline": "the loop, for advantages that use a moving baseline and for the loss kto",
    "teacher_logprobs": "Learner.infer with a teacher",
    "score_norms": "the caller: the squared norm of each sequence's score function",
    "attention": "the caller",
    "margins": "posttrain.data.collate.collate_ranked",
    "greedy_rewards": "collate (a source samples greedily where the advantage declares the need)",
}


@pytest.mark.parametrize(("name", "source"), ADDED_BY.items())
def test_a_missing_field_says_who_adds_it(name: str, source: str) -> None:
    batch = Batch(tokens=torch.zeros(1, 1), mask=torch.ones(1, 1).bool())
    with refuses(f"{name}: this batch has none; it is added by {source}"):
        batch.need(name)


NEEDS = {
    "return": ("rewards",),
    "constant_baseline": ("rewards",),
    "moving_baseline": ("rewards", "baseline"),
    "optimal_baseline": ("rewards", "groups", "score_norms"),
    "group_centred": ("rewards", "groups"),
    "group_normalised": ("rewards", "groups"),
    "max_only": ("rewards", "groups"),
    "leave_one_out": ("rewards", "groups"),
    "leave_one_out_normalised": ("rewards", "groups"),
    "pass_at_k": ("rewards", "groups"),
    "greedy_baseline": ("rewards", "greedy_rewards"),
    "centred, whitened": ("rewards", "groups"),
    "batch_whitened": ("rewards",),
    "return_to_go": ("token_rewards",),
    "turn_return_to_go": ("token_rewards",),
    "turn_group_normalised": ("token_rewards", "groups"),
    "gae": ("token_rewards", "values"),
    "towards_teacher": ("old_logprobs", "teacher_logprobs"),
}


def test_what_is_needed_is_known_for_every_advantage() -> None:
    assert set(ADVANTAGES) <= set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_an_advantage_without_its_fields_is_refused(name: str) -> None:
    batch = ragged()
    for field in NEEDS[name]:
        without = batch.replace(token_rewards=None) if field == "rewards" else batch
        with refuses(f"{field}: this batch has none; it is added by {ADDED_BY[field]}"):
            ADVANTAGE_VARIANTS[name](without.replace(**{field: None}))


@pytest.mark.parametrize("name", sorted(NEEDS.keys() - {"towards_teacher"}))
@pytest.mark.parametrize("reward", NOT_A_NUMBER)
def test_a_reward_that_is_no_number_is_refused(name: str, reward: float) -> None:
    batch = ragged().replace(token_rewards=None)
    rewards = batch.need("rewards").clone()
    rewards[2] = rewards[3] = reward
    if "rewards" in NEEDS[name]:
        with refuses(f"rewards: {reward} at [2] (2 in all); {MARK}"):
            ADVANTAGE_VARIANTS[name](batch.replace(rewards=rewards))
    tokens = ragged().need("token_rewards").clone()
    tokens[1, 2] = reward
    with refuses(f"token_rewards: {reward} at [1, 2] (1 in all); {MARK}"):
        ADVANTAGE_VARIANTS[name](batch.replace(token_rewards=tokens))


@pytest.mark.parametrize("value", NOT_A_NUMBER)
def test_values_norms_and_baselines_must_be_numbers(value: float) -> None:
    batch = ragged()
    values, norms = batch.need("values").clone(), batch.need("score_norms").clone()
    values[0, 2] = norms[1] = value
    with refuses(f"values: {value} at [0, 2] (1 in all); {MARK}"):
        ADVANTAGES["gae"](batch.replace(values=values))
    with refuses(f"score_norms: {value} at [1] (1 in all); {MARK}"):
        optimal_baseline(batch.replace(score_norms=norms))
    with refuses(f"baseline: {value} at [] (1 in all); {MARK}"):
        moving_baseline(batch.replace(baseline=torch.tensor(value)))
    with refuses(f"baseline: must be finite, got {value}"):
        constant_baseline(batch, baseline=value)


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_the_decay_of_a_running_mean_lies_between_zero_and_one(decay: float) -> None:
    with refuses(f"decay: must be >= 0 and <= 1, got {decay}"):
        update_baseline(0.0, ragged(), decay=decay)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_without_its_fields_is_refused(name: str) -> None:
    batch = ready()
    logprobs, loss = moved(batch), POLICY_LOSSES[name]
    if name == "teacher_divergence":
        with refuses(
            "divergence: this batch has none; it is added by the objective, for a loss that "
            "declares one (pieces.piece)"
        ):
            loss(logprobs, batch.replace(divergence=None))
        return
    with refuses(f"advantages: this batch has none; it is added by {ADDED_BY['advantages']}"):
        loss(logprobs, batch.replace(advantages=None))
    if name != "naive":
        with refuses(
            f"old_logprobs: this batch has none; it is added by {ADDED_BY['old_logprobs']}"
        ):
            loss(logprobs, batch.replace(old_logprobs=None))


def test_a_value_loss_without_its_fields_is_refused() -> None:
    batch = ready()
    for loss in VALUE_LOSSES.values():
        with refuses(f"returns: this batch has none; it is added by {ADDED_BY['returns']}"):
            loss(torch.zeros(12, 10), batch.replace(returns=None))
    with refuses(f"values: this batch has none; it is added by {ADDED_BY['values']}"):
        VALUE_LOSSES["clipped"](torch.zeros(12, 10), batch.replace(values=None))


@pytest.mark.parametrize("name", ["clipped", "dual_clip", "sequence_clipped", "cispo", "clip_cov"])
def test_impossible_clip_ranges_are_refused(name: str) -> None:
    batch, loss = ready(), POLICY_LOSSES[name]
    for value in (-0.1, 1.1, math.nan):
        with refuses(f"clip_low: must be >= 0 and <= 1, got {value}"):
            loss(moved(batch), batch, clip_low=value)
    for value in (-0.1, math.nan):
        with refuses(f"clip_high: must be >= 0, got {value}"):
            loss(moved(batch), batch, clip_high=value)


@pytest.mark.parametrize(
    ("name", "option", "value", "bound"),
    [
        ("dual_clip", "floor", 1.0, "> 1"),
        ("dual_clip", "floor", 0.5, "> 1"),
        ("penalised", "coefficient", -0.1, ">= 0"),
        ("geometric_mean", "clip_low", -0.1, ">= 0"),
        ("geometric_mean", "clip_high", -0.1, ">= 0"),
        ("kl_cov", "coefficient", -0.1, ">= 0"),
        ("kl_cov", "share", 0.0, "> 0 and <= 1"),
        ("kl_cov", "share", 1.1, "> 0 and <= 1"),
        ("clip_cov", "share", 0.0, "> 0 and <= 1"),
        ("clip_cov", "covariance_low", math.nan, "finite"),
        ("clip_cov", "covariance_high", 0.9, ">= 1"),
        ("sapo", "temperature_positive", 0.0, "> 0"),
        ("sapo", "temperature_negative", -1.0, "> 0"),
    ],
)
def test_impossible_options_of_policy_losses_are_refused(
    name: str, option: str, value: float, bound: str
) -> None:
    with refuses(f"{option}: must be {bound}, got {value}"):
        POLICY_LOSSES[name](moved(ready()), ready(), **{option: value})


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        ({}, "finite"),
        ({"low": 2.0}, ">= 2"),
        ({"high": -2.0}, "<= -2"),
        ({"above": 5.0}, "> 5"),
        ({"low": 6.0, "high": 7.0}, ">= 6 and <= 7"),
        ({"above": 5.0, "high": 7.0}, "> 5 and <= 7"),
        ({"above": 0.5, "low": 2.25, "high": 7.0}, "> 0.5 and >= 2.25 and <= 7"),
    ],
)
def test_a_number_out_of_bounds_is_told_the_bounds(bounds: dict[str, float], wanted: str) -> None:
    with refuses(f"x: must be {wanted}, got inf"):
        checks.number("x", math.inf, **bounds)
    with refuses(f"x: must be {wanted}, got nan"):
        checks.number("x", math.nan, **bounds)


def test_a_number_on_its_bound_passes_unless_it_must_be_above() -> None:
    checks.number("x", 2.0, low=2.0, high=2.0, above=1.9)
    for bounds in ({"low": 2.1}, {"high": 1.9}, {"above": 2.0}):
        with pytest.raises(ValueError, match=r"^x: must be .+, got 2\.0$"):
            checks.number("x", 2.0, **bounds)


def test_a_reward_that_is_no_number_may_stand_where_the_grader_broke() -> None:
    batch = ragged().replace(token_rewards=None)
    assert math.isnan(batch.need("rewards")[BROKEN])
    assert sequence_returns(batch)[BROKEN].item() == 0.0
    everyone = batch.replace(valid=None)
    with refuses(f"rewards: nan at [{BROKEN}] (1 in all); {MARK}"):
        sequence_returns(everyone)
    checks.finite("rewards", batch.need("rewards"), where=batch.valid)


WAY_OUT = (
    "or more completions for each prompt (rl.group_size in a recipe), or choose an advantage that "
    "compares with no other completion: return, constant_baseline, moving_baseline, "
    "greedy_baseline, batch_whitened, return_to_go, turn_return_to_go, gae, "
    "towards_teacher"
)


def test_a_group_that_is_too_small_is_named_with_the_way_out() -> None:
    checks.groups_of(2, torch.tensor([3, 8, 3, 8]))
    checks.groups_of(1, torch.tensor([3]))
    few = "groups: group 8 has one member, and 2 at least are compared; sample 2 "
    with refuses(few + WAY_OUT):
        checks.groups_of(2, torch.tensor([3, 8, 3, 11]))
    few = "groups: group 3 has 2 members, and 4 at least are compared; sample 4 "
    with refuses(few + WAY_OUT):
        checks.groups_of(4, torch.tensor([3, 8, 3, 8, 8]))


def test_the_way_out_is_what_the_table_holds() -> None:
    """Each named advantage takes a lone completion, and each other one refuses it or needs more."""
    alone = ragged().select(torch.tensor([0])).replace(valid=None)
    named = WAY_OUT.partition(": ")[2].split(", ")
    assert named == without_siblings()
    for name in named:
        made = ADVANTAGE_VARIANTS[name](alone).need("advantages")
        assert made[0, alone.mask[0]].isfinite().all()
    for name in set(ADVANTAGES) - set(named) - {"optimal_baseline"}:
        with pytest.raises(ValueError, match="has one member"):
            ADVANTAGE_VARIANTS[name](alone)
