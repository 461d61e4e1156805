"""Checkpoints by time: when they come, what they cost, and that they change nothing.

Time is a number that the tests move: a step takes as long as they say.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Killed, given, same
from rich.console import Console
from small_runs import timeless

from posttrain.config import recipe_from_dict
from posttrain.learn.learner import LocalLearner
from posttrain.rollout.collect import collect_scored
from posttrain.runs import StageFolder, checkpoints, keeper
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.runs.folder import RunFolder
from posttrain.runs.keeper import SHARE, Keeper, Pace
from posttrain.stages import prefer, reward
from posttrain.stages import sft as sft_stage
from posttrain.stages.results import Run
from posttrain.stages.run import run

MINUTES = 10.0
RL = {"steps": 6, "evaluate_every": 3, "evaluate_problems": 5}
PREFER = {
    "prefer": {"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}},
    "reward": {"batch_size": 1, "epochs": 2, "learning_rate": 1e-3},
    "eval": None,
}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that were written, in order: ``sft 4``."""
    written: list[str] = []
    write = checkpoints.write_checkpoint

    def noted(stage: StageFolder, step: int, **more: Any) -> Path:
        made = write(stage, step, **more)
        written.append(f"{stage.path.name} {step}")
        return made

    monkeypatch.setattr(keeper, "write_checkpoint", noted)
    return written


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[[float], None]:
    """Makes every optimiser step take so many minutes."""
    step = LocalLearner.step

    def set_minutes(minutes: float) -> None:
        def slow(self: LocalLearner, *given: Any, **more: Any) -> Any:
            clock.now += 60 * minutes
            return step(self, *given, **more)

        monkeypatch.setattr(LocalLearner, "step", slow)

    return set_minutes


