"""The whole road in one script, with a few steps of each: the table and the picture are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "rlhf.py"


@pytest.mark.slow
def test_the_script_leaves_a_table_and_a_picture(tmp_path: Path) -> None:
    folder = tmp_path / "rlhf"
    words = [sys.executable, str(SCRIPT), "--folder", str(folder), "--quick", "--seed", "3"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    rows = summary["table"]
    assert list(rows) == ["SFT", *(f"{a}, β = {b}" for a in ("PPO", "GRPO") for b in (0.01, 0.1))]
    assert rows["SFT"]["kl"] == pytest.approx(0, abs=1e-4)  # π is π_ref, sampled and scored apart
    assert all(row["kl"] > 0.005 for name, row in rows.items() if name != "SFT")
    assert summary["seed"] == 3
    assert (folder / "goodhart.png").read_bytes().startswith(b"\x89PNG")
    for name in rows:
        assert name in done.stdout
