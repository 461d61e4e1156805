"""Whoever waits reads what is going on: live in a terminal, now and then in a log."""

import contextvars
import io
import os
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.track import ConsoleTracker, Stage, progress
from posttrain.track import console as console_module
from posttrain.track.progress import Progress, advance, current, phase, showing, teller

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """Time that passes when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    monkeypatch.setattr(Progress, "_tell", lambda self: None)  # tests call tick themselves
    return clock


def make(clock: Clock, *, terminal: bool = False, quiet: bool = False) -> Progress:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=100, quiet=quiet, _environ={}
    )
    return Progress(console, clock=clock)


def pass_time(told: Progress, clock: Clock, *, seconds: float) -> None:
    """As the thread does: look several times a second."""
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        told.tick()


def lines(told: Progress) -> list[str]:
    file = told._console.file
    assert isinstance(file, io.StringIO)
    return ESCAPE.sub("", file.getvalue()).splitlines()


def test_a_short_wait_is_not_worth_a_line(clock: Clock) -> None:
    told = make(clock)
    for _ in range(5):
        with told.phase("reading"):
            pass_time(told, clock, seconds=1.75)
    assert lines(told) == []


def test_after_two_seconds_a_log_says_what_is_done_and_how_far_it_is(clock: Clock) -> None:
    told = make(clock)
    with told.phase("evaluating", total=2000, unit="answers"):
        told.advance(40)
        pass_time(told, clock, seconds=1.75)
        assert lines(told) == []
        told.advance(8)
        pass_time(told, clock, seconds=0.25)
    assert lines(told) == ["evaluating: 48 of 2,000 answers, 0:02 so far"]


def test_a_log_has_a_line_every_thirty_seconds_at_least(clock: Clock) -> None:
    told = make(clock)
    with told.phase("loading"):
        pass_time(told, clock, seconds=95)
    assert lines(told) == [f"loading: {time} so far" for time in ("0:02", "0:32", "1:02", "1:32")]


def test_many_short_phases_are_no_silence_either(clock: Clock) -> None:
    told = make(clock)
    for number in range(70):
        with told.phase(f"part {number}", routine=True):
            pass_time(told, clock, seconds=1)
    assert [line.split(":")[0] for line in lines(told)] == ["part 24", "part 54"]


def test_lines_are_five_seconds_apart(clock: Clock) -> None:
    """Each phase is worth a line, but the third would come too soon after the one before."""
    told = make(clock)
    for number in range(4):
        with told.phase(f"part {number}"):
            pass_time(told, clock, seconds=3)
    assert [line.split(":")[0] for line in lines(told)] == ["part 0", "part 2"]


def test_the_innermost_phase_is_told_and_counted(clock: Clock) -> None:
    told = make(clock)
    with told.phase("learning"):
        with told.phase("evaluating", total=4):
            told.advance(2)
            pass_time(told, clock, seconds=2)
        pass_time(told, clock, seconds=30)
    assert lines(told) == ["evaluating: 2 of 4, 0:02 so far", "learning: 0:07 so far"]


def test_a_count_above_the_total_is_not_shown(clock: Clock) -> None:
    told = make(clock)
    with told.phase("sampling", total=4):
        told.advance(5)
        pass_time(told, clock, seconds=2)
    assert lines(told) == ["sampling: 0:02 so far"]


def test_a_tracker_shares_the_log(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines count as news, and it too waits until five seconds have passed."""
    told = make(clock)
    monkeypatch.setattr(console_module, "current", lambda: told)
    stage = Stage(name="rl", folder=Path("unused"), total_steps=100)
    tracker = ConsoleTracker(stage, console=told._console)
    with told.phase("the first rollouts"):
        pass_time(told, clock, seconds=3)
    for step in range(1, 41):
        with told.phase("learning", routine=True):
            pass_time(told, clock, seconds=1)
            tracker.log(step, {"reward/mean": 0.5})
    said = [line.split("  ")[0] for line in lines(told)]
    assert said == ["the first rollouts: 0:02 so far", *(f"rl {n}/100" for n in range(1, 41, 5))]
    pass_time(told, clock, seconds=1)
    with told.phase("learning", routine=True):
        pass_time(told, clock, seconds=40)
    assert lines(told)[-1] == "learning: 0:25 so far"  # 30 s after step 36


def drawn(told: Progress, clock: Clock) -> str:
    clock.now += 1
    row = told.row()
    if row is None:
        return ""
    with told._console.capture() as shown:
        told._console.print(row)
    return " ".join(ESCAPE.sub("", shown.get()).split())


