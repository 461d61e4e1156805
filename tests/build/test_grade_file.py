"""``posttrain grade``: every row comes back with its verdict, and mistakes name the line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.build.grade_file import grade_file
from posttrain.cli.app import app
from posttrain.config import GradingSection
from posttrain.rewards.pool import TRIES

SOURCE = """
import os, time

def moody(completion, mood, *, loud: bool = False):
    if mood == "raises":
        raise ValueError(completion)
    if mood == "hangs":
        time.sleep(60)
    if mood == "dies":
        os._exit(1)
    return 2.0 if loud else 1.0
"""
MOODS = ("fine", "raises", "hangs", "dies", "fine")


@pytest.fixture
def moods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a row for each mood, and the reward that acts on them."""
    (tmp_path / "mood_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return written(tmp_path, [{"completion": f"c{n}", "mood": m} for n, m in enumerate(MOODS)])


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_every_row_comes_back_with_its_verdict(moods: Path, tmp_path: Path) -> None:
    limits = GradingSection(workers=2, seconds=2.0)
    seen: list[int] = []
    found = grade_file(
        "mood_rewards:moody", moods, grading=limits, progress=lambda done, total: seen.append(done)
    )
    assert found.states == {"ok": 2, "invalid": 1, "timeout": 1, "crashed": 1}
    assert found.mean == 1.0
    assert seen == [1, 2, 3, 4, 5]
    found.write(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in rows] == ["c0", "c1", "c2", "c3", "c4"]
    assert [row["state"] for row in rows] == ["ok", "invalid", "timeout", "crashed", "ok"]
    assert [row["value"] for row in rows] == [1.0, None, None, None, 1.0]
    assert "ValueError: c1" in rows[1]["reason"]
    assert "no answer within 2 s" in rows[2]["reason"]


def test_the_command_takes_the_rewards_options(moods: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["grade", "mood_rewards:moody", str(moods), "--out", str(out), "--seconds", "0.5"]
    done = CliRunner().invoke(app, [*words, "--loud", "true"])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text().splitlines()[0])["value"] == 2.0
    for line in ("timeout", "crashed", "invalid", "the first broken one: reward 'mood_rewards:"):
        assert line in done.output


def test_a_file_of_which_every_row_is_broken_is_an_error(
    moods: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, the most frequent reason first; what was asked for is written all the same."""
    moods_of = ["dies", "raises", "raises", "raises"]
    written(tmp_path, [{"completion": "c", "mood": mood} for mood in moods_of])
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out.jsonl"
    words = ["grade", "mood_rewards:moody", str(moods), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ValueError)
    said = str(done.exception)
    assert "every row of" in said
    first, second = said.index("raised ValueError: c"), said.index("ended its worker process")
    assert first < second
    assert "(3 of 4)" in said
    assert "(1 of 4)" in said
    assert len(out.read_text().splitlines()) == 4
    assert "mean score (ok only)" not in done.output  # of nothing
    assert re.search(rf"workers that died and were replaced +{TRIES}\b", done.output)
    written(tmp_path, [{"completion": "c", "mood": mood} for mood in [*moods_of, "fine"]])
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("rows", "reward", "message"),
    [
        (
            [{"answer": "5"}],
            "exact",
            r"rows.jsonl:1: no column 'completion' .*; add it or rename one$",
        ),
        ([{"completion": 5, "answer": "5"}], "exact", r"rows.jsonl:1: 'completion' must be text"),
        (
            [{"completion": "5", "answer": "5"}, {"completion": "5", "gold": "5"}],
            "exact",
            r"^reward 'exact': needs the column 'answer', which prompt '.*rows.jsonl:2' does not "
            r"have \(its other columns: 'gold'\); add the column to the data, or choose "
            r"another reward$",
        ),
        (
            [{"completion": "5", "answr": "5"}],
            "exact",
            r"\(its other columns: 'answr'\); rename 'answr' to 'answer' there, add the column "
            r"to the data, or",
        ),
        ([{"completion": "5"}], "length", r"the reward wants 'num_tokens'"),
        ([{"completion": "5", "answer": "5"}], "exakt", r"did you mean 'exact'"),
    ],
)
def test_a_mistake_names_the_line(
    rows: list[dict[str, Any]], reward: str, message: str, tmp_path: Path
) -> None:
    options = {"target": 3} if reward == "length" else {}
    with pytest.raises(ValueError, match=message):
        grade_file(reward, written(tmp_path, rows), options=options)


def test_it_says_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every row of a reward that extracts an answer, and on the screen of the wrong ones."""
    texts = ["so 72", "72, for 2 [bold]eggs", "none"]
    rows = written(tmp_path, [{"completion": text, "answer": "72"} for text in texts])
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["grade", "numeric", str(rows), "--out", str(out)])
    assert [json.loads(line)["read"] for line in out.read_text().splitlines()] == ["72", "2", None]
    assert "row 2 reads as '2', the answer is '72'" in done.output
    assert "row 3 reads as nothing, the answer is '72'" in done.output
    assert "row 1" not in done.output
    words = ["grade", "exact", str(rows), "--extract", "auto"]
    said = "row 2 reads as '72, for 2 [bold]eggs', the answer is '72'"
    assert said in CliRunner().invoke(app, words).output
    code = [{"completion": "print(1)", "num_tokens": 3}]
    grade_file("length", written(tmp_path, code), options={"target": 3}).write(out)
    assert "read" not in json.loads(out.read_text())


def test_an_empty_completion_is_a_wrong_answer_and_no_mistake(tmp_path: Path) -> None:
    found = grade_file("exact", written(tmp_path, [{"completion": "", "answer": "5"}]))
    assert (found.states, found.mean) == ({"ok": 1}, 0.0)


@pytest.mark.parametrize("spelling", ["same", "dotted", "symlink", "hard link", "Python"])
def test_the_rows_are_never_written_over(spelling: str, tmp_path: Path) -> None:
    """However their path is written; another file may be there already."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "a", "answer": "b"}\n')
    before = rows.read_bytes()
    (tmp_path / "folder").mkdir()
    out = {"dotted": tmp_path / "folder" / ".." / "rows.jsonl"}.get(spelling, rows)
    if spelling == "symlink":
        out = tmp_path / "link.jsonl"
        out.symlink_to(rows)
    elif spelling == "hard link":
        out = tmp_path / "link.jsonl"
        out.hardlink_to(rows)
    if spelling == "Python":
        with pytest.raises(ValueError, match="would be overwritten"):
            grade_file("exact", rows, grading=GradingSection(workers=0)).write(out)
    else:
        done = CliRunner().invoke(app, ["grade", "exact", str(rows), "--out", str(out)])
        assert "is the file that is read" in str(done.exception)
        assert "--out graded.jsonl" in str(done.exception)
    assert rows.read_bytes() == before
    other = tmp_path / "graded.jsonl"
    other.write_text("old")
    done = CliRunner().invoke(app, ["grade", "exact", str(rows), "--out", str(other)])
    assert done.exit_code == 0, done.output
    assert json.loads(other.read_text())["value"] == 0.0


def test_full_marks_of_a_reward_that_gives_more_than_one_are_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10, 6.67 and 0: two rows above 1 are not two rows with full marks."""
    (tmp_path / "ten_rewards.py").write_text("def ten(completion):\n    return float(completion)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    rows = written(tmp_path, [{"completion": text} for text in ("10", "6.67", "0")])
    given = ["grade", "ten_rewards:ten", str(rows), "--workers", "0"]
    shown = CliRunner().invoke(app, given).output
    assert "no maximum declared; largest seen 10" in shown
    assert "ten_rewards:ten gave up to 10 and declares no maximum" in shown
    assert "maximum = …" in shown
    shown = CliRunner().invoke(app, [*given, "--maximum", "10"]).output
    assert re.search(r"full marks +1\b", shown)
    assert "declares no maximum" not in shown
    for text, full in (("1", 1), ("0.5", 0)):  # what stays within 1 is taken to be of 1
        found = grade_file("ten_rewards:ten", written(tmp_path, [{"completion": text}]))
        assert found.full_marks == full


@pytest.mark.parametrize("given", [None, -1, 1e18, "many", [3]])
def test_a_number_of_tokens_that_is_none_is_named(given: object, tmp_path: Path) -> None:
    rows = written(tmp_path, [{"completion": "5", "answer": "5", "num_tokens": given}])
    with pytest.raises(ValueError, match=r"rows.jsonl:1: num_tokens is .*; give a whole number"):
        grade_file("exact", rows)


def test_limits_are_those_of_a_recipe(tmp_path: Path) -> None:
    rows = written(tmp_path, [{"completion": "5", "answer": "5"}])
    done = CliRunner().invoke(app, ["grade", "exact", str(rows), "--seconds", "inf"])
    assert "grading.seconds: must be a number above 0, got inf" in str(done.exception)
