"""A start that ends before its first step: wherever it is killed, the next finds all as it was."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import command_in
from small_runs import RL

import posttrain
from posttrain.runs import RunFolder
from posttrain.runs.keeper import Keeper
from posttrain.runs.lock import held
from posttrain.stages.whole import one_run
from posttrain.stages.whole.places import check_replaced, undo_killed, undone

GIVEN: dict[str, Any] = {"prompts": ["1+1=", "2+2="], **RL, "steps": 1, "grading": {"workers": 0}}
RECIPE = """
[run]
stages = ["rl"]
folder = "out"
[model]
name = "tiny"
options = {hidden_size = 32, num_layers = 2, max_positions = 64}
[task]
name = "arithmetic"
operators = "+"
digits = 1
num_train = 40
num_test = 10
[rewards]
"mine_killed:reward" = 1.0
[rl]
steps = 1
prompts_per_step = 4
group_size = 4
max_new_tokens = 4
"""


class Killed(BaseException):
    """In the place of SIGKILL: nothing that is tested here may run once it was raised."""


def brief(completion: str) -> float:
    """Fewer characters are better."""
    return 1 - len(completion) / 10


def contents(folder: Path) -> dict[str, str]:
    """What a folder holds, but for its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def old_run(folder: Path) -> dict[str, str]:
    """A run of which a link to a folder is a part."""
    RunFolder.marked(folder)
    for stage in ("rl", "eval", "sft.old-1"):
        (folder / stage).mkdir()
        (folder / stage / "done.json").write_text("old")
    (folder.parent / "elsewhere").mkdir()
    (folder / "base-1").symlink_to(folder.parent / "elsewhere")
    return contents(folder)


def begin(folder: Path) -> None:
    """What a new run writes before its first step, a link to a folder too."""
    RunFolder.marked(folder)
    (folder / "rl").mkdir()
    (folder / "rl" / "begun.json").write_text("new")
    (folder / "base-2").symlink_to(folder.parent / "elsewhere")


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Kill what comes to the call number ``at`` of those that change names or remove."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= at:
                raise Killed
            return real(*given, **options)

        return call

    for module, name in ((os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))


def start(folder: Path, *, overwrite: bool = True) -> None:
    """A start that a check ends."""
    undo_killed(folder, resume=False)
    if overwrite:
        check_replaced(str(folder))
    with held(folder), undone(str(folder), made=False, overwrite=overwrite):
        begin(folder)
        raise ValueError("a check")


def test_wherever_a_start_is_killed_nothing_of_the_old_run_is_lost(tmp_path: Path) -> None:
    """In the middle of moving too, or while it is undone; and the next start works."""
    ended = False
    for at in range(1, 60):
        folder = tmp_path / str(at) / "run"
        before = old_run(folder)
        with pytest.MonkeyPatch.context() as patch:
            killing(patch, at)
            try:
                start(folder)
            except Killed:
                pass
            except ValueError:
                ended = True
        with pytest.raises(ValueError, match="a check"):
            start(folder)
        assert contents(folder) == before
        assert (folder / "base-1").is_symlink()
        assert (tmp_path / str(at) / "elsewhere").is_dir()
        if ended:
            return
    pytest.fail("the start did not come to its end")


def test_a_run_is_overwritten_after_a_start_that_was_killed_while_it_moved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    posttrain.rl(reward=brief, folder=folder, **GIVEN)
    for left in ("rl", "run.json", "config.json"):
        (folder / ".moving.tmp").mkdir(exist_ok=True)
        (folder / left).rename(folder / ".moving.tmp" / left)
    again = posttrain.rl(reward=brief, folder=folder, overwrite=True, **{**GIVEN, "steps": 2})
    assert len(again.folder.stage("rl").records()) == 2
    assert not list(folder.glob(".*.tmp"))


def test_what_no_run_has_written_stays(tmp_path: Path) -> None:
    """Whether a start fails, or comes to its first step."""
    folder = tmp_path / "run"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("main")
    (folder / ".env").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    before = contents(folder)
    with pytest.raises(ValueError, match="a check"):
        start(folder, overwrite=False)
    assert contents(folder) == before
    with held(folder), undone(str(folder), made=False, overwrite=False):
        begin(folder)
        Keeper(RunFolder(folder).stage("rl")).stepping()
        assert contents(folder).items() > before.items()


def test_a_run_that_was_killed_before_its_first_step_is_resumed_with_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)
    (tmp_path / "beside").mkdir()
    reward = "def reward(completion): return len(completion) / 10"
    (tmp_path / "beside" / "mine_killed.py").write_text(reward)
    (tmp_path / "beside" / "r.toml").write_text(RECIPE)
    with monkeypatch.context() as patch:

        def killed(*_: object, **__: object) -> None:
            patch.setattr(os, "replace", killed)
            patch.setattr(os, "unlink", killed)
            raise Killed

        patch.setattr(one_run, "Job", killed)
        assert command("run", "beside/r.toml").code
    assert (tmp_path / "out" / ".before.tmp").exists()
    places = (tmp_path / "out" / "places.json").read_text()
    assert command("resume", "out").code == 0
    run = RunFolder("out")
    assert run.finished
    assert run.recipe == RECIPE
    assert (run.path / "places.json").read_text() == places
    assert json.loads(places)["modules"] == [str(tmp_path / "beside")]
