"""A run that Python started is evaluated and resumed by its folder, where that can name its parts.

Prompts of a file and functions of a module are named as a recipe names them; rows, closures and
lambdas are in the memory of one process, and what goes on with them is that process's own call.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, command_in
from small_runs import RL

import posttrain
from posttrain.runs import RunFolder
from posttrain.stages.results import Run

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "result": n + 1} for n in range(8)]
MODULE = "def brief(completion, *, scale: float = 1.0):\n    return -scale * len(completion)\n"
STARTED = "was started from Python with rows, functions or objects"


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """The command line, in a folder that is not the project's."""
    (tmp_path / "elsewhere").mkdir()
    return command_in(tmp_path / "elsewhere", columns=300, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def project(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of prompts in the current folder, and a module beside the script that runs."""
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    for name, rows in (("rows", ROWS[:6]), ("test", ROWS[6:])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "scripts" / "own_rewards.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder / "scripts"), *sys.path])
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return folder


FILES: dict[str, Any] = {"prompts": "rows.jsonl", "test_prompts": Path("test.jsonl")}
TABLE = {"name": "file", "path": "rows.jsonl", "test_path": "test.jsonl"}
OWN = "own_rewards:brief"


def own(**options: Any) -> Callable[[], dict[str, Any]]:
    """Rewards that are made where the module can be imported."""

    def made() -> dict[str, Any]:
        brief = importlib.import_module("own_rewards").brief
        return {"reward": {brief: {"weight": 1.0, **options}, "numeric": 1.0}}

    return made


def short(steps: int = 1, **given: Any) -> Run:
    return posttrain.rl(folder="run", **{**RL, "steps": steps, **given})


@pytest.mark.parametrize(
    ("given", "rewards"),
    [
        (lambda: {"task": TABLE}, ["numeric"]),
        (lambda: FILES, ["numeric"]),
        (lambda: {**FILES, "columns": {"answer": "result"}}, ["numeric"]),
        (lambda: {**FILES, "reward": "exact"}, ["exact"]),
        (lambda: {**FILES, "reward": {"numeric": {"weight": 2.0}, "exact": 0.5}}, None),
        (lambda: {**FILES, **own()()}, [OWN, "numeric"]),
        (lambda: {**FILES, **own(scale=2.0)()}, [OWN, "numeric"]),
        (lambda: {**FILES, "env": "scripted", **own()()}, None),
    ],
)
def test_what_has_a_name_is_kept_by_it(
    given: Callable[[], dict[str, Any]],
    rewards: list[str] | None,
    project: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``posttrain eval`` and ``resume`` need the folder alone, in a process that imports anew."""
    done = short(**given())
    kept = done.folder.path.absolute()
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(project / "scripts")])
    monkeypatch.chdir(project.parent / "elsewhere")
    shown = command("eval", kept)
    assert "file, 2 problems" in shown.out, shown.err
    for name in rewards or ():
        assert f"mean of {name}" in shown.out or f"({name})" in shown.out
    resumed = command("resume", kept, "--rl.steps", 2)
    assert "goes on from step 1" in resumed.out, resumed.err
    assert len(Run(RunFolder(kept)).metrics()) == 2


def test_an_edited_function_is_another_one(project: Path, command: Command) -> None:
    """Also one that was handed over as a function, and is found by its name later."""
    short(**FILES, **own()())
    (project / "scripts" / "own_rewards.py").write_text(MODULE.replace("-scale", "+scale"))
    sys.modules.pop("own_rewards")
    said = command("resume", project / "run", "--rl.steps", 2)
    assert f"contents.rewards.{OWN}: has changed: own_rewards.py" in said.err
    assert f"rewards.{OWN}: has changed since" in command("eval", project / "run").out


@pytest.mark.parametrize(
    ("given", "lost", "again"),
    [
        ({"prompts": ROWS[:6], "test_prompts": ROWS[6:]}, "task", "prompts=…"),
        ({"prompts": "rows.jsonl", "test_prompts": ROWS[6:]}, "task", "prompts=…"),
        ({**FILES, "reward": lambda completion: 1.0}, "rewards", "reward=…"),
        (
            {"prompts": ROWS, "reward": lambda completion: 1.0},
            "task, rewards",
            "prompts=…, reward=…",
        ),
    ],
)
def test_what_is_in_memory_is_asked_for_again(
    given: dict[str, Any], lost: str, again: str, project: Path, command: Command
) -> None:
    """Why the folder is not enough, and the call that is; that call goes on with the run."""
    short(**given)
    folder = project / "run"
    told = f"{STARTED} ({lost}) that no folder holds; "
    said = command("eval", folder)
    call = f"evaluate it from Python, posttrain.evaluate('{folder}', {again}), or by others: --"
    assert (said.code, told + call in said.err) == (2, True), said.err
    said = command("resume", folder, "--rl.steps", 2)
    call = "to go on, make the same call again from Python, with resume=True"
    assert (said.code, told + call in said.err) == (2, True), said.err
    assert len(short(2, **given, resume=True).metrics()) == 2


def test_demonstrations_in_memory_are_asked_for_again(project: Path, command: Command) -> None:
    """Rows in the place of a file are no name that another process could read."""
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    posttrain.sft(data=rows, folder="run", epochs=1, model_options=RL["model_options"])
    said = command("resume", project / "run", "--sft.epochs", 2)
    assert f"{STARTED} (sft.data) that no folder holds; to go on, make the same call" in said.err


def test_an_option_that_no_recipe_can_write(project: Path) -> None:
    """The function is handed over with it, and works."""

    class Two(float):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = float.__hash__

    done = short(**FILES, **own(scale=Two(2.0))())
    assert set(done.samples(1)[0]["parts"]) == {"brief", "numeric"}
