"""Skipped steps: counted, kept, left out of every controller, and too many in a row are the end."""

import math

import pytest
from loop_parts import FakeLearner, collected, plan, sampled

from posttrain.algorithms.kl import Coefficient
from posttrain.pipelines import likelihood
from posttrain.pipelines.fit import Fitted, fit
from posttrain.pipelines.guard import Guard, Guarded, Skipped
from posttrain.pipelines.plan import Plan
from posttrain.pipelines.rl import Step, train
from posttrain.protocols import Objective, StepResult
from posttrain.types import Batch

GOOD = StepResult(loss=1.0, gradient_norm=1.0, learning_rate=1.0, metrics={"approx_kl": 0.1})
ILL = StepResult(
    loss=math.nan,
    gradient_norm=math.nan,
    learning_rate=1.0,
    metrics={"approx_kl": math.inf},
    skipped=True,
)
EMPTY = StepResult(loss=0.0, gradient_norm=0.0, learning_rate=1.0, metrics={})
RESULTS = {".": GOOD, "x": ILL, "-": EMPTY}


class Skipping(FakeLearner):
    """Skips the steps that are an ``x`` in its script."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self._script = list(script)

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        super().step(batch, objective)
        return RESULTS[self._script.pop(0)]


def run(script: str, chosen: Plan, guard: Guard, *, totals: list[int] | None = None) -> list[Step]:
    totals = [] if totals is None else totals
    learner = Skipping(script)
    steps = [collected(1.0, 0.0, 1.0, 0.0)] * (len(script) // (chosen.epochs * chosen.minibatches))
    reports: list[Step] = []
    train(
        sampled(learner, steps),
        Guarded(learner, guard),
        plan=chosen,
        sync=lambda version: None,
        pad_token=0,
        seed=0,
        on_step=lambda step: (reports.append(step), totals.append(guard.total), guard.check()),
    )
    return reports


def test_skipped_steps_are_counted_and_their_batches_kept() -> None:
    kept: list[Skipped] = []
    totals: list[int] = []
    reports = run(".xx-x..x", plan(), Guard(most=4, keep=kept.append), totals=totals)
    assert [report.metrics()["train/skipped"] for report in reports] == [0, 1, 1, 0, 1, 0, 0, 1]
    assert totals == [0, 1, 2, 2, 3, 3, 3, 4]
    assert [(each.step, each.number) for each in kept] == [(2, 1), (3, 1), (5, 1), (8, 1)]
    assert all(each.batch.weights is not None for each in kept)  # as the learner got it


def test_minibatches_are_kept_by_their_number() -> None:
    kept: list[Skipped] = []
    reports = run(".x..x...", plan(minibatches=2, epochs=2), Guard(keep=kept.append))
    assert [(each.step, each.number) for each in kept] == [(1, 2), (2, 1)]
    assert [len(each.batch.tokens) for each in kept] == [2, 2]
    assert [report.metrics()["train/optimiser_steps"] for report in reports] == [3, 3]
    assert reports[0].metrics()["loss/total"] == 1.0


@pytest.mark.parametrize(("script", "num_steps"), [("xxx.", 3), (".x.xx-x", 7), ("xx.xx.xxx", 9)])
def test_three_in_a_row_stop_the_run_after_they_are_logged(script: str, num_steps: int) -> None:
    """A batch without an active token neither counts nor starts the count anew."""
    guard, logged = Guard(where="runs/x/rl/skipped"), []
    guard.keep = lambda skipped: logged.append(skipped.step)
    with pytest.raises(RuntimeError) as stopped:
        run(script, plan(), guard)
    assert logged[-1] == num_steps
    text = str(stopped.value)
    assert "last 3 optimiser steps" in text
    assert "max_skipped = 3" in text
    assert "kept in runs/x/rl/skipped" in text
    assert "learning_rate" in text
    run(".x.x-x..xx.", plan(), Guard())


def test_nothing_that_is_steered_by_numbers_is_steered_by_those_of_a_skipped_step() -> None:
    """Neither β nor the penalty, and an infinite KL does not end the epochs."""
    steered = plan(
        kl_placement="reward",
        kl=Coefficient(value=0.5, rule="doubling", target=0.01),
        penalty=Coefficient(value=2.0, rule="doubling", target=1e-6),
        kl_stop=1.0,
        epochs=2,
    )
    reports = run("xx", steered, Guard())
    assert reports[0].metrics()["train/skipped"] == 2
    assert (reports[0].state.kl.value, reports[0].state.penalty.value) == (0.5, 2.0)
    assert reports[0].state.step == 1
    reports = run("x.", steered, Guard())
    assert (reports[0].state.kl.value, reports[0].state.penalty.value) == (1.0, 4.0)


def test_supervised_stages_are_guarded_too() -> None:
    rows = [((5, 6, 7), (False, True, True))] * 5
    log: list[tuple[int, float, int]] = []
    kept: list[Skipped] = []
    guard = Guard(most=2, keep=kept.append)

    def on_step(fitted: Fitted) -> None:
        log.append((fitted.step, fitted.metrics()["train/skipped"], guard.total))
        guard.check()

    with pytest.raises(RuntimeError, match="last 2 optimiser steps"):
        fit(
            likelihood.batches(rows, 1, steps=len(rows), pad_token=0, seed=0),
            Guarded(Skipping("x.xx."), guard),
            objective=likelihood.likelihood,
            on_step=on_step,
        )
    assert log == [(1, 1, 1), (2, 0, 1), (3, 1, 2), (4, 1, 3)]
    assert [(each.step, each.number) for each in kept] == [(1, 1), (3, 1), (4, 1)]
