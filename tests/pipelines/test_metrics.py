"""The numbers of a step, by hand."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from loop_parts import rollout

from posttrain.algorithms.shaping import kl_in_reward, missing_end
from posttrain.data.collate import collate
from posttrain.pipelines.metrics import batch_metrics, step_metrics
from posttrain.protocols import StepResult
from posttrain.types import Collected, Rollout, Score, Turn


def rollouts() -> list[Rollout]:
    """Two groups of two: lengths 2, 3, 1, 0; the last grader broke; the second answer was cut."""
    rows = [
        rollout(1.0),
        rollout(0.0, tokens=(8, 9, 7)),
        rollout(0.5, group=1, tokens=(8,)),
        rollout(None, group=1, tokens=()),
    ]
    cut = dataclasses.replace(rows[1].turns[0], stop_reason="length")
    rows[1] = dataclasses.replace(rows[1], turns=(cut,))
    rows[0] = dataclasses.replace(
        rows[0], score=Score(value=1.0, parts={"exact": 1.0, "form": 3.0})
    )
    rows[2] = dataclasses.replace(rows[2], score=Score(value=0.5, parts={"exact": 0.5}))
    return rows


def test_batch_metrics_by_hand() -> None:
    """Every name of the rollouts' metrics, and its value."""
    seconds = {"rollout": 2.0, "reward": 0.25}
    given = Collected(rollouts=rollouts(), seconds=seconds, resampled=3)
    batch = collate(given.rollouts, pad_token=0)
    advantages = torch.tensor([[2.0], [-1.0], [4.0], [9.0]]).expand(4, 5) * batch.active
    old = torch.full((4, 5), -1.0)
    reference = torch.tensor([[-1.5], [-1.0], [-3.0], [-9.0]]).expand(4, 5)
    batch = batch.replace(advantages=advantages, old_logprobs=old, ref_logprobs=reference)
    assert batch_metrics(batch, given) == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx((1 / 6) ** 0.5, rel=1e-12),
        "reward/invalid": 0.25,
        "reward/part/exact": 0.75,
        "reward/part/form": 3.0,
        "rollout/length": 1.5,
        "rollout/truncated": 0.25,
        "rollout/groups_without_signal": 0.5,
        "rollout/tokens": 6.0,
        "rollout/resampled": 3.0,
        "rollout/drawn_per_group": 2.5,  # 2 groups, and 3 that were dropped
        "rollout/tokens_per_second": 3.0,
        "advantage/mean_abs": pytest.approx((2 * 2 + 3 * 1 + 1 * 4) / 6, rel=1e-6),
        # Summed over the tokens of each valid sequence: 2·0.5, 3·0 and 1·2.
        "reward/state/crashed": 0.25,
        "objective/scores": 0.5,
        "objective/kl": pytest.approx((1.0 + 0.0 + 2.0) / 3, rel=1e-6),
        "time/rollout": 2.0,
        "time/reward": 0.25,
    }


def test_greedy_answers_are_counted_once_for_each_prompt() -> None:
    """1 and 0.5 in the groups 0 and 1, of two rollouts each; the third group's grader broke."""
    greedy = {0: Score(value=1.0), 1: Score(value=0.5), 2: Score(value=9.0, state="timeout")}
    rows = [
        dataclasses.replace(
            rollout(0.0, group=group), greedy=dataclasses.replace(rollout(0.0), score=score)
        )
        for group, score in greedy.items()
        for _ in range(2)
    ]

    def told(kept: list[Rollout]) -> dict[str, float]:
        batch = collate(kept, pad_token=0)
        batch = batch.replace(advantages=torch.zeros(batch.tokens.shape))
        found = batch_metrics(batch, Collected(rollouts=kept))
        return {name: value for name, value in found.items() if "greedy" in name}

    assert told(rows) == {"reward/greedy": 0.75, "reward/greedy_invalid": pytest.approx(1 / 3)}
    assert told(rows[:4]) == {"reward/greedy": 0.75, "reward/greedy_invalid": 0.0}
    assert told(rows[4:]) == {"reward/greedy_invalid": 1.0}
    assert told([dataclasses.replace(row, greedy=None) for row in rows]) == {}


def test_without_a_valid_score_no_reward_is_told() -> None:
    """Not 0, which is a bad reward, nor NaN, which would poison a curve."""
    given = Collected(rollouts=[rollout(None), rollout(None)])
    batch = collate(given.rollouts, pad_token=0)
    nothing = torch.zeros(2, 4)
    batch = batch.replace(advantages=nothing, old_logprobs=nothing, ref_logprobs=nothing)
    found = batch_metrics(batch, given)
    assert found["reward/invalid"] == 1.0
    told = {name for name in found if name.startswith(("reward/", "objective/", "advantage/"))}
    assert told == {"reward/invalid", "reward/state/crashed"}
    assert all(math.isfinite(value) for value in found.values())


