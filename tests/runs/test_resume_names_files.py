"""A run that goes on with an edited helper says which file it is, not only whose helper."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import cut, given, go

from posttrain.runs import read_json, write_sealed
from posttrain.runs.drift import PARSED, differences, settings

FILES = {
    "points_of_mine.py": "from kit_of_mine.words import FACTOR\nimport scale_of_mine\n\n\n"
    "def points(completion):\n    return FACTOR * len(completion) * scale_of_mine.SCALE\n",
    "scale_of_mine.py": "SCALE = 0.5\n",
    "kit_of_mine/__init__.py": "",
    "kit_of_mine/words.py": "FACTOR = 1.0\n",
}
KEY = "contents.rewards.points_of_mine:points"
RL = {"steps": 3, "save_every": 1}


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe with a reward of one's own, whose modules lie beside each other."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "kit_of_mine").mkdir()
    write(tmp_path)
    made = given(tmp_path / "run", RL, sft=None, eval=None, rewards=None)
    made["rewards"] = {"points_of_mine:points": {}}
    return made


def write(folder: Path, **edited: str) -> None:
    """The modules, some of them with another text, to be imported anew."""
    for name, text in FILES.items():
        (folder / name).write_text(edited.get(Path(name).stem, text))
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("edited", "named"),
    [
        ({"scale_of_mine": "SCALE = 0.75\n"}, "scale_of_mine.py"),
        ({"words": "FACTOR = 2.0\n"}, "kit_of_mine/words.py"),
        (
            {"points_of_mine": '"""Read by some."""\n' + FILES["points_of_mine.py"]},
            "points_of_mine.py",
        ),
        (
            {"scale_of_mine": "SCALE = 1\n", "words": "FACTOR = 1\n"},
            "kit_of_mine/words.py, scale_of_mine.py",
        ),
    ],
    ids=["helper", "in a package", "its own", "two"],
)
def test_the_file_is_named(
    values: dict[str, Any], tmp_path: Path, edited: dict[str, str], named: str
) -> None:
    cut(values, save=2)
    write(tmp_path, **edited)
    with pytest.raises(ValueError, match="cannot go on as the same run") as refused:
        go(values, resume=True)
    assert f"\n  {KEY}: has changed: {named}\n" in str(refused.value)
    assert "--allow-changes contents" in str(refused.value)
    _, text = go(values, resume=True, allow_changes=["contents"])
    assert f"allowed to change: {KEY}: has changed: {named}" in " ".join(text.split())
    noted = read_json(tmp_path / "run" / "changes.json")
    assert noted[0]["changes"] == [f"{KEY}: has changed: {named}"]


def test_comments_and_layout_are_no_change(values: dict[str, Any], tmp_path: Path) -> None:
    """A run goes on where the code is what it was; a broken copy of it is another."""
    cut(values, save=2)
    laid_out = FILES["points_of_mine.py"].replace(" * ", "  *  ").replace("return", "return  ")
    write(tmp_path, scale_of_mine="# what a letter is worth\nSCALE = (\n    0.5\n)\n")
    (tmp_path / "points_of_mine.py").write_text(laid_out + "# the end\n")
    _, text = go(values, resume=True)
    assert "rl: goes on from step 1" in text
    assert "allowed to change" not in text


@pytest.mark.parametrize("begins", ["", "parsed by 3.9:"], ids=["posttrain", "Python"])
def test_a_record_of_an_older_posttrain_says_so(
    values: dict[str, Any], tmp_path: Path, begins: str
) -> None:
    """Its digests are of the whole text, or of another tree: nobody can tell by what they differ.

    An older Python parses the same text to another tree.
    """
    cut(values, save=2)
    path = tmp_path / "run" / "config.json"
    config = read_json(path)
    config["contents"] = dict.fromkeys(config["contents"], "0" * 16)
    files = config["files"]
    config["files"] = {key: dict.fromkeys(table, begins + "1" * 16) for key, table in files.items()}
    write_sealed(path, config)
    told = "has changed, or only its comments: the run is of an older posttrain or another Python,"
    with pytest.raises(ValueError, match=rf"{KEY}: {told}"):
        go(values, resume=True)
    _, text = go(values, resume=True, allow_changes=["contents"])
    assert f"allowed to change: {KEY}: has changed, or only its comments" in " ".join(text.split())


def test_a_finished_run_names_it_too(values: dict[str, Any], tmp_path: Path) -> None:
    """And where nothing has changed, nothing is done; the files themselves are no settings."""
    done, _ = go(values)
    assert not [name for name in settings(done.folder.config) if name.startswith("files")]
    _, text = go(values)
    assert "already finished; nothing to do" in text
    write(tmp_path, scale_of_mine="SCALE = 1.5\n")
    with pytest.raises(ValueError, match=r"another recipe \(.*: has changed: scale_of_mine\.py\)"):
        go(values)


def test_a_value_is_told_from_a_file() -> None:
    """What the function holds may change without its files; older runs have recorded none."""
    old: dict[str, Any] = {
        "contents": {"task": "a" * 16},
        "files": {"contents.task": {"a.py": f"{PARSED}1"}},
    }
    new: dict[str, Any] = {
        "contents": {"task": "b" * 16},
        "files": {"contents.task": {"a.py": f"{PARSED}1"}},
    }
    (told,) = differences(old, new)
    assert told == "contents.task: has changed: no file, but a value that it holds or Python itself"
    moved = {**new, "files": {"contents.task": {"my/a.py": f"{PARSED}1", "new.py": f"{PARSED}2"}}}
    assert differences(old, moved) == ["contents.task: has changed: new.py"]
    assert differences(moved, old) == ["contents.task: has changed: new.py"]
    assert differences({"contents": old["contents"]}, new) == ["contents.task: has changed"]
    assert differences(old, {**old, "files": {}}) == []
