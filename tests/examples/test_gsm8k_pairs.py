"""The conversion of GSM8K's example solutions, on a made-up file."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from posttrain.data.preference_sets import Ranked, read_preferences

FILE = Path(__file__).parents[2] / "examples" / "gsm8k_pairs.py"


def answer(solution: str, is_correct: bool) -> dict:
    return {"is_correct": is_correct, "solution": solution}


def record(question: str, **answers: dict) -> dict:
    return {"question": question, "ground_truth": "not a model's", **answers}


RIGHT = "He has 2+3=<<2+3=5>>5\nA: 5"
RECORDS = [
    # Two models say the same, so three solutions are left: one right, two wrong, two pairs.
    record(
        "Janet’s 2 + 3?",
        small=answer(RIGHT, True),
        large=answer(RIGHT, True),
        third=answer("A: 6", False),
        fourth=answer("A: 23", False),
    ),
    record("All right?", small=answer("A: 1", True), large=answer("So A: 1", True)),
    # The same solution to another question is another row.
    record("1 + 5?", small=answer("A: 6", True), large=answer("A: 7", False)),
]


def convert(monkeypatch: pytest.MonkeyPatch, folder: Path, *, records: list[dict]) -> Path:
    """What the script writes when it is called with these records."""
    source, target = folder / "solutions.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(FILE), str(source), str(target)])
    runpy.run_path(str(FILE), run_name="__main__")
    return target


def test_solutions_become_rows_that_make_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="1 of 3 prompts are left without a pair"):
        target = convert(monkeypatch, tmp_path, records=RECORDS)
    expected = "7 rows, 3 questions\n2 questions with mixed outcomes, 3 pairs\n"
    assert capsys.readouterr().out == f"{target}: {expected}"
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert rows[0] == {"prompt": "Janet’s 2 + 3?\n", "completion": RIGHT, "score": 1.0}
    assert [row["score"] for row in rows] == [1, 0, 0, 1, 1, 1, 0]
    with pytest.warns(UserWarning, match="1 of 3 prompts are left without a pair"):
        sets = read_preferences(target)
    assert sets == [
        Ranked(prompt="Janet’s 2 + 3?\n", completions=(RIGHT, "A: 6")),
        Ranked(prompt="Janet’s 2 + 3?\n", completions=(RIGHT, "A: 23")),
        Ranked(prompt="1 + 5?\n", completions=("A: 6", "A: 7")),
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (record("Why?"), r"solutions\.jsonl:4: no model's solution; expected columns such as"),
        (record("", small=answer("A: 1", True)), r"solutions\.jsonl:4: 'question' is empty"),
        (record("Why?", small={"is_correct": True}), r"solutions\.jsonl:4: small: no column 'sol"),
        (
            record("Why?", small={"is_correct": "yes", "solution": "A: 1"}),
            r"solutions\.jsonl:4: small: 'is_correct' must be true or false",
        ),
        (
            record("Why?", small=answer("A: 1", True), large=answer("A: 1", False)),
            r"solutions\.jsonl:4: large: the same solution is right in one place and wrong",
        ),
    ],
)
def test_faults_name_the_line_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(monkeypatch, tmp_path, records=[*RECORDS, fault])
    assert not (tmp_path / "out.jsonl").exists()


def test_it_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), "one.jsonl"])
    with pytest.raises(SystemExit, match=r"usage: .*gsm8k_pairs\.py SOLUTIONS\.jsonl OUT\.jsonl"):
        runpy.run_path(str(FILE), run_name="__main__")
