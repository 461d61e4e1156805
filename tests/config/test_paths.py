"""Files and modules of a recipe: from the current folder, then beside the recipe; and on resume."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Command, command_in
from small_runs import RECIPE

from posttrain.config import cautions, paths, read_recipe, recipe_from_dict, resolve, to_toml
from posttrain.config.data_stages import RewardSection, SftSection
from posttrain.runs import RunFolder

MINE = "def tidy(completion: str) -> float:\n    return {value}\n"


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run a command in the folder ``here``."""
    (tmp_path / "here").mkdir()
    return command_in(tmp_path / "here", columns=200, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test imports from its folder is not known to the next."""
    yield
    sys.modules.pop("mine_of_places", None)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a recipe, its data and its reward; the current folder is another one."""
    folder = tmp_path / "project"
    folder.mkdir()
    fill(folder, first=0, value=0.25)
    values = {**RECIPE, "rewards": {"mine_of_places:tidy": 1.0, "numeric": {"extract": "whole"}}}
    values["task"] = {"name": "jsonl", "path": "sums.jsonl", "test_share": 0.3}
    values["sft"] = {**RECIPE["sft"], "wrong_share": 0.0}
    values["rl"] = {**RECIPE["rl"], "steps": 2, "save_every": 1}
    (folder / "sums.toml").write_text(to_toml(recipe_from_dict(values)))
    return folder


def fill(folder: Path, *, first: int, value: float) -> None:
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(first, first + 30)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine_of_places.py").write_text(MINE.format(value=value))


def test_what_a_recipe_names_is_found_beside_it(command: Command, project: Path) -> None:
    """Run from elsewhere, it finds its file and its reward, and the run folder is here."""
    done = command("run", project / "sums.toml", "--run.folder", "out")
    assert done.code == 0, done.err
    assert "caution" not in done.out
    folder = RunFolder("out")
    assert folder.config["task"]["path"] == str(project / "sums.jsonl")
    parts = [record["reward/part/mine_of_places:tidy"] for record in folder.stage("rl").records()]
    assert parts == [0.25, 0.25]
    again = command("eval", project / "sums.toml", "--model.name", "out/rl/model")
    assert again.code == 0, again.err


def test_a_dry_run_refuses_what_the_run_refuses(command: Command, project: Path) -> None:
    (project / "empty").mkdir()
    other = ["--model.name", project / "empty"]
    for dry in ([], ["--dry-run"]):
        done = command("run", project / "sums.toml", *other, *dry)
        assert (done.code, "is not a model folder" in done.err) == (2, True), done
        sizes = command("run", project / "sums.toml", "--model.options.num_layers", 1, *other, *dry)
        assert sizes.code == 2, sizes
    named = command("run", project / "sums.toml", "--model.name", "org/name", "--dry-run")
    assert "options = {}" in named.out


def test_the_current_folder_comes_first_and_it_is_said(command: Command, project: Path) -> None:
    """Where both have a file or a module, and they differ; a copy that is the same is no matter."""
    for name in ("sums.jsonl", "mine_of_places.py"):
        shutil.copy(project / name, name)
    assert read_recipe(project / "sums.toml").notes == ()
    fill(Path(), first=50, value=0.5)
    said = command("run", project / "sums.toml", "--run.folder", "out", "--rl.steps", 1)
    assert said.code == 0, said.err
    assert "task.path 'sums.jsonl': the one in the current folder is taken, and" in said.out
    assert "module 'mine_of_places': the one in the current folder is taken, and" in said.out
    records = RunFolder("out").stage("rl").records()
    assert records[0]["reward/part/mine_of_places:tidy"] == 0.5
    assert RunFolder("out").config["task"]["path"] == "sums.jsonl"


def test_a_path_on_the_command_line_is_seen_from_here(command: Command, project: Path) -> None:
    given = read_recipe(project / "sums.toml", ["--task.path", "other.jsonl"])
    shutil.copy(project / "sums.jsonl", project / "other.jsonl")
    assert given.task["path"] == "other.jsonl"
    assert cautions(resolve(given)) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('[model]\nname = "there"', "model.name"),
        ('[sft]\ndata = "there"', "sft.data"),
        ('[reward]\ndata = "there"', "reward.data"),
        ('[reward]\ntest_data = "there"', "reward.test_data"),
        ('[reward]\nbackbone = "there"', "reward.backbone"),
        ('[rl.critic]\nsource = "there"', "rl.critic.source"),
        ('[rewards.model]\npath = "there"', "rewards.model.path"),
        ('[prefer.rewards.model]\npath = "there"', "prefer.rewards.model.path"),
        ('[task]\nname = "jsonl"\npath = "a"\ntest_path = "there"', "task.test_path"),
    ],
)
def test_every_key_that_names_a_file(text: str, name: str, command: Command, project: Path) -> None:
    """Found beside the recipe, kept as written where it is here, and left alone where nowhere."""
    file = project / "one.toml"
    file.write_text(text)

    def value() -> str:
        found = read_recipe(file).model_dump()
        for part in name.split("."):
            found = found[part]
        return found

    assert value() == "there"
    (project / "there").write_text("theirs")
    assert value() == str(project / "there")
    Path("there").write_text("mine")
    assert value() == "there"
    assert [note.partition(" ")[0] for note in read_recipe(file).notes] == [name]