def test_the_reward_is_after_length_shaping_and_before_kl() -> None:
    """One answer of two was cut, for 0.5; 2 nats a sequence cost 0.1 each. The page says so."""
    given = Collected(rollouts=rollouts()[:2])
    batch = missing_end(collate(given.rollouts, pad_token=0), penalty=0.5)
    ratio = torch.where(batch.active, 2.0 / batch.active.sum(dim=1, keepdim=True), 0.0)
    batch = batch.replace(old_logprobs=ratio, ref_logprobs=torch.zeros_like(ratio))
    batch = kl_in_reward(batch, coefficient=0.1).replace(advantages=torch.zeros_like(ratio))
    found = batch_metrics(batch, given)
    assert (found["objective/scores"], found["reward/mean"]) == (0.5, 0.25)
    assert found["objective/non_score_reward"] == pytest.approx(-0.25 - 0.2, rel=1e-6)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for metric in ("reward/mean", "objective/scores"):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{metric}` |"))
        assert "length and a missing end, " in row
        assert "before KL" in row


def test_step_metrics_average_but_maxima_stay() -> None:
    """Two optimiser steps, the second without a ratio."""
    first = StepResult(
        loss=1.0,
        gradient_norm=4.0,
        learning_rate=0.1,
        metrics={"entropy": 2.0, "ratio_max": 3.0, "mismatch": 0.5, "own": 1.0},
    )
    second = StepResult(
        loss=2.0, gradient_norm=2.0, learning_rate=0.2, metrics={"entropy": 1.0, "ratio_max": 5.0}
    )
    assert step_metrics([first, second]) == {
        "loss/total": 1.5,
        "train/gradient_norm": 3.0,
        "train/learning_rate": 0.2,
        "train/optimiser_steps": 2.0,
        "train/skipped": 0.0,
        "objective/entropy": 1.5,
        "policy/ratio_max": 5.0,
        "mismatch/mean": 0.5,
        "own": 1.0,
    }


def test_a_skipped_step_is_counted_and_is_in_no_other_number() -> None:
    """Unless there is no other: then the numbers say what was wrong, and no KL steers anything."""
    nan = float("nan")
    ill = {"loss": nan, "gradient_norm": nan, "learning_rate": 0.5, "skipped": True}
    skipped = StepResult(**ill, metrics={"approx_kl": nan, "entropy": nan, "ratio_max": nan})
    good = StepResult(
        loss=2.0,
        gradient_norm=3.0,
        learning_rate=0.5,
        metrics={"approx_kl": 0.25, "ratio_max": 1.5},
    )
    found = step_metrics([good, skipped])
    assert found.pop("train/skipped") == 1.0
    alone = step_metrics([good])
    assert alone.pop("train/skipped") == 0.0
    assert found == alone
    assert found["policy/step_kl"] == 0.25
    none = step_metrics([skipped, skipped])
    assert (none["train/optimiser_steps"], none["train/skipped"]) == (0.0, 2.0)
    assert math.isnan(none["loss/total"])
    assert "policy/step_kl" not in none


def test_what_nobody_earned_counts_as_nothing() -> None:
    """One of two valid episodes earned 0.5; other parts are means over those that have them."""
    parts = [{"env": 1.0, "env/earned": 0.5, "env/won": 1.0}, {"env": 0.0}]
    rows = [
        dataclasses.replace(rollout(1.0), score=Score(value=part["env"], parts=part))
        for part in parts
    ]
    rows.append(dataclasses.replace(rows[0], score=Score(value=0.0, state="crashed")))
    batch = collate(rows, pad_token=0)
    batch = batch.replace(advantages=torch.zeros(batch.tokens.shape))
    found = batch_metrics(batch, Collected(rollouts=rows))
    assert found["reward/part/env/earned"] == 0.25
    assert found["reward/part/env/won"] == 1.0
    assert found["reward/part/env"] == 0.5


def test_turns_and_what_each_earned() -> None:
    """Of 2 and 1 turns: −0.25 and 1.25, and 0.5; the broken one counts, and earned nothing."""
    one = rollout(0.5)
    said = Turn(tokens=(4,), text="no", reward=-0.25)
    two = dataclasses.replace(rollout(1.0), turns=(one.turns[0], said, one.turns[0]))
    counted = Score(value=1.0, parts={"env/tool_calls": 3.0})
    rows = [dataclasses.replace(two, score=counted), one]
    rows.append(dataclasses.replace(two, score=Score(value=0.0, state="crashed")))
    batch = collate(rows, pad_token=0)
    batch = batch.replace(advantages=torch.zeros(batch.tokens.shape))
    found = batch_metrics(batch, Collected(rollouts=rows))
    assert found["rollout/turns"] == pytest.approx(5 / 3)
    assert found["rollout/turns_max"] == 2.0
    assert found["reward/turn/1"] == pytest.approx((-0.25 + 0.5) / 2)
    assert found["reward/turn/2"] == 1.25
    assert "reward/turn/3" not in found
    assert found["reward/part/env/tool_calls"] == 3.0
    alone = batch_metrics(batch.select(torch.tensor([1])), Collected(rollouts=[one]))
    assert not any("turn" in name for name in alone)
