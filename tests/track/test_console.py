"""The terminal display: live where there is a terminal, plain lines where there is none."""

import io
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posttrain.track import ConsoleTracker, Stage
from posttrain.track import console as module
from posttrain.types.marks import Marks

RL_METRICS = {
    "reward/mean": 0.4125,
    "rollout/length": 14.25,
    "rollout/truncated": 0.0,
    "rollout/groups_without_signal": 0.25,
    "rollout/tokens_per_second": 12_345.0,
    "objective/kl": 0.0021,
    "objective/entropy": 0.53,
    "policy/clip_low": 0.01,
    "policy/clip_high": 0.025,
    "time/rollout": 3.0,
    "time/reward": 0.5,
    "time/train": 1.5,
}
# What a person should see of them, on a terminal as in a log.
EXPECTED = [
    "reward 0.412",
    "accuracy 83.0%",
    "length 14.25",
    "KL to reference 0.002",
    "entropy 0.530",
    "clipped 3.5%",
    "no signal 25.0%",
    "tokens/s 12.3k",
    "time rollout 60% reward 10% train 30%",
]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
Log = Callable[..., str]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(
    *, terminal: bool, name: str = "rl", title: str = "", steps: int = 100, **options: Any
) -> tuple[ConsoleTracker, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, _environ={})
    stage = Stage(name=name, folder=Path("unused"), total_steps=steps, title=title)
    return ConsoleTracker(stage, console=console, **options), file


def last_frame(file: io.StringIO) -> str:
    """What stays on the screen: the last panel drawn, without styles."""
    return ESCAPE.sub("", file.getvalue()).rpartition("╭")[2]


def words(text: str) -> str:
    return re.sub(r"[\s│]+", " ", text)


def test_a_log_has_a_line_of_plain_text(clock: Clock) -> None:
    tracker, file = make(terminal=False)
    tracker.log(12, RL_METRICS | {"eval/accuracy": 0.83})
    tracker.close()
    (line,) = file.getvalue().splitlines()
    assert line.split("  ") == ["rl 12/100", *EXPECTED]


@pytest.mark.parametrize(
    ("marks", "metrics", "shown"),
    [
        (
            Marks(check="numeric", full={"numeric": 1.0}),
            {"accuracy": 0.5},
            "accuracy (numeric) 50.0%",
        ),
        (
            Marks(weights={"b": 1.0, "a\x07": 1.0, "c": 0.0}, full={"b": 1, "a\x07": 1, "c": 1}),
            {"full_marks/b": 0.25, "full_marks/a\x07": 1.0, "full_marks/c": 1.0},
            "full marks of a\\x07 100.0%  full marks of b 25.0%",
        ),
        (Marks(weights={"model": 1.0}), {"reward": 0.25}, "held-out reward 0.250"),
    ],
    ids=["a check", "none", "a reward model"],
)
def test_held_out_shares_say_what_they_are_of(
    marks: Marks, metrics: dict[str, float], shown: str
) -> None:
    file = io.StringIO()
    stage = Stage(name="rl", folder=Path("unused"), total_steps=1, marks=marks)
    tracker = ConsoleTracker(stage, console=Console(file=file, width=100, _environ={}))
    tracker.log(1, {f"eval/{name}": value for name, value in metrics.items()})
    tracker.close()
    assert file.getvalue() == f"rl 1/1  {shown}\n"


def test_a_huge_number_is_short(clock: Clock) -> None:
    tracker, file = make(terminal=False)
    tracker.log(1, {"reward/mean": -1.5e160, "rollout/length": 999_999.0, "objective/kl": 1e6})
    tracker.close()
    (line,) = file.getvalue().splitlines()
    assert line.split("  ")[1:] == [
        "reward -1.5e+160",
        "length 999999.0",
        "KL to reference 1e+06",
    ]


def test_a_log_has_no_control_characters_and_no_markup(clock: Clock) -> None:
    tracker, file = make(terminal=False, title="[red]my\x1b[31m run[/red]", show=["a\x07b"])
    tracker.log(1, {"a\x07b": 1.0})
    tracker.close()
    assert file.getvalue() == "[red]my\\x1b[31m run[/red] 1/100  a\\x07b 1.000\n"


def test_a_log_has_a_line_in_five_seconds_and_the_first_the_last_and_every_evaluation(
    clock: Clock,
) -> None:
    tracker, file = make(terminal=False, steps=40)
    for step in range(1, 41):
        clock.now += 1.25
        tracker.log(step, {"reward/mean": 0.5} | ({"eval/accuracy": 0.5} if step == 7 else {}))
    tracker.close()
    steps = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert steps == [1, 5, 7, 11, 15, 19, 23, 27, 31, 35, 39, 40]


