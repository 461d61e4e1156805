"""Grading workers that are killed under a run: the end is as if nothing had happened."""

import random
from pathlib import Path
from typing import Any

import pytest
from faults.worker_kills import counted, killing_workers
from resumed_runs import go, same
from small_runs import recipe

from posttrain.runs import RunFolder

RL = {"steps": 4, "evaluate_every": 2, "evaluate_problems": 5, "learning_rate": 1e-2}
PREFER = {"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}}


def values(folder: Path, rl: dict[str, Any]) -> dict[str, Any]:
    return recipe(folder, rl={**RL, **rl}, prefer=PREFER, grading={"workers": 2, "seconds": 600.0})


@pytest.mark.slow
@pytest.mark.parametrize("rl", [{}, {"max_lag": 1}], ids=["in turn", "ahead"])
def test_a_run_ends_as_if_no_worker_had_died(rl: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = go(values(tmp_path / "whole", rl))
    assert "reward/workers_died" not in whole.folder.stage("rl").records()[-1]
    for seed in range(2):
        log = tmp_path / f"log-{seed}"
        with killing_workers(random.Random(seed), log):
            done, _ = go(values(tmp_path / f"run-{seed}", rl))
        same(RunFolder(tmp_path / "whole"), done.folder)
        pairs = [
            folder.stage("prefer").path / "pairs.jsonl" for folder in (whole.folder, done.folder)
        ]
        assert pairs[0].read_bytes() == pairs[1].read_bytes()
        found = counted(log)
        assert found["idle workers killed"] > 0
        assert found["busy workers killed"] > 0
        # A worker that was killed last may have answered first, and be found dead by no one.
        died = done.folder.stage("rl").records()[-1]["reward/workers_died"]
        assert 0 < died <= sum(found.values())
