"""DPO and its kin in one script, with a few steps of each: the table is there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "dpo.py"


@pytest.mark.slow
def test_the_script_leaves_a_table(tmp_path: Path) -> None:
    folder, only = tmp_path / "dpo", ["DPO", "KTO"]
    words = [sys.executable, str(SCRIPT), "--folder", str(folder), "--quick", "--only", *only]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "summary.json").read_text())
    rounds = [f"DPO, on-policy, round {number}" for number in (1, 2, 3)]
    assert list(rows) == ["SFT", *only, *rounds]
    assert rows["SFT"]["kl"] == pytest.approx(0, abs=1e-4)  # π is π_ref, sampled and scored apart
    assert all(name in done.stdout for name in rows)