def test_what_was_held_back_comes_out_at_the_end(clock: Clock) -> None:
    tracker, file = make(terminal=False)
    tracker.log(1, {"reward/mean": 0.1})
    tracker.log(2, {"reward/mean": 0.2})
    assert len(file.getvalue().splitlines()) == 1
    tracker.close()
    tracker.close()
    assert file.getvalue().splitlines()[1:] == ["rl 2/100  reward 0.200"]


def test_a_line_every_few_steps(clock: Clock) -> None:
    tracker, file = make(terminal=False, every_steps=10)
    for step in range(1, 31):
        clock.now += 60
        tracker.log(step, {"reward/mean": 0.5})
    tracker.close()
    assert [line.split()[1] for line in file.getvalue().splitlines()] == [
        "1/100",
        "10/100",
        "20/100",
        "30/100",
    ]


def test_the_time_left_follows_the_pace_of_this_process(clock: Clock) -> None:
    tracker, file = make(terminal=False, every_seconds=1.0)
    for step in (60, 61, 62):  # taken up at step 60: the steps before it took no time here
        tracker.log(step, {})
        clock.now += 2.0
    assert [line.rpartition("  ")[2] for line in file.getvalue().splitlines()] == [
        "rl 60/100",
        "ETA 1:18",  # 39 steps of 2 s
        "ETA 1:16",
    ]


def test_a_terminal_has_a_bar_and_a_panel() -> None:
    tracker, file = make(terminal=True, title="demo [bold]x[/bold]")
    tracker.log(0, {"eval/accuracy": 0.83, "reward/mean": 0.1})
    tracker.log(12, RL_METRICS)  # the accuracy is still that of the last evaluation
    tracker.close()
    tracker.close()
    frame = words(last_frame(file))
    assert "demo [bold]x[/bold]" in frame
    assert "step 12/100" in frame
    assert "so far" in frame
    assert "left" in frame
    assert "━" in frame
    assert [text for text in EXPECTED if text not in frame] == []
    assert "reward ▁█" in frame
    assert "cut short" not in frame
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_an_alarm_is_shown_while_it_is_one() -> None:
    tracker, file = make(terminal=True)
    tracker.log(1, RL_METRICS | {"rollout/truncated": 0.5, "reward/invalid": 0.125})
    tracker.close()
    assert "cut short 50.0% invalid 12.5%" in words(last_frame(file))


def test_what_dynamic_sampling_costs_is_said_while_it_costs_anything(clock: Clock) -> None:
    """5 groups drawn for 2 that are learned from; 1 for 1 is what was asked for."""
    for terminal in (True, False):
        for drawn, said in ((2.5, True), (1.0, False)):
            tracker, file = make(terminal=terminal)
            tracker.log(1, RL_METRICS | {"rollout/drawn_per_group": drawn})
            tracker.close()
            text = last_frame(file) if terminal else file.getvalue()
            assert ("groups drawn for one kept 2.5" in words(text)) == said


def test_what_was_never_logged_is_a_dash() -> None:
    tracker, file = make(terminal=True)
    tracker.log(1, {"reward/mean": float("nan")})
    tracker.close()
    assert "reward nan accuracy - length - KL to reference -" in words(last_frame(file))


def test_untrusted_titles_and_names_cannot_act_on_a_terminal() -> None:
    tracker, file = make(terminal=True, title="a\x1b[2Jb\u202ec", show=["x\x1b[2J[link=y]"])
    tracker.log(1, {"x\x1b[2J[link=y]": 1.0})
    tracker.close()
    assert "a\\x1b[2Jb\\u202ec" in last_frame(file)
    assert "x\\x1b[2J[link=y] 1.000" in last_frame(file)
    rest = ESCAPE.sub("", file.getvalue()).replace("\n", "").replace("\r", "")
    assert not [c for c in rest if unicodedata.category(c) in ("Cc", "Cf")]
    assert "\x1b[2J" not in file.getvalue()


def test_supervised_stages_show_their_own_metrics(clock: Clock) -> None:
    tracker, file = make(terminal=False, name="sft")
    tracker.log(
        3,
        {
            "loss/total": 1.25,
            "train/gradient_norm": 0.5,
            "train/learning_rate": 3e-4,
            "sft/tokens": 2048,
        },
    )
    assert file.getvalue() == (
        "sft 3/100  loss 1.250  gradient norm 0.500  learning rate 3.0e-04  tokens 2.0k\n"
    )


def test_colours_forced_by_the_environment_do_not_make_a_file_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    tracker = ConsoleTracker(Stage(name="rl", folder=Path("unused"), total_steps=1))
    tracker.log(1, {"reward/mean": 1.0})
    tracker.close()
    assert capsys.readouterr().out == "rl 1/1  reward 1.000\n"
