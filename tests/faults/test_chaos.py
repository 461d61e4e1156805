"""A kill of each kind and two more under a run on a two-node cluster; ``make chaos`` takes 200."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = {"engine", "grading worker", "learner rank", "driver", "node", "engine hangs"}
CHAOS = Path(__file__).parent / "chaos.py"


@pytest.mark.cluster
@pytest.mark.slow
def test_what_is_killed_comes_back_and_the_ledger_is_exact(tmp_path: Path) -> None:
    asked = ["--kills", "8", "--steps", "30", "--deadline", "240", "--folder", str(tmp_path / "f")]
    done = subprocess.run(
        [sys.executable, str(CHAOS), *asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == 8
    assert {kind for kind in KINDS if figures[kind]} == KINDS
    assert figures["trained"] == 180 * figures["runs"]