def test_a_word_that_means_something_is_no_file(command: Command, project: Path) -> None:
    (project / "tiny").mkdir()
    (project / "task").mkdir()
    (project / "one.toml").write_text('[model]\nname = "tiny"\n[sft]\ndata = "task"')
    found = read_recipe(project / "one.toml")
    assert (found.model.name, found.sft.data) == ("tiny", "task")


@pytest.fixture
def cut(command: Command, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run started in its project folder that died before its stage rl."""

    def dies(*given: object, **options: object) -> None:
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patch:
        patch.chdir(project)
        patch.setattr("posttrain.stages.rl.learn", dies)
        patch.setattr(sys, "path", [*sys.path])
        assert "the power is gone" in command("run", "sums.toml", "--run.folder", "out").err
    sys.modules.pop("mine_of_places")
    return project / "out"


def test_a_run_goes_on_with_its_own_files_from_any_folder(command: Command, cut: Path) -> None:
    """Though files of the same names, with other contents, are in the current folder."""
    fill(Path(), first=50, value=0.5)
    done = command("resume", cut)
    assert done.code == 0, done.err
    assert f"goes on in {cut.parent}, where it was started" in done.out
    assert "sft: already finished" in done.out
    records = RunFolder(cut).stage("rl").records()
    assert [record["reward/part/mine_of_places:tidy"] for record in records] == [0.25, 0.25]


def test_another_file_is_never_taken_in_silence(
    command: Command, cut: Path, tmp_path: Path
) -> None:
    """Where the folder that it was started in is gone, only the very same files will do."""
    here = Path.cwd()
    moved = shutil.move(cut, tmp_path / "moved")
    shutil.move(cut.parent, tmp_path / "elsewhere")
    fill(here, first=50, value=0.5)
    said = command("resume", moved)
    assert said.code == 2
    assert "which is not here: its files are looked for in" in said.out
    assert "cannot go on as the same run" in said.err
    assert "contents.task.path" in said.err
    assert "contents.rewards.mine_of_places:tidy" in said.err
    sys.modules.pop("mine_of_places")
    for name in ("sums.jsonl", "mine_of_places.py"):
        shutil.copy(tmp_path / "elsewhere" / name, here / name)
    shutil.rmtree(here / "__pycache__", ignore_errors=True)
    done = command("resume", moved)
    assert done.code == 0, done.err


def test_every_key_that_names_a_file_is_looked_for_beside_the_recipe() -> None:
    """Keys are told by what they are called: a new one of these names is looked for too."""
    sections = {"sft": SftSection, "reward": RewardSection}
    named = {
        (name, key)
        for name, section in sections.items()
        for key in section.model_fields
        if key in ("data", "test_data", "backbone")
    }
    assert named <= set(paths._NAMED)
    assert len(named) == 5


def test_tasks_of_a_mixture_and_rows_of_a_sweep_are_looked_for_too() -> None:
    tasks = [{"name": "mine:task", "path": "rows.jsonl"}, "no table"]
    row = {"rewards": {"theirs:f": 1.0, "model": {"path": "judge"}}, "rl": {"loss": "ours:loss"}}
    values = {"task": {"name": "mixture", "tasks": tasks}, "sweep": [row, "no table"]}
    assert paths.own_modules(values) == ["mine", "theirs", "ours"]
    found = [name for _, _, name in paths.relative_paths(values)]
    assert found == ["task.tasks[1].path", "sweep[0].rewards.model.path"]
