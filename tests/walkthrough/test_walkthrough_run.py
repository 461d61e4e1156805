"""``posttrain walkthrough``: the files it writes and the page that reads them."""

import json
from pathlib import Path

import pytest
import torch

from posttrain import walkthrough
from posttrain.walkthrough import report
from posttrain.walkthrough.settings import grid

KEYS = {
    "delta",
    "loss",
    "kl",
    "reward",
    "seeds",
    "final_reward_mean",
    "final_reward_std",
    "exact_sorted",
    "gradient_variance",
}
DOCS = Path(__file__).parents[2] / "docs"


def strict(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.slow
def test_a_quick_run_writes_its_files(tmp_path, capsys):
    num_threads = torch.get_num_threads()
    rows = walkthrough.run(out=tmp_path / "new" / "folder", quick=True, seeds=2)
    folder = tmp_path / "new" / "folder"
    written = json.loads((folder / "results.json").read_text("utf-8"), parse_constant=strict)
    assert written == rows
    assert len(rows) == len(grid(quick=True))
    assert all(row.keys() >= KEYS and row["seeds"] == 2 for row in rows)
    assert all(0 <= row["exact_sorted"] <= 1 and row["final_reward_std"] >= 0 for row in rows)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    log = (folder / "log.txt").read_text("utf-8")
    assert log.count("epoch ") == 1000
    assert log.count("    response ") == 200 * 30
    assert "response [4, 2, 1]  log_probs [-0.229, -1.052, -2.869]  reward 2  delta -0.300" in log
    printed = capsys.readouterr().out
    assert "centered against rewards" in printed
    assert "…" not in printed  # no column was cut at 80 characters
    assert torch.get_num_threads() == num_threads


def test_as_published_prints_and_writes(tmp_path, capsys):
    rows = walkthrough.run_as_published(out=tmp_path)
    assert json.loads((tmp_path / "as_published.json").read_text("utf-8")) == rows
    assert "Every number is equal to the published one." in capsys.readouterr().out


def test_one_seed_has_no_spread(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        walkthrough.run(out=tmp_path, quick=True, seeds=1)


def test_the_page_shows_the_tables_of_its_results():
    rows = json.loads((DOCS / "walkthrough_results.json").read_text("utf-8"))
    page = (DOCS / "walkthrough.md").read_text("utf-8")
    for grid_ in report.grids(rows):
        assert report.markdown_table(grid_) in page, f"out of date: {grid_.title}"
