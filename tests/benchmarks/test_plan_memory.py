"""The benchmark of what a plan predicts, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "plan_memory.py"


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


@pytest.mark.slow
def test_what_an_h200_took_is_predicted() -> None:
    """Each of the measured peaks within a tenth, and the docs have the table as it is now."""
    given = [sys.executable, str(SCRIPT), "--show", str(SCRIPT.with_suffix(".json"))]
    table = subprocess.run(given, check=True, capture_output=True, text=True).stdout
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == len(json.loads(SCRIPT.with_suffix(".json").read_text())["rows"])
    for case, *_, ratio in rows:
        assert float(ratio) == pytest.approx(1.0, abs=0.1), case
    assert table in (ROOT / "docs" / "memory.md").read_text()
