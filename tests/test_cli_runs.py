"""``posttrain runs`` and ``posttrain export`` on small runs, as a terminal shows them."""

import json
from pathlib import Path

import pytest
from command_line import Command, command_in
from small_runs import recipe, small_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in the algorithm."""
    folder = tmp_path_factory.mktemp("work") / "runs"
    for algorithm in ("grpo", "rloo"):
        small_run(recipe(folder / algorithm, rl={"algorithm": algorithm, "steps": 2}))
    return folder


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: Path
) -> Command:
    """Run a command in the folder that holds ``runs/``."""
    return command_in(runs.parent, columns=160, monkeypatch=monkeypatch, capsys=capsys)


def test_runs_are_listed(posttrain: Command) -> None:
    code, out, _ = posttrain("runs")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.strip().startswith("grpo")]
    assert line.split()[:6] == ["grpo", "finished", "sft", "rl", "eval", "grpo"]
    assert "% → " in line
    assert "rloo" in out


def test_two_runs_are_compared(posttrain: Command) -> None:
    _, out, _ = posttrain("runs", "runs/grpo", "runs/rloo")
    (line,) = [line for line in out.splitlines() if "rl.algorithm" in line]
    assert line.split() == ["rl.algorithm", '"grpo"', '"rloo"']
    assert "rl.steps" not in out
    assert "run.folder" not in out
    _, out, _ = posttrain("runs", "runs/grpo", "runs/rloo", "--json")
    found = json.loads(out)
    assert found["config"]["rl.algorithm"] == ['"grpo"', '"rloo"']
    assert [run["steps_done"] for run in found["runs"]] == [2, 2]


def test_a_broken_run_takes_one_line_and_hides_no_other(
    posttrain: Command, runs: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "[red]x\x1b"
    broken.mkdir()
    (broken / "run.json").write_text('{"layout": 7}')
    (tmp_path / "good").symlink_to(runs / "grpo")
    code, out, _ = posttrain("runs", tmp_path)
    assert code == 0
    assert "is a run folder of layout 7" in out
    assert "[red]x\\x1b" in out
    assert "\x1b" not in out
    assert "good" in out


def test_no_runs_and_no_folder(posttrain: Command, tmp_path: Path) -> None:
    code, out, _ = posttrain("runs", tmp_path)
    assert (code, "holds no runs" in out) == (0, True)
    code, _, err = posttrain("runs", tmp_path / "nowhere")
    assert (code, "no such folder" in err) == (2, True)


def test_a_run_is_exported(posttrain: Command, runs: Path, tmp_path: Path) -> None:
    code, out, _ = posttrain("export", "runs/grpo", "--out", tmp_path / "a.html")
    assert code == 0
    names = ["a.html", "a-sft-metrics.csv", "a-rl-metrics.csv"]
    assert [line.split("/")[-1] for line in out.splitlines()] == [f"{n}: written" for n in names]
    assert '"rollouts":32' in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a-rl-metrics.csv").read_text().startswith("step,")
    assert (runs / "grpo" / "rl" / "rollouts" / "index.arrow").exists()  # the run left it
    code, _, err = posttrain("export", tmp_path)
    assert (code, "is not a run folder" in err) == (2, True)
