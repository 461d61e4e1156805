"""The summary at the end of a run, with text that nobody vouches for in it."""

import io
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posttrain.report import HeldOut, RunFacts, render_summary
from posttrain.runs import RunFolder

NASTY = "[bold red]x[/bold red] \x1b]0;title\x07 \x1b[2J\r\u202e[/] [link=http://a]b[/link]"
WRITTEN = "[bold red]x[/bold red] \\x1b]0;title\\x07 \\x1b[2J\\r\\u202e[/] [link=http://a]b[/link]"


Show = Callable[..., str]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """The summary of a run of which only the facts given are known."""
    run = RunFolder.create(tmp_path / "demo", config={})

    def show(*, terminal: bool = False, width: int = 300, **given: Any) -> str:
        next_steps = given.pop("next_steps", [])
        facts = RunFacts(run)
        vars(facts).update({"seconds": 134.2, "paths": {}} | given)
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=terminal, _environ={})
        console.print(render_summary(facts, next_steps=next_steps), crop=False)
        return file.getvalue()

    return show


def accuracy(value: float, *, low: float, high: float, **more: Any) -> dict[str, Any]:
    """What a stage records of an evaluation."""
    estimates = {"accuracy": {"value": value, "low": low, "high": high}}
    return {"estimates": estimates, "invalid": 0.0, **more}


def held_out(by: str, **both: dict[str, Any]) -> HeldOut:
    return HeldOut(accuracy_by=by, weights={by: 1.0}, **{"before": {}, "after": {}, **both})


def rows(text: str) -> list[str]:
    return [re.sub(r"\s{2,}", " | ", line.strip()) for line in text.splitlines() if line.strip()]


def test_before_and_after_stand_side_by_side(show: Show) -> None:
    before = accuracy(0.523, low=0.49, high=0.56)
    after = accuracy(0.981, low=0.97, high=0.99, above_one={"ten": 10.0})
    text = show(
        held_out=held_out("numeric", before=before, after=after),
        measures={"training reward, first and last 3 steps": (0.31, 0.97)},
        losses={"sft loss, first and last step": (2.5, 1.0)},
    )
    assert "before | after | change" in rows(text)
    line = "held-out accuracy (numeric) | 52.3% (49.0–56.0) | 98.1% (97.0–99.0) | +45.8 points"
    assert line in rows(text)
    assert "full marks of ten | — (no maximum declared; largest seen 10)" in rows(text)
    assert "training reward, first and last 3 steps | 0.310 | 0.970 | +0.660" in rows(text)
    assert "sft loss, first and last step | 2.500 | 1.000 | -1.500" in rows(text)
    assert any(row.startswith("ten gave up to 10 and declares no maximum") for row in rows(text))
    assert "time | 2:14" in rows(text)


def test_what_is_not_known_is_left_out(show: Show) -> None:
    text = show()
    assert "accuracy" not in text
    assert "reward" not in text
    assert "Held-out answers" not in text
    found = held_out("exact", after=accuracy(0.5, low=0.4, high=0.6))
    assert "held-out accuracy (exact) | - | 50.0% (40.0–60.0)" in rows(show(held_out=found))


def test_a_finding_that_is_over_says_so_and_asks_for_nothing(show: Show) -> None:
    finding = {"step": 140, "finding": "sft_memorises", "stage": "sft", "text": "it rose"}
    lasting = show(findings=[{**finding, "remedy": "Lower `sft.epochs`.", "until": None}])
    assert "sft: sft_memorises, step 140 to the end: it rose. Lower sft.epochs." in lasting
    over = show(findings=[{**finding, "remedy": "Lower sft.epochs.", "until": 154}])
    assert "sft: sft_memorises, step 140, cleared at step 154: it rose." in over
    assert "Lower" not in over


def test_a_loss_that_falls_is_good(show: Show) -> None:
    """Green, where a reward that falls is red."""
    numbers = (2.0, 1.0)
    assert "\x1b[32m-1.000" in show(terminal=True, losses={"loss": numbers})
    assert "\x1b[31m-1.000" in show(terminal=True, measures={"reward": numbers})


