"""Costs are found again in a run that was made with them, and in a trial that is taken here."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import recipe, small_run

from posttrain.config import recipe_from_dict, resolve
from posttrain.distributed.plans.measured import Observed, fit, shown, weight_moves
from posttrain.distributed.plans.run_costs import from_run
from posttrain.distributed.plans.simulate import LinearTime
from posttrain.distributed.plans.trial_costs import from_trial
from posttrain.runs import RunFolder
from posttrain.runs.rollouts import rollout_file, write_rollouts
from posttrain.types import Prompt, Rollout, Turn

DECODE, TRAIN, GRADING = LinearTime(0.01, 0.001), LinearTime(0.2, 0.0005), 0.003
VARIED = [[[3, 7], [5, 5]], [[9, 1], [2, 2]], [[4, 4], [4, 6]], [[8, 8], [8, 2]], [[1, 1], [2, 3]]]
ALIKE = [[group] * 3 for step in VARIED for group in step]


def written_run(
    path: Path,
    steps: Sequence[Sequence[Sequence[int]]],
    *,
    learners: int = 1,
    engines: int = 0,
    resampled: int = 0,
) -> Path:
    """A run whose times are exactly those of the costs above; its prompts have 4 tokens."""
    cluster = {"learners": learners, "engines": engines}
    folder = RunFolder.create(
        path, config={"model": {"name": "tiny"}, "rl": {}, "cluster": cluster}, recipe=None
    )
    stage, lines = folder.begin("rl"), []
    warm_up = [{"step": step, "time/rollout": 99.0} for step in (1, 2)]
    for step, groups in enumerate(steps, start=3):
        rollouts = [
            Rollout(
                prompt=Prompt(id=str(number), text="", tokens=(1, 2, 3, 4)),
                turns=(Turn(tokens=(5,) * length, logprobs=(0.0,) * length, text=""),),
                group=number,
            )
            for number, group in enumerate(groups)
            for length in group
        ]
        write_rollouts(rollout_file(stage.rollouts, step), rollouts, step=step)
        tokens, samples = sum(map(sum, groups)), sum(map(len, groups))
        drawn = 1 + resampled / len(groups)
        # Two engines or more have a group at a time; all groups of a step are alike then.
        mine = groups if not engines else groups[: math.ceil(len(groups) / engines)]
        passes = sum(map(max, mine)) if engines else max(map(max, mine))
        decoded = DECODE.fixed * math.ceil(drawn) * passes
        decoded += DECODE.each * drawn * sum(map(sum, mine))
        lines.append(
            {
                "step": step,
                "time/rollout": decoded,
                "time/reward": GRADING * drawn * samples,
                "time/train": TRAIN((tokens + 4 * samples) / learners),
                "rollout/resampled": resampled,
            }
        )
    stage.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*warm_up, *lines]))
    stage.model.mkdir()
    (stage.model / "model.safetensors").write_bytes(b"0" * 1000)
    return path


@pytest.mark.parametrize(
    ("steps", "learners", "engines"), [(VARIED, 1, 0), (ALIKE, 2, 2), (ALIKE, 1, 3)]
)
def test_the_costs_of_a_run_are_found_again(
    steps: Sequence[Sequence[Sequence[int]]], learners: int, engines: int, tmp_path: Path
) -> None:
    run = written_run(tmp_path / "run", steps, learners=learners, engines=engines)
    costs = from_run(run).costs
    assert costs.decode == pytest.approx(DECODE, rel=1e-6)
    assert costs.train == pytest.approx(TRAIN, rel=1e-6)
    assert costs.grading == pytest.approx(GRADING, rel=1e-9)
    assert costs.groups == [group for step in steps for group in step]
    assert (costs.prompt, costs.weight_bytes) == (4.0, 1000)


def test_groups_that_were_dropped_cost_what_they_cost(tmp_path: Path) -> None:
    """One more group for each two that were learned: two thirds are useful."""
    found = from_run(written_run(tmp_path / "run", VARIED, resampled=1))
    assert found.useful == pytest.approx(2 / 3, rel=1e-9)
    assert found.costs.grading == pytest.approx(GRADING, rel=1e-9)
    assert found.costs.decode == pytest.approx(DECODE, rel=1e-6)


def test_steps_of_one_size_are_said_to_tell_little(tmp_path: Path) -> None:
    alike = from_run(written_run(tmp_path / "alike", [[[5, 5]]] * 6))
    assert any(note.startswith("sampling: all steps are of much the same") for note in alike.notes)
    # However little they tell of another size, their own is what they took.
    passes = alike.costs.decode.fixed * 5 + alike.costs.decode.each * 10
    assert passes == pytest.approx(DECODE.fixed * 5 + DECODE.each * 10, rel=1e-6)
    varied = from_run(written_run(tmp_path / "varied", VARIED))
    assert len(varied.notes) == 1


def test_a_run_without_enough_is_refused(tmp_path: Path) -> None:
    short = written_run(tmp_path / "short", VARIED[:2])
    with pytest.raises(ValueError, match="has 2 steps after the first 2, and 4 are needed"):
        from_run(short)
    (short / "rl" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="has no stage rl"):
        from_run(short)
    without = written_run(tmp_path / "without", VARIED)
    (without / "rl" / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model whose size"):
        from_run(without)


def test_no_cost_is_negative_and_one_slow_step_does_not_count() -> None:
    """Larger steps that took less time: all that is known is the mean pass."""
    falling = fit([Observed(1, 10, 2.0), Observed(1, 20, 1.0), Observed(1, 30, 1.5)])
    assert falling == pytest.approx((1.5, 0.0), rel=1e-9)
    steady = [Observed(1, n, 1.0 + 0.1 * n) for n in range(1, 21)]
    slowed = [*steady, Observed(1, 10.0, 40.0)]
    assert fit(slowed)(10) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("rl", "moves"),
    [
        ({}, 3),  # forward, backward, gradients
        ({"minibatches": 2}, 3 + 1),  # π_old is asked for first
        ({"epochs": 2}, 2 * 3 + 1),
        ({"kl": {"placement": "loss"}}, 3 + 1 + 1),  # and π_ref
    ],
)
def test_weights_move_for_every_epoch_and_every_model_that_is_asked(
    rl: dict[str, object], moves: int
) -> None:
    given = recipe(Path("run"), rl={"kl": {"placement": "none"}, "epochs": 1, **rl})
    assert weight_moves(resolve(recipe_from_dict(given)).rl) == moves


def test_a_trial_measures_two_sizes_here(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", sft=None, rl={"group_size": 4, "max_new_tokens": 4})
    found = from_trial(lambda: recipe_from_dict(given), fast=True)
    costs = found.costs
    assert costs.decode(1) > 0
    assert costs.train(1) > 0
    assert costs.grading > 0
    assert {len(group) for group in costs.groups} == {4}
    assert max(map(max, costs.groups)) <= 4
    assert costs.weight_bytes > 1000
    assert "measured here, on cpu" in next(iter(shown(found)))


def test_what_cannot_be_tried_says_why(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", model={"name": str(tmp_path / "nowhere"), "options": {}})
    with pytest.raises(ValueError, match=r"the recipe could not be tried .*nowhere"):
        from_trial(lambda: recipe_from_dict(given), fast=True)


def test_a_real_run_can_be_read(tmp_path: Path) -> None:
    small_run(recipe(tmp_path / "run", sft=None, rl={"steps": 6}))
    found = from_run(tmp_path / "run")
    assert len(found.costs.groups) == 4 * 4  # steps after the first two, prompts
    assert found.costs.decode(4) > 0