def test_a_terminal_shows_a_bar_and_nothing_stays(clock: Clock) -> None:
    told = make(clock, terminal=True)
    assert drawn(told, clock) == ""
    with told.phase("evaluating", total=200, unit="answers"):
        told.advance(50)
        assert told._live is not None
        shown = drawn(told, clock)
        assert shown.startswith("evaluating ━━━━━━")
        assert shown.endswith("50 of 200 answers 0:01")
        with told.phase("grading"):
            assert drawn(told, clock) == "grading 0:01"
    assert told._live is None
    assert drawn(told, clock) == ""


def test_there_is_one_live_display_at_a_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker's panel draws the phases that begin inside it; afterwards the display is back."""
    told = make(clock, terminal=True)
    monkeypatch.setattr(console_module, "current", lambda: told)
    with told.phase("stage rl"):
        assert told._live is not None
        stage = Stage(name="rl", folder=Path("unused"), total_steps=100)
        tracker = ConsoleTracker(stage, console=told._console)
        assert told._live is None
        with told.phase("sampling", total=8, unit="completions"):
            assert told._live is None
            assert drawn(told, clock).startswith("sampling")
            told._console.print(tracker._panel())
        assert drawn(told, clock) == ""  # the stage itself is the panel's title
        tracker.close()
        assert told._live is not None
    assert told._live is None
    assert any("sampling" in line and "0 of 8 completions" in line for line in lines(told))


def test_a_quiet_console_stays_quiet(clock: Clock) -> None:
    for terminal in (False, True):
        told = make(clock, terminal=terminal, quiet=True)
        with told.phase("loading"):
            pass_time(told, clock, seconds=60)
            assert told._live is None
            assert told._thread is None
        assert lines(told) == []


def test_what_a_model_is_called_cannot_steer_the_terminal(clock: Clock) -> None:
    told = make(clock)
    with told.phase("loading [red]\x1b[31m"):
        pass_time(told, clock, seconds=2)
    assert lines(told) == ["loading [red]\\x1b[31m: 0:02 so far"]


def test_outside_of_showing_phases_say_nothing() -> None:
    with phase("counting", total=3):
        advance(3)
    assert current() is None


def test_showing_begins_and_ends_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=100, _environ={})
    with showing(console):
        display = current()
        assert display is not None
        with showing():  # goes on with the outer one
            assert current() is display
        with showing(Console(quiet=True)):
            assert current() is not display
        assert current() is display
        here = threading.Thread(target=advance)  # another thread has no display, and no say
        here.start()
        here.join()
    assert current() is None


def test_a_thread_tells_while_a_long_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line comes though the phase itself does nothing but wait."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    spoken = threading.Event()

    class File(io.StringIO):
        def write(self, text: str) -> int:
            if "loading" in text:
                spoken.set()
            return super().write(text)

    console = Console(file=File(), width=100, _environ={})
    with showing(console), phase("loading"):
        assert spoken.wait(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_log_that_nobody_reads_ends_the_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends without a word; whoever prints next finds out."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    console = Console(file=Closed(), width=100, _environ={})
    with showing(console), phase("loading"):
        display = current()
        assert display is not None
        assert display._thread is not None
        display._thread.join(60)
        assert not display._thread.is_alive()


def test_a_copy_of_the_process_has_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that a thread of the other one held would never be let go here."""
    with showing(Console(file=io.StringIO(), width=100, _environ={})):
        assert current() is not None
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert current() is None
        monkeypatch.undo()
        assert current() is not None


def test_a_decorated_function_is_a_phase(clock: Clock) -> None:
    told, seen = make(clock), []

    @phase("reading the data")
    def read() -> int:
        seen.extend(each.what for each in told._phases)
        return 3

    def inside() -> int:
        progress._CURRENT.set(told)
        return read() + read()

    assert contextvars.copy_context().run(inside) == 6
    assert seen == ["reading the data"] * 2


def test_another_thread_may_say_a_line_until_the_display_is_gone() -> None:
    """Text that could act in a terminal is shown, not obeyed."""
    console = Console(file=io.StringIO(), width=100, _environ={})
    with showing(console):
        tell = teller()
        thread = threading.Thread(target=tell, args=("3 answers waited for\x1b[2J",))
        thread.start()
        thread.join()
    tell("too late")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "3 answers waited for\\x1b[2J\n"
    teller()("nobody listens here")
