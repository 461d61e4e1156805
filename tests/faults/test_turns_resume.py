"""A run of several turns that was cut and resumed is the run that was not, bit for bit."""

from pathlib import Path

import pytest
from resumed_runs import cut, given, go, same

from posttrain.runs import read_rollouts


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("algorithm", ["turn_grpo", "ppo"])
def test_a_resumed_run_of_several_turns_is_the_same(
    tmp_path: Path, algorithm: str, max_lag: int
) -> None:
    rl = {"algorithm": algorithm, "steps": 4, "save_every": 2, "max_lag": max_lag}
    task = {"name": "arithmetic", "env": "faults.turns_env:AsksAgain"}
    whole, _ = go(given(tmp_path / "whole", rl, task=task, sft=None, eval=None))
    values = given(tmp_path / "cut", rl, task=task, sft=None, eval=None)
    cut(values, save=2)
    resumed, _ = go(values, resume=True)
    same(whole.folder, resumed.folder, stages=("rl",))
    rows = read_rollouts(whole.folder.stage("rl").rollouts)
    assert {len(row["turns"]) for row in rows} == {3}
    assert {row["turns"][0]["reward"] for row in rows} == {0.0, 0.5}
