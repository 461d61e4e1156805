"""The notebooks run from the first cell to the last, and come to what they say."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
SCRIPT = ROOT / "scripts" / "site" / "run_notebooks.py"
# What the last cell leaves, and what holds of it.
RESULTS = {
    "first_reward": "assert rewards[-1] > 0.7 and learned[-1] > learned[0] + 0.2",
    "own_data": "assert before < 0.6 and after > 0.8",
    "preferences": "assert after.value > before.value + 0.2; "
    "assert verdict['accuracy'] > 0.7; assert scores[-1] > scores[0]",
    "own_algorithm": "assert mean[-1] > 0.5 and median[-1] > 0.5",
}


def test_each_has_a_result_that_is_looked_at_and_is_committed_with_its_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == RESULTS.keys()
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert path.stat().st_size < 110_000
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells)
        counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
        assert counts == list(range(1, len(counts) + 1)), "run: scripts/site/run_notebooks.py"
        kinds = {each["output_type"] for cell in cells for each in cell.get("outputs", [])}
        assert "error" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_runs_and_comes_to_its_result(name: str, tmp_path: Path) -> None:
    """In a process of its own, as Jupyter's client leaves sockets open."""
    pytest.importorskip("nbclient", reason="make site installs it")
    read = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    cell = {"cell_type": "code", "id": "asked", "metadata": {}, "outputs": []}
    read["cells"].append({**cell, "execution_count": None, "source": RESULTS[name]})
    (tmp_path / "asked.ipynb").write_text(json.dumps(read), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--check", "asked.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_page_of_a_notebook() -> None:
    """Text, code and what it printed; backticks inside do not end a block."""
    script = runpy.run_path(str(ROOT / "scripts" / "site" / "notebook_pages.py"))
    text = script["notebook_page"](NOTEBOOKS / "first_reward.ipynb")
    assert text.startswith("# First reward\n")
    assert "```python\ndef in_digits(" in text
    assert 'src="data:image/png;base64,' in text
    assert "\x1b" not in text
    assert script["fenced"]("a\n```\nb", "text") == "````text\na\n```\nb\n````"