def by_time(folder: Path, rl: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A recipe with the default settings of checkpoints."""
    values = given(folder, RL if rl is None else rl, **sections)
    del values["run"]["save_minutes"]
    return values


def go(values: dict[str, Any], clock: Clock, **options: Any) -> tuple[Run, str]:
    console = Console(file=io.StringIO(), width=300)
    done = run(recipe_from_dict(values), console=console, clock=clock, **options)
    return done, console.file.getvalue()


def test_one_is_due_after_the_interval_and_never_for_more_than_a_hundredth(clock: Clock) -> None:
    """A checkpoint of 9 s puts the next off to 900 s, one of 6 s leaves it at the 600 asked for."""
    pace = Pace(600, clock=clock)
    for cost, interval in ((6.0, 600.0), (9.0, 900.0), (1.0, 600.0)):
        with pace.saving():
            clock.now += cost
        assert not pace.due
        clock.now += interval - 0.001
        assert not pace.due
        clock.now += 0.001
        assert pace.due
        assert cost / (cost + interval) < SHARE
        assert pace.stretched == (interval > 600)
    pace.start()
    assert not pace.due


def test_none_by_time(clock: Clock) -> None:
    pace = Pace(0, clock=clock)
    clock.now += 1e9
    assert [pace.on, pace.due, pace.stretched] == [False] * 3


def test_one_that_failed_does_not_count(clock: Clock) -> None:
    pace = Pace(600, clock=clock)
    clock.now += 700
    with pytest.raises(OSError, match="full"), pace.saving():
        raise OSError("full")
    assert pace.due


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        (0.0, ["sft 8", "rl 6"]),
        (4.0, ["sft 3", "sft 6", "sft 8", "rl 3", "rl 6"]),
        (11.0, [*(f"sft {step}" for step in range(1, 9)), *(f"rl {step}" for step in range(1, 7))]),
    ],
)
def test_the_default_is_every_ten_minutes_and_the_end(
    minutes: float,
    expected: list[str],
    *,
    tmp_path: Path,
    clock: Clock,
    saved: list[str],
    taking: Callable[[float], None],
) -> None:
    """A step of 4 minutes: after the third, which passes ten. And always the last step of a stage.

    Of a finished stage none is left, for no one has asked for them, but the one from which the run
    can be prolonged.
    """
    taking(minutes)
    done, _ = go(by_time(tmp_path / "run"), clock)
    assert saved == expected
    assert not done.folder.stage("sft").checkpoints.exists()
    assert checkpoint_steps(done.folder.stage("rl")) == [int(saved[-1].split()[1])]


def test_steps_that_the_recipe_names_win(
    tmp_path: Path, clock: Clock, saved: list[str], taking: Callable[[float], None]
) -> None:
    """And what was asked for is kept: the last two. 0 means none, in that stage alone."""
    taking(11.0)
    done, _ = go(by_time(tmp_path / "run", {**RL, "save_every": 4}, sft={"save_every": 0}), clock)
    assert saved == ["rl 4", "rl 6"]
    assert checkpoint_steps(done.folder.stage("rl")) == [4, 6]


def test_minutes_that_the_recipe_names(
    tmp_path: Path, clock: Clock, saved: list[str], taking: Callable[[float], None]
) -> None:
    taking(11.0)
    values = by_time(tmp_path / "some")
    values["run"] |= {"save_minutes": 30.0, "keep_last": 0}
    done, _ = go(values, clock)
    assert saved == ["sft 3", "sft 6", "sft 8", "rl 3", "rl 6"]
    assert checkpoint_steps(done.folder.stage("sft")) == [3, 6, 8]  # keep_last = 0 keeps all
    saved.clear()
    values = by_time(tmp_path / "none")
    values["run"] |= {"save_minutes": 0.0}
    go(values, clock)
    assert saved == []


def test_when_they_come_changes_nothing(
    tmp_path: Path, clock: Clock, saved: list[str], taking: Callable[[float], None]
) -> None:
    """Never, now and then, at every step: the same metrics, rollouts, findings and weights."""
    runs = []
    for number, minutes in enumerate((0.0, 4.0, 7.0, 11.0)):
        taking(minutes)
        values = by_time(tmp_path / str(number), {**RL, "max_lag": 1})
        values["run"] |= {} if minutes else {"save_minutes": 0.0}
        before = len(saved)
        runs.append(go(values, clock)[0])
        assert (len(saved) > before) == bool(minutes)
    for other in runs[1:]:
        same(runs[0].folder, other.folder)


def test_a_slow_disk_is_said_once_and_stretches_the_interval(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 30 s: 1 % of 50 minutes, so that the next comes after five steps of ten."""
    said: list[str] = []
    written: list[int] = []
    made = Keeper(StageFolder(tmp_path), save_minutes=MINUTES, clock=clock)
    made.warn = said.append

    def slow(folder: StageFolder, step: int, **more: Any) -> None:
        clock.now += 30
        written.append(step)

    monkeypatch.setattr(keeper, "write_checkpoint", slow)
    with made.stepping():
        for step in range(1, 16):
            clock.now += 600
            made.stepped(step)
    assert written == [1, 6, 11]
    (text,) = said
    assert "takes 30.0 s" in text
    assert "below 1% of the time" in text
    assert "after 50 minutes" in text


@pytest.mark.parametrize(("stage", "steps"), [("sft", 8), ("rl", 6)])
def test_killed_after_the_last_step_nothing_is_learned_again(
    stage: str, steps: int, *, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is saved, with the clock standing still: the end is the last checkpoint."""
    whole, _ = go(by_time(tmp_path / "whole"), clock)
    save, step = LocalLearner.save, LocalLearner.step
    values = by_time(tmp_path / "cut")

    def dies(self: LocalLearner, folder: Path) -> None:
        if folder == tmp_path / "cut" / stage / "model":
            raise Killed
        save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(LocalLearner, "save", dies)
        with pytest.raises(Killed):
            go(values, clock)
    taken: list[str] = []

    def counted(self: LocalLearner, batch: Any, *given: Any, **more: Any) -> Any:
        taken.append("sft" if batch.advantages is None else "rl")
        return step(self, batch, *given, **more)

    monkeypatch.setattr(LocalLearner, "step", counted)
    done, text = go(values, clock, resume=True)
    assert f"{stage}: goes on from step {steps}" in text
    assert stage not in taken
    same(done.folder, whole.folder)


def test_killed_while_the_reward_model_is_judged(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step is in a checkpoint, though no time has passed; and so is the stage before."""
    values = by_time(tmp_path / "cut", **PREFER)
    values["run"] |= {"stages": ["sft", "prefer", "reward"]}

    def dies(*given: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(reward, "_judge", dies)
        with pytest.raises(Killed):
            go(values, clock)
    (last,) = checkpoint_steps(RunFolder(tmp_path / "cut").stage("reward"))
    done, text = go(values, clock, resume=True)
    assert f"reward: goes on from step {last}" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values, clock)
    one, other = (folder.folder.stage("reward") for folder in (done, whole))
    assert timeless(one.records()) == timeless(other.records())
    names = ("verdict.json", "model/model.safetensors")
    for name in names:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


@pytest.mark.parametrize("part", [2, 4, 6])
def test_preferences_go_on_where_they_were(
    part: int,
    *,
    tmp_path: Path,
    clock: Clock,
    saved: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty prompts at a time, each asked twice: four parts of train prompts, two of test prompts.

    Killed in any of them, what was annotated is not asked again, and the annotator errs alike.
    """
    monkeypatch.setattr(prefer, "CHUNK", 20)
    values = by_time(tmp_path / "cut", **PREFER)
    values["prefer"] |= {"repeats": 2, "error_rate": 0.3}
    values["run"] |= {"stages": ["sft", "prefer"]}
    calls = 0

    def asked(*given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        clock.now += 660
        if calls == part:
            raise Killed
        return collect_scored(*given, **more)

    monkeypatch.setattr(prefer, "collect_scored", asked)
    with pytest.raises(Killed):
        go(values, clock)
    assert saved[-1] == f"prefer {part - 1}"
    done, text = go(values, clock, resume=True)
    assert f"prefer: goes on from step {part - 1}" in text
    assert calls == 6 + 1
    monkeypatch.setattr(prefer, "collect_scored", collect_scored)
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values, clock)
    one, other = (folder.folder.stage("prefer") for folder in (done, whole))
    for name in ("pairs.jsonl", "test_pairs.jsonl", "metrics.jsonl"):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()
    assert not one.checkpoints.exists()


def test_the_time_of_both_splits_counts(
    tmp_path: Path, clock: Clock, saved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine minutes of train prompts and two of test prompts are more than ten: it is time."""
    monkeypatch.setattr(prefer, "CHUNK", 5)
    values = by_time(tmp_path / "run", **PREFER)
    values["run"] |= {"stages": ["sft", "prefer"]}
    minutes = iter([*[9 / 8] * 8, 2.0, 2.0])

    def asked(*given: Any, **more: Any) -> Any:
        clock.now += 60 * next(minutes)
        return collect_scored(*given, **more)

    monkeypatch.setattr(prefer, "collect_scored", asked)
    go(values, clock)
    assert saved == ["sft 8", "prefer 9", "prefer 10"]


def test_what_a_cut_short_tidying_has_left_goes_the_next_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after sft was marked as finished, while its checkpoints were being removed."""
    values = by_time(tmp_path / "run")
    remove = checkpoints.shutil.rmtree

    def dies(path: Any, *given: Any, **more: Any) -> None:
        if Path(path).name.startswith(".checkpoints") and not more:
            raise Killed
        remove(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", dies)
        with pytest.raises(Killed):
            go(values, clock)
    sft = RunFolder(tmp_path / "run").stage("sft")
    assert [path for path in sft.path.iterdir() if path.name.startswith(".")]
    go(values, clock, resume=True)
    assert not [path for path in sft.path.iterdir() if path.name.startswith(".")]
    assert sft_stage.TEST_LOSS in sft.records()[-1]
