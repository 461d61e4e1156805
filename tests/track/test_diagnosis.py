"""The diagnosis: each rule on histories written by hand, and what becomes of a finding."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from diagnosis_cases import HEALTHY, ILL, SETUP, course, healthy, ramp
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from posttrain.config.describe import find_field
from posttrain.track import ConsoleTracker, JsonlTracker, Several, Stage
from posttrain.track.diagnosis import RULES, Diagnosing, Diagnosis, Finding, Setup, read_findings
from posttrain.track.diagnosis.page import diagnosis_page

Records = Sequence[Mapping[str, float]]


def run(records: Records, setup: Setup = SETUP) -> list[Finding]:
    """What is found on the way, with what is over."""
    diagnosis = Diagnosis(setup)
    for step, record in enumerate(records, start=1):
        diagnosis.feed(step, record)
    return diagnosis.findings


def test_every_rule_has_its_history() -> None:
    assert list(ILL) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_an_illness_is_reported_once(name: str) -> None:
    (finding,) = run([*ILL[name], *ILL[name][-1:] * 5])
    assert finding.rule == name
    assert finding.step >= 5
    assert finding.remedy == RULES[name].remedy
    assert finding.until is None


@pytest.mark.parametrize("name", RULES)
def test_it_is_over_when_it_has_passed_and_may_come_again(name: str) -> None:
    records = ILL[name]
    first, second = run([*records, *[healthy(name)] * 60, *records])
    assert (first.rule, second.rule) == (name, name)
    assert first.until is not None
    assert first.until < second.step
    assert first.until > len(records)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_noise_is_no_finding(name: str) -> None:
    assert run(HEALTHY[name]) == []


@pytest.mark.parametrize("name", RULES)
def test_a_single_bad_step_is_no_finding(name: str) -> None:
    """The worst step of the illness, alone among healthy ones."""
    assert run([healthy(name)] * 25 + [ILL[name][-1]] + [healthy(name)] * 25) == []


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [(0.0, "all wrong"), (1.0, "all right"), (0.5, "each prompt is always right or always wrong")],
)
def test_no_signal_says_which(mean: float, verdict: str) -> None:
    shares = {"rollout/groups_without_signal": 1.0, "reward/std": 0.5 if mean == 0.5 else 0.0}
    (finding,) = run([{**shares, "reward/mean": mean, "reward/part/exact": mean}] * 6)
    assert finding.text == (
        f"nothing to learn from: 100% of groups agree: {verdict} (exact {mean:.2f})"
    )
    (alone,) = run([{"reward/std": 0.0, "reward/mean": 1.0}] * 6, Setup())
    assert alone.text == "nothing to learn from: all rewards are equal: all right (reward 1.00)"


def test_broken_graders_are_not_called_agreement() -> None:
    broken = {"rollout/groups_without_signal": 1.0, "reward/std": 0.0, "reward/invalid": 1.0}
    assert [finding.rule for finding in run([broken] * 8)] == ["grader_failing"]


def test_hacking_is_seen_in_the_held_out_accuracy() -> None:
    """Two evaluations below the best one, while the reward rises; one alone is luck."""

    def points(*accuracies: float) -> list[dict[str, float]]:
        steps = course(reward__mean=ramp(0.2, 0.9, spread=0.02))
        return [
            {**record, "eval/accuracy": accuracies[at // 8]} if at % 8 == 7 else record
            for at, record in enumerate(steps)
        ]

    (finding,) = run([{"eval/accuracy": 0.5}, *points(0.6, 0.7, 0.5, 0.4, 0.3)])
    assert finding.rule == "hacking"
    assert finding.text.endswith("while held-out accuracy fell from 0.70 to 0.50")
    assert run([{"eval/accuracy": 0.5}, *points(0.6, 0.7, 0.5, 0.7, 0.6)]) == []


def test_what_is_cut_on_purpose_is_no_drift() -> None:
    cut = Setup(rounding=float("inf"))
    assert run(course(mismatch__mean=ramp(0.01, 3.0)), cut) == []


def test_a_drift_is_seen_before_it_is_large() -> None:
    (finding,) = run(course(mismatch__mean=ramp(1e-5, 8e-4)))
    assert finding.rule == "drift"


METRICS = sorted({metric for records in ILL.values() for metric in records[0]} | {"eval/accuracy"})
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=16)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from(METRICS), VALUES), max_size=40))
def test_no_history_breaks_a_rule(records: list[dict[str, float]]) -> None:
    run(records)
    run([record for record in records for _ in range(6)], Setup())


def test_a_long_run_forgets_its_middle_and_keeps_its_start() -> None:
    diagnosis = Diagnosis(SETUP)
    for step in range(1, 3001):
        diagnosis.feed(step, {"objective/entropy": 0.8 if step < 2990 else 0.02})
    assert len(diagnosis._history) == 500
    assert [finding.step for finding in diagnosis.findings] == [2993]


def test_findings_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    """One line when it begins, one more when it is over; a torn one is left out."""
    tracker = JsonlTracker(Stage(name="rl", folder=tmp_path, total_steps=30))
    diagnosing = Diagnosing(tracker, tmp_path)
    for step in range(1, 31):
        diagnosing.log(step, {"rollout/truncated": float(step <= 10)})
    diagnosing.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 30
    path = tmp_path / "diagnosis.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["finding"], line["until"]) for line in lines] == [
        (5, "all_truncated", None),
        (5, "all_truncated", 21),
    ]
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    assert read_findings(path) == lines[1:]
    assert read_findings(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cut", [0, 4, 5, 12, 25])
def test_findings_go_on_where_a_run_does(tmp_path: Path, cut: int) -> None:
    """The file of a run that was cut back and goes on is that of one that was not, to the byte."""
    records = [
        {"step": step, "rollout/truncated": float(step <= 10 or step > 40)} for step in range(1, 51)
    ]

    def log(diagnosing: Diagnosing, rows: list[dict[str, float]]) -> None:
        for row in rows:
            diagnosing.log(int(row["step"]), {"rollout/truncated": row["rollout/truncated"]})

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    log(Diagnosing(Several([]), tmp_path / "whole"), records)
    log(Diagnosing(Several([]), tmp_path / "cut"), records[:30])  # more than its checkpoint saw
    told: list[str] = []
    again = Diagnosing(Several([]), tmp_path / "cut", tell=[told.append])
    again.replay(records[:cut])
    assert told == []
    log(again, records[cut:])
    files = [tmp_path / name / "diagnosis.jsonl" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_bytes().splitlines()) == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_shows_a_finding_and_goes_on(terminal: bool, tmp_path: Path) -> None:
    """Below the panel, or on a line of its own between those of the steps."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200, _environ={})
    stage = Stage(name="rl", folder=tmp_path, total_steps=8)
    shown = ConsoleTracker(stage, console=console, every_steps=4)
    diagnosing = Diagnosing(shown, tmp_path, tell=[shown.note])
    for step in range(1, 9):
        diagnosing.log(step, {"reward/mean": 0.5, "rollout/truncated": 1.0})
    shown.note("[bold]\x1b[2J")  # nothing in a remark acts on a terminal
    diagnosing.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    said = "! step 5: 100% of the completions are cut by the length limit. Raise rl.max_new_tokens"
    if terminal:
        panel, below = text.rpartition("╭")[2].split("╯")
        assert "step 8/8" in panel
        assert below.strip().startswith(said)
        return
    assert text.count(said) == 1
    starts = [line.split("  ")[0] for line in text.splitlines()]
    assert starts[:2] == ["rl 1/8", "rl 4/8"]
    assert starts[2].startswith(said)
    assert starts[3] == "rl 8/8"
    assert starts[4] == "! [bold]\\x1b[2J"


def test_many_remarks_do_not_outgrow_the_terminal(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, _environ={})
    shown = ConsoleTracker(Stage(name="rl", folder=tmp_path, total_steps=8), console=console)
    for number in range(9):
        shown.note(f"remark {number}")
    shown.close()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rpartition("╯")[2]
    assert re.findall(r"remark \d", last) == [f"remark {number}" for number in range(5, 9)]


def test_remedies_name_keys_that_exist() -> None:
    for rule in RULES.values():
        for key in re.findall(r"\b(?:rl|sft|run)\.[a-z_.]*[a-z]", rule.remedy):
            assert find_field(key.split("."))[0] == key


def test_the_page_is_what_the_rules_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "diagnosis.md"
    assert page.read_text(encoding="utf-8") == diagnosis_page(), (
        "run: python -m posttrain.track.diagnosis > docs/diagnosis.md"
    )


def test_every_rule_reads_metrics_that_are_explained() -> None:
    explained = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    plain = [name for name in METRICS if not name.startswith("reward/part/")]
    assert [name for name in plain if f"| `{name}` |" not in explained] == []
