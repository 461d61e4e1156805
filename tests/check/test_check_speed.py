"""The lines of a check that say how fast it is, beside what the device could do."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import TINY

from posttrain.check import check_recipe, resources, speed
from posttrain.check.bench import Bench
from posttrain.check.verdicts import Line
from posttrain.fast import decode
from posttrain.models.roofline import Peak
from posttrain.types import Prompt, Rollout, Turn
from posttrain.types.ways import Missing, Support, Way

RECIPE: dict[str, Any] = {
    "run": {"threads": 1, "stages": ["rl"]},
    "model": {"name": "tiny", "options": TINY},
    "task": {"name": "arithmetic", "num_train": 20, "num_test": 0},
    "rl": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
}
LOST = Missing(what="slots", why="its keys are odd", cost="it waits")


def lines(monkeypatch: pytest.MonkeyPatch, *, speed_of_device: float) -> dict[str, Line]:
    peak = Peak(bytes_per_second=speed_of_device, flops_per_second=speed_of_device, source="")
    monkeypatch.setattr(speed, "measured_peak", lambda device, dtype: peak)
    monkeypatch.setattr(speed, "_seconds_of_a_call", lambda device: 1 / speed_of_device)
    report = check_recipe(RECIPE, fast=True)
    return {line.name: line for line in report.lines if line.area == "resources"}


def test_a_device_that_could_do_no_more_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, speed_of_device=1e3)
    assert [found[name].state for name in ("way", "sampling", "learning")] == ["pass"] * 3
    assert "tokens/s, " in found["sampling"].text
    assert "% of the device's best, " in found["sampling"].text
    assert " s for one optimiser step on " in found["learning"].text
    assert re.search(r"[0-9.]+% of the device's best, [^;]+$", found["learning"].text)


def test_the_time_of_a_stage_is_that_of_its_steps_and_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is in a step is listed, and what is not in the steps is said beside them."""
    monkeypatch.setattr(resources, "_time", lambda seconds: f"{seconds:.9f}")
    looked = {**RECIPE["rl"], "steps": 7, "evaluate_every": 3, "evaluate_problems": 9}
    report = check_recipe({**RECIPE, "rl": {**looked, "minibatches": 2}}, fast=True)
    text = next(line.text for line in report.lines if line.name == "time")
    pattern = (
        r"([0-9.]+): 7 steps of 4 rollouts, ([0-9.]+) each \(rollout ([0-9.]+), grading ([0-9.]+), "
        r"learning ([0-9.]+), of which old log-probs ([0-9.]+)\), and ([0-9.]+) of evaluations; .*"
    )
    found = re.fullmatch(pattern, text)
    assert found is not None, text
    total, step, rollout, grading, learning, old, evaluations = map(float, found.groups())
    assert total == pytest.approx(7 * step + evaluations, abs=1e-6)
    assert step == pytest.approx(rollout + grading + learning, abs=1e-6)
    assert 0 < old < learning


def test_far_below_the_device_is_a_finding_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "replaceable", lambda model: Support("it attends otherwise"))
    found = lines(monkeypatch, speed_of_device=1e15)
    assert [found[name].state for name in ("way", "sampling", "learning")] == ["warn"] * 3
    assert "no continuous batching: it attends otherwise" in found["way"].text
    assert "no continuous batching: it attends otherwise" in found["sampling"].text
    assert "another family" in found["sampling"].fix
    assert "other work on this machine" in found["learning"].fix


@pytest.mark.parametrize(("seconds", "state"), [(10.1, "pass"), (10.3, "warn")])
def test_what_far_below_means(seconds: float, state: str) -> None:
    """Ten times what the fast way takes: 0.12 s at 12 % of the best, and 0.02 s of launches."""
    way = Way(uses=("batches",), without=(LOST,))
    times = (seconds, 0.12, 0.12 / 0.12 + 0.02)
    found = speed.judge("9 tokens/s", best="99", times=times, way=way)
    assert found.state == state
    assert ("its keys are odd" in found.text) == (state == "warn")


def test_the_least_of_learning_counts_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with the shape and the batch of :func:`learning_flops`'s own example."""
    rollouts = [
        Rollout(
            prompt=Prompt(id=str(group), text="", tokens=(1, 2, 3, 4)),
            turns=(
                Turn(tokens=(5, 6, 7), logprobs=(0.0,) * 3, text="", stop_reason="stop", version=0),
            ),
            group=group,
        )
        for group in (0, 1)
        for _ in range(3)
    ]
    shape = speed.Shape(
        weights=1000, layers=2, heads=4, key_heads=2, head_size=8, vocabulary=5, width=32
    )
    peak = Peak(bytes_per_second=10.0, flops_per_second=2.0, source="")
    monkeypatch.setattr(speed, "_peak", lambda bench: peak)
    bench: Any = Bench("check")
    bench.policy = SimpleNamespace(model=torch.nn.Linear(30, 1, bias=False))
    # Operations as in tests/benchmarks/test_learning_work.py; AdamW moves 7 numbers of 4 bytes.
    expected = (6 * 840 * 20 + 6 * 160 * 18 + 768 * 2 * (10 + 3 * 11)) / 2 + 30 * 7 * 4 / 10
    assert speed._least_learning(bench, rollouts, shape=shape) == pytest.approx(expected)