def test_samples_paths_and_what_to_try_next(show: Show) -> None:
    sample = {"prompt": "3+4=", "before": "8", "after": "7", "answer": "7"}
    sample |= {"right_before": False, "right_after": True}
    text = show(
        samples=[sample],
        summary={"answers_shown": "1 of 9 held-out problems, drawn at random (seed 0)"},
        paths={"model": "runs/demo/rl/model"},
        next_steps=["posttrain eval runs/demo/rl/model --task arithmetic"],
    )
    assert "prompt | expected | before | after" in rows(text)
    assert "3+4= | 7 | 8 ✗ | 7 ✓" in rows(text)
    assert "Held-out answers: 1 of 9 held-out problems, drawn at random (seed 0)" in rows(text)
    assert "model | runs/demo/rl/model" in rows(text)
    assert rows(text)[-2:] == [
        "What to try next",
        "posttrain eval runs/demo/rl/model --task arithmetic",
    ]


def test_an_answer_that_could_not_be_graded_has_its_own_mark(show: Show) -> None:
    sample = {"prompt": "3+4=", "before": "8", "after": "7", "right_before": False}
    assert {"prompt | before | after", "3+4= | 8 ✗ | 7 ?"} <= set(rows(show(samples=[sample])))


def test_where_nothing_checks_answers_the_reward_stands_in_place_of_a_mark(
    show: Show,
) -> None:
    sample = {"prompt": "sing", "before": "la", "after": "lala"}
    sample |= {"reward_before": 0.25, "reward_after": 2.0}
    text = show(samples=[sample])
    assert "sing | la | [0.250] | lala | [2.000]" in rows(text)
    assert not set("✓✗?") & set(text)


def test_broken_scores_have_a_line_where_there_are_any(show: Show) -> None:
    found = held_out("exact", after={"invalid": 0.5, "reason": NASTY})
    text = show(held_out=found, width=600)
    assert f"  broken held-out scores  50% (first: {WRITTEN})" in text
    assert "broken" not in show()


@pytest.mark.parametrize("terminal", [True, False])
def test_untrusted_text_is_shown_and_never_acts(terminal: bool, show: Show) -> None:
    sample = dict.fromkeys(("prompt", "before", "after", "answer"), NASTY)
    text = show(
        terminal=terminal,
        width=600,
        name=NASTY,
        samples=[sample],
        paths={NASTY: NASTY},
        next_steps=[NASTY],
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the styles are ours
    assert plain.count(WRITTEN) == 1 + 4 + 2 + 1
    acting = [c for c in plain if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")]
    assert acting == []
    assert "\x1b" not in text if not terminal else "\x1b[2J" not in text


def test_a_long_answer_is_cut_in_its_middle(show: Show) -> None:
    sample = {"prompt": "p", "before": "a" * 5000, "after": "think " * 500 + "<7>"}
    text = show(samples=[sample])
    assert text.count("a") < 300
    assert "<7>" in text


def test_a_narrow_terminal_loses_nothing(show: Show) -> None:
    sample = {"prompt": "12+9=", "before": "twenty", "after": "21", "answer": "21"}
    command = "posttrain run recipes/demo.toml --rl.algorithm rloo --run.folder runs/rloo"
    text = show(
        width=40,
        samples=[sample],
        held_out=held_out("exact", after=accuracy(0.5, low=0.4, high=0.6)),
        next_steps=[command],
    )
    assert all(word in text for word in ("12+9=", "twenty", "21", "50.0%"))
    assert f"  {command}\n" in text  # not broken: a line break inside quotes would be copied too


def test_an_episode_is_shown_turn_by_turn(show: Show) -> None:
    """Who wrote what, and what each turn earned; a long one loses its middle, none its escapes."""
    turns = [
        {"sampled": True, "text": "4", "reward": -0.25},
        {"sampled": False, "text": f"\n{NASTY}\n", "reward": None},
        {"sampled": True, "text": "6", "reward": 1.0},
    ]
    sample = {"prompt": "1 to 7?", "before": "4\n6", "after": "4", "right_before": False}
    shown = show(samples=[{**sample, "turns_before": turns, "turns_after": turns * 4}])
    assert "policy: 4 (earned -0.25)" in shown
    assert "environment: [bold red]x[/bold red] \\x1b]0" in shown
    assert "policy: 6 (earned +1) ✗" in shown
    assert "… 4 more turns …" in shown
