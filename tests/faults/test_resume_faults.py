"""Runs that are killed at random moments and go on: the end is as if nothing had happened.

A few kills here; ``make faults`` takes two hundred. What a kill inside each part of a checkpoint
does is in tests/runs/test_resume.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("resume_harness.py")


def harness(folder: Path, case: str, *, kills: int, mishaps: bool = False) -> dict[str, int]:
    """Run the harness, in processes of its own; what it counted."""
    command = [sys.executable, str(HARNESS), "--case", case, "--kills", str(kills)]
    command += ["--folder", str(folder), *(["--mishaps"] if mishaps else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_grpo_killed_torn_and_terminated(tmp_path: Path) -> None:
    """kill -9, SIGTERM, torn checkpoints, files with random dates and clocks that jump."""
    found = harness(tmp_path / "runs", "grpo", kills=6, mishaps=True)
    assert found["kills"] == 6
    assert found["runs"] >= 1


@pytest.mark.slow
def test_ppo_killed(tmp_path: Path) -> None:
    """With a critic, its warm-up, an adaptive coefficient and a reference that is refreshed."""
    found = harness(tmp_path / "runs", "ppo", kills=4)
    assert found["kills"] == 4


@pytest.mark.slow
def test_adapters_killed_torn_and_terminated(tmp_path: Path) -> None:
    """Those of policy and critic, and a reference of the policy's as they were: all come back."""
    found = harness(tmp_path / "runs", "adapter", kills=4, mishaps=True)
    assert found["kills"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["default", "counted"])
def test_default_settings_killed_in_any_stage(case: str, tmp_path: Path) -> None:
    """SFT, preferences, reward model and RL, saved by time: no more than the interval is lost."""
    found = harness(tmp_path / "runs", case, kills=4)
    assert found["kills"] == 4
    assert found["runs"] >= 1
