"""The benchmark of what a plan predicts, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


@pytest.mark.slow
def test_steps_on_a_cpu_take_what_is_predicted(tmp_path: Path) -> None:
    """Full fine-tuning and PPO of the tiny model, within a tenth."""
    file = tmp_path / "found.json"
    given = [sys.executable, str(SCRIPT), "--quick", "--ways", "full", "PPO", "--json", str(file)]
    subprocess.run(given, check=True)
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == ["tiny, full", "tiny, PPO"]
    for row in rows:
        assert row["ratio"] == pytest.approx(1.0, abs=0.1)
