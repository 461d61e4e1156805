"""The summary at the end of a run, with text that nobody vouches for in it."""

import io
import re
import unicodedata
from typing import Any

import pytest
from rich.console import Console

from posttrain.runs import Interval, Sample, Share, render_summary

NASTY = "[bold red]x[/bold red] \x1b]0;title\x07 \x1b[2J\r\u202e[/] [link=http://a]b[/link]"
WRITTEN = "[bold red]x[/bold red] \\x1b]0;title\\x07 \\x1b[2J\\r\\u202e[/] [link=http://a]b[/link]"


def show(*, terminal: bool = False, width: int = 300, **given: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, _environ={})
    console.print(render_summary(**{"title": "demo", "seconds": 134.2} | given), crop=False)
    return file.getvalue()


def rows(text: str) -> list[str]:
    return [re.sub(r"\s{2,}", " | ", line.strip()) for line in text.splitlines() if line.strip()]


def test_before_and_after_stand_side_by_side() -> None:
    accuracy = Share(
        label="held-out accuracy (numeric)",
        before=Interval(0.523, 0.49, 0.56),
        after=Interval(0.981, 0.97, 0.99),
    )
    unknown = Share(label="full marks of ten", note="— (no maximum declared; largest seen 10)")
    text = show(
        shares=[accuracy, unknown],
        measures={"training reward, first and last 3 steps": (0.31, 0.97)},
        losses={"sft loss, first and last step": (2.5, 1.0)},
        notes=["ten gave up to 10"],
    )
    assert "before | after | change" in rows(text)
    line = "held-out accuracy (numeric) | 52.3% (49.0–56.0) | 98.1% (97.0–99.0) | +45.8 points"
    assert line in rows(text)
    assert "full marks of ten | — (no maximum declared; largest seen 10)" in rows(text)
    assert "training reward, first and last 3 steps | 0.310 | 0.970 | +0.660" in rows(text)
    assert "sft loss, first and last step | 2.500 | 1.000 | -1.500" in rows(text)
    assert "ten gave up to 10" in rows(text)
    assert "time | 2:14" in rows(text)


def test_what_is_not_known_is_left_out() -> None:
    text = show()
    assert "accuracy" not in text
    assert "reward" not in text
    assert "Held-out answers" not in text
    after = Share(label="held-out accuracy (exact)", after=Interval(0.5, 0.4, 0.6))
    assert "held-out accuracy (exact) | - | 50.0% (40.0–60.0)" in rows(show(shares=[after]))


def test_a_finding_that_is_over_says_so_and_asks_for_nothing() -> None:
    finding = {"step": 140, "finding": "sft_memorises", "stage": "sft", "text": "it rose"}
    lasting = show(findings=[{**finding, "remedy": "Lower sft.epochs.", "until": None}])
    assert "sft: sft_memorises, step 140 to the end: it rose. Lower sft.epochs." in lasting
    over = show(findings=[{**finding, "remedy": "Lower sft.epochs.", "until": 154}])
    assert "sft: sft_memorises, step 140, cleared at step 154: it rose." in over
    assert "Lower" not in over


def test_a_loss_that_falls_is_good() -> None:
    """Green, where a reward that falls is red."""
    numbers = (2.0, 1.0)
    assert "\x1b[32m-1.000" in show(terminal=True, losses={"loss": numbers})
    assert "\x1b[31m-1.000" in show(terminal=True, measures={"reward": numbers})


def test_samples_places_and_what_to_try_next() -> None:
    sample = Sample(
        prompt="3+4=", before="8", after="7", answer="7", right_before=False, right_after=True
    )
    text = show(
        samples=[sample],
        drawn="1 of 9 held-out problems, drawn at random (seed 0)",
        places={"model": "runs/demo/rl/model"},
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


def test_an_answer_that_could_not_be_graded_has_its_own_mark() -> None:
    sample = Sample(prompt="3+4=", before="8", after="7", right_before=False)
    assert {"prompt | before | after", "3+4= | 8 ✗ | 7 ?"} <= set(rows(show(samples=[sample])))


def test_where_nothing_checks_answers_the_reward_stands_in_place_of_a_mark() -> None:
    sample = Sample(prompt="sing", before="la", after="lala", reward_before=0.25, reward_after=2.0)
    text = show(samples=[sample])
    assert "sing | la | [0.250] | lala | [2.000]" in rows(text)
    assert not set("✓✗?") & set(text)


def test_broken_scores_have_a_line_where_there_are_any() -> None:
    text = show(broken=f"50% (first: {NASTY})", width=600)
    assert f"  broken held-out scores  50% (first: {WRITTEN})" in text
    assert "broken" not in show()


@pytest.mark.parametrize("terminal", [True, False])
def test_untrusted_text_is_shown_and_never_acts(terminal: bool) -> None:
    sample = Sample(prompt=NASTY, before=NASTY, after=NASTY, answer=NASTY)
    text = show(
        terminal=terminal,
        width=600,
        title=NASTY,
        samples=[sample],
        places={NASTY: NASTY},
        next_steps=[NASTY],
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the styles are ours
    assert plain.count(WRITTEN) == 1 + 4 + 2 + 1
    acting = [c for c in plain if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")]
    assert acting == []
    assert "\x1b" not in text if not terminal else "\x1b[2J" not in text


def test_a_long_answer_is_cut_in_its_middle() -> None:
    text = show(samples=[Sample(prompt="p", before="a" * 5000, after="think " * 500 + "<7>")])
    assert text.count("a") < 300
    assert "<7>" in text


def test_a_narrow_terminal_loses_nothing() -> None:
    sample = Sample(prompt="12+9=", before="twenty", after="21", answer="21")
    command = "posttrain run recipes/demo.toml --rl.algorithm rloo --run.folder runs/rloo"
    text = show(
        width=40,
        samples=[sample],
        shares=[Share(label="accuracy", after=Interval(0.5, 0.4, 0.6))],
        next_steps=[command],
    )
    assert all(word in text for word in ("12+9=", "twenty", "21", "50.0%"))
    assert f"  {command}\n" in text  # not broken: a line break inside quotes would be copied too
