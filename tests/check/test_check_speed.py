"""The lines of a check that say how fast it is, beside what the device could do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import TINY

from posttrain.check import check_recipe, speed
from posttrain.check.bench import Bench
from posttrain.check.verdicts import Line
from posttrain.models.roofline import Peak
from posttrain.rollout.engines import native
from posttrain.types import Completion, Prompt, Rollout
from posttrain.types.ways import Missing, Verdict, Way

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
    assert " % of the device's best, " in found["sampling"].text
    assert " s for a step of " in found["learning"].text


def test_far_below_the_device_is_a_finding_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "replaceable", lambda model: Verdict("it attends otherwise"))
    found = lines(monkeypatch, speed_of_device=1e15)
    assert [found[name].state for name in ("way", "sampling", "learning")] == ["warn"] * 3
    assert "no slots: it attends otherwise" in found["way"].text
    assert "no slots: it attends otherwise" in found["sampling"].text
    assert "another family" in found["sampling"].fix
    assert "other work on this machine" in found["learning"].fix


@pytest.mark.parametrize(("seconds", "state"), [(10.1, "pass"), (10.3, "warn")])
def test_what_far_below_means(seconds: float, state: str) -> None:
    """Ten times what the fast way takes: 0.12 s at 12 % of the best, and 0.02 s of launches."""
    way = Way(uses=("batches",), without=(LOST,))
    found = speed.judge("9 tokens/s", times=(seconds, 0.12 / 0.12, 0.02), way=way)
    assert found.state == state
    assert ("its keys are odd" in found.text) == (state == "warn")


def test_the_least_of_learning_counts_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with the shape and the batch of :func:`learning_flops`'s own example."""
    rollouts = [
        Rollout(
            prompt=Prompt(id=str(group), text="", tokens=(1, 2, 3, 4)),
            completion=Completion(
                tokens=(5, 6, 7), logprobs=(0.0,) * 3, text="", stop_reason="stop", version=0
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
