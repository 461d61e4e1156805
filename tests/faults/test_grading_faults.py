"""A reward that fails in every way at once: training finishes, and the metrics show just that."""

import os
import time
from pathlib import Path

import pytest
from small_runs import TINY

import posttrain

NUM_PROMPTS = 100
RAISES, NAN, HANGS, DIES = {3, 23, 43, 63, 83}, {7}, {11}, {13}


def faulty(completion: str, number: int) -> float:
    """Raises on 5 %, returns NaN on 1 %, hangs on 1 %, and kills its process on one prompt."""
    if number in RAISES:
        raise ValueError(f"cannot grade {number}")
    if number in NAN:
        return float("nan")
    if number in HANGS:
        time.sleep(600)
    if number in DIES:
        os.kill(os.getpid(), 9)
    return -0.1 * len(completion)


@pytest.mark.slow
def test_training_finishes_and_the_metrics_show_exactly_those_shares(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "number": n} for n in range(NUM_PROMPTS)]
    run = posttrain.rl(
        prompts=rows,
        reward=faulty,
        grading={"workers": 2, "seconds": 5.0},
        algorithm="reinforce_baseline",
        steps=2,
        prompts_per_step=NUM_PROMPTS,
        max_new_tokens=4,
        learning_rate=1e-3,
        model_options={"options": TINY},
        folder=tmp_path / "run",
    )
    for step, record in enumerate(run.folder.stage("rl").records(), start=1):
        assert record["reward/invalid"] == pytest.approx(0.08)
        states = {
            row["prompt_id"]: row["state"]
            for row in run.samples(step, limit=NUM_PROMPTS)
            if row["state"] != "ok"
        }
        assert states == {
            **{f"train-{n}": "invalid" for n in RAISES | NAN},
            **{f"train-{n}": "timeout" for n in HANGS},
            **{f"train-{n}": "crashed" for n in DIES},
        }
        share = {"invalid": 0.06, "timeout": 0.01, "crashed": 0.01}
        for state, expected in share.items():
            assert record[f"reward/state/{state}"] == pytest.approx(expected)
