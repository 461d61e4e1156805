"""Finished stages that were moved, deleted or changed: refused with the reason, never used."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import GRPO, Killed, cut, dying, given, go, same
from rich.console import Console
from small_runs import same_weights

import posttrain
from posttrain.build.model_source import recorded_recipe
from posttrain.build.setup import Supplied
from posttrain.config import recipe_from_dict, to_toml
from posttrain.disk import MovedError
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import new_folder, write_json, write_rollouts
from posttrain.runs.folder import RunFolder
from posttrain.runs.manifest import find_changes, read_manifest, write_manifest
from posttrain.stages.run import run

SOURCE = Path(__file__).parents[2] / "src"
PREFERRED: dict[str, Any] = {
    "prefer": {"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}},
    "reward": {"batch_size": 8, "learning_rate": 1e-3},
    "rewards": {"model": 1.0},
}


def flip(path: Path, *, place: int = -9) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def swap_model(stage: Path) -> None:
    """A whole model of the same shape, as another run would have left it."""
    posttrain_model = stage / "model" / "model.safetensors"
    flip(posttrain_model, place=-4)
    flip(posttrain_model, place=-8)


def link_empty(stage: Path) -> None:
    shutil.rmtree(stage / "model")
    (stage / "model").symlink_to(stage / "nowhere")


SFT: dict[str, tuple[Callable[[Path], object], str]] = {
    "model gone": (lambda stage: shutil.rmtree(stage / "model"), "model/config.json is missing"),
    "one weight": (
        lambda stage: flip(stage / "model" / "model.safetensors"),
        "model/model.safetensors has changed",
    ),
    "tokenizer": (
        lambda stage: flip(stage / "model" / "tokenizer_config.json"),
        "model/tokenizer_config.json has changed",
    ),
    "more weights": (
        lambda stage: shutil.copy(
            stage / "model" / "model.safetensors", stage / "model" / "other.safetensors"
        ),
        "model/other.safetensors was added",
    ),
    "another model": (swap_model, "model/model.safetensors has changed"),
    "a link to nothing": (link_empty, "model/config.json is missing"),
    "metrics cut": (
        lambda stage: (stage / "metrics.jsonl").write_bytes(b""),
        "metrics.jsonl has changed",
    ),
    "the list": (lambda stage: flip(stage / "manifest.json"), "manifest.json has changed"),
    "no list": (lambda stage: (stage / "manifest.json").unlink(), "manifest.json is missing"),
    "the record": (
        lambda stage: (stage / "done.json").write_text(
            (stage / "done.json").read_text().replace('"seconds": ', '"seconds": 1')
        ),
        "done.json: has changed since it was written",
    ),
}


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The values of a run whose SFT is finished, and which died in rl after step 4."""
    values = given(tmp_path_factory.mktemp("moved") / "cut", GRPO)
    cut(values, save=3)
    return values


@pytest.mark.parametrize("case", SFT)
def test_a_finished_stage_that_has_changed_is_refused_and_taken_once_it_is_back(
    case: str, cut_run: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(cut_run["run"]["folder"])
    shutil.copytree(folder / "sft", tmp_path / "kept")
    damage, reason = SFT[case]
    damage(folder / "sft")
    try:
        with pytest.raises(ValueError, match=reason) as refused:
            go(cut_run, resume=True)
        with pytest.raises(ValueError, match=reason):
            go(cut_run)
    finally:
        shutil.rmtree(folder / "sft")
        shutil.copytree(tmp_path / "kept", folder / "sft")
    assert str(folder / "sft") in str(refused.value)
    assert [path.name for path in folder.glob("*.old-*")] == []


def test_what_was_put_back_ends_bit_for_bit(
    tmp_path: Path, stopped: dict[str, Any], uninterrupted: RunFolder
) -> None:
    """Also where a link leads to it, and where pictures and hidden files came and went."""
    sft = tmp_path / "cut" / "sft"
    (sft / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"(?s)model/.* is missing.*Put it back"):
        go(stopped, resume=True)
    (sft / "model").symlink_to(tmp_path / "elsewhere")
    (sft / "curves.png").unlink()
    (sft / ".DS_Store").write_bytes(b"")
    done, text = go(stopped, resume=True)
    assert "sft: already finished; taken from the run folder" in text
    same(done.folder, uninterrupted)


def test_a_removed_stage_is_done_over_and_the_rest_goes_on(
    tmp_path: Path, stopped: dict[str, Any], uninterrupted: RunFolder
) -> None:
    """What the message offers: the same weights come again, so the checkpoints of rl still fit."""
    shutil.rmtree(tmp_path / "cut" / "sft")
    done, text = go(stopped, resume=True)
    assert "sft: already finished" not in text
    assert "rl: goes on from step 4" in text
    same(done.folder, uninterrupted)


def test_what_was_made_from_other_weights_is_done_over(
    tmp_path: Path, stopped: dict[str, Any], uninterrupted: RunFolder
) -> None:
    """A whole sft folder that was exchanged, record and all, for that of a run by the same recipe.

    On a GPU two such runs differ; here one weight of the other was changed before it was recorded.
    """
    other = given(tmp_path / "other", GRPO)
    cut(other, save=3)
    stage = RunFolder(tmp_path / "other")
    flip(stage.stage("sft").model / "model.safetensors")
    record = dict(stage.stage_record("sft") or {})
    stage.finish("sft", digest=record["digest"], inputs=record["inputs"], record=record)
    shutil.rmtree(tmp_path / "cut" / "sft")
    (tmp_path / "other" / "sft").rename(tmp_path / "cut" / "sft")
    done, text = go(stopped, resume=True)
    assert "rl: starts anew; what it had left is in" in text
    assert not same_weights(done.model, uninterrupted.stage("rl").model)


def test_starting_anew_in_the_place_of_the_same_run_says_how_it_goes_on(
    stopped: dict[str, Any],
) -> None:
    """Of another recipe, resume would have been refused."""
    other = {**stopped, "rl": {**stopped["rl"], "learning_rate": 1e-5}}
    folder = Path(stopped["run"]["folder"])
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    assert f"next time, to go on instead: posttrain resume {folder}" in go(stopped)[1]
    shutil.rmtree(folder)
    kept.rename(folder)
    text = go(other)[1]
    assert "rl: starts anew; what it had left is in" in text
    assert "to go on instead" not in text


@pytest.mark.parametrize("stage", ["sft", "rl", "eval"])
def test_a_finished_run_vouches_for_every_stage(tmp_path: Path, stage: str) -> None:
    """Not "already finished"; what is removed is done over, and the end is the same."""
    values = given(tmp_path / "run", {"steps": 2})
    whole, _ = go(values)
    summary = {**whole.summary, "seconds": 0}
    assert "already finished; nothing to do" in go(values, resume=True)[1]
    place = tmp_path / "run" / stage
    chosen = place / ("problems.jsonl" if stage == "eval" else "model/model.safetensors")
    flip(chosen)
    with pytest.raises(ValueError, match=f"{chosen.name} has changed"):
        go(values, resume=True)
    if stage != "eval":
        with pytest.raises(ValueError, match=f"{chosen.name} has changed"):
            posttrain.generate(place / "model", "1+1=")
    shutil.rmtree(place)
    done, text = go(values, resume=True)
    assert text.count("already finished; taken from the run folder") == 2
    assert {**done.summary, "seconds": 0} == summary


def test_a_model_that_is_gone_is_not_another_stages(tmp_path: Path) -> None:
    """Without rl/model the policy of the run was taken to be that of SFT."""
    values = given(tmp_path / "run", {"steps": 1})
    go(values)
    shutil.rmtree(tmp_path / "run" / "rl" / "model")
    with pytest.raises(ValueError, match=r"(?s)rl: is not as the stage rl has left it.*is missing"):
        posttrain.evaluate(tmp_path / "run")
    with pytest.raises(ValueError, match=r"there is no 'model' in .*rl"):
        posttrain.rl(
            model=tmp_path / "run" / "rl" / "model", task="arithmetic", folder=tmp_path / "x"
        )


def test_reward_model_and_preferences_are_verified(tmp_path: Path) -> None:
    values = given(tmp_path / "cut", GRPO, eval=None, **PREFERRED)
    with dying(1), pytest.raises(Killed):
        go(values)
    for file in ("reward/model/model.safetensors", "prefer/pairs.jsonl", "reward/verdict.json"):
        kept = (tmp_path / "cut" / file).read_bytes()
        flip(tmp_path / "cut" / file)
        with pytest.raises(ValueError, match=f"{Path(file).name} has changed"):
            go(values, resume=True)
        (tmp_path / "cut" / file).write_bytes(kept)
    _, text = go(values, resume=True)
    assert text.count("taken from the run folder") == 3


@pytest.mark.parametrize(
    ("file", "change"),
    [("config.json", ("0.01", "0.03")), ("rl/begun.json", ('"digest": "', '"digest": "0'))],
)
def test_what_a_run_goes_on_by_is_verified(
    tmp_path: Path, stopped: dict[str, Any], file: str, change: tuple[str, str]
) -> None:
    """By another learning rate, or as if begun under another, rl would start anew."""
    path = tmp_path / "cut" / file
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=f"{file}: has changed since it was written"):
        run(recorded_recipe(tmp_path / "cut"), console=Console(quiet=True), resume=True)
    assert not list((tmp_path / "cut").glob("*.old-*"))
    path.write_text(text)
    assert "rl: goes on from step 4" in go(stopped, resume=True)[1]


def test_a_finished_run_without_its_config_is_looked_at_again(tmp_path: Path) -> None:
    values = {**given(tmp_path / "run", GRPO), "eval": {"problems": 4, "max_new_tokens": 4}}
    values["rl"] = {**values["rl"], "steps": 2}
    go(values)
    (tmp_path / "run" / "config.json").unlink()
    assert go(values)[1].count("taken from the run folder") == 3
    (tmp_path / "run" / "config.json").unlink()
    values["rl"]["steps"] = 3
    assert "sft: already finished; taken from the run folder\nrl: starts anew" in go(values)[1]


@pytest.mark.parametrize("file", ["before.json", "before.jsonl"])
def test_the_evaluation_before_rl_is_verified(
    tmp_path: Path, stopped: dict[str, Any], file: str, uninterrupted: RunFolder
) -> None:
    """It is finished long before its stage; removed, it is measured again."""
    rl = tmp_path / "cut" / "rl"
    text = (rl / file).read_text()
    (rl / file).write_text(text.replace("0", "1", 1))
    with pytest.raises(ValueError, match=f"{file}: has changed since it was written"):
        go(stopped, resume=True)
    (rl / "before.json").unlink()
    done, _ = go(stopped, resume=True)
    same(done.folder, uninterrupted)


def test_a_folder_of_a_version_without_hashes_says_so_once(
    tmp_path: Path, stopped: dict[str, Any]
) -> None:
    sft = RunFolder(tmp_path / "cut").stage("sft").path
    record = RunFolder(tmp_path / "cut").stage_record("sft") or {}
    old = {k: v for k, v in record.items() if k not in ("manifest", "sha256", "model", "inputs")}
    write_json(sft / "done.json", old)
    (sft / "manifest.json").unlink()
    digest = (RunFolder(tmp_path / "cut").begun("rl") or {})["digest"]
    write_json(tmp_path / "cut/rl/begun.json", {"stage": "rl", "digest": digest})
    (sft / "model").rename(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model is missing"):
        go(stopped, resume=True)
    (tmp_path / "model").rename(sft / "model")
    _, text = go(stopped, resume=True)
    assert text.count("recorded no hashes") == 1


def test_the_model_of_a_checkpoint_is_verified(stopped: dict[str, Any]) -> None:
    model = RunFolder(stopped["run"]["folder"]).stage("rl").checkpoint(2) / "model"
    assert posttrain.generate(model, "1+1=", max_new_tokens=2)
    flip(model / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)000002: is not as it was written.*model/model\."):
        posttrain.generate(model, "1+1=")


def vanishing(folder: Path, act: Callable[[Path], object], *, calls: int) -> Supplied:
    """A reward under which something happens to a folder."""
    seen = 0

    def spread(completion: str) -> float:
        nonlocal seen
        seen += 1
        if seen == calls:
            act(folder)
        return sum(map(ord, completion)) % 11 / 11

    return Supplied(rewards=RewardScorer({spread: 1.0}))


def replaced(folder: Path) -> None:
    folder.rename(folder.with_name(".away"))
    folder.mkdir()


@pytest.mark.parametrize(
    ("inside", "how"),
    [
        *(("", how) for how in ("deleted", "moved", "replaced")),
        *(("rl", how) for how in ("deleted", "replaced")),
        *((inside, "deleted") for inside in ("rl/rollouts", "rl/metrics.jsonl", "sft/model")),
    ],
)
def test_a_folder_that_goes_under_a_run_ends_it(tmp_path: Path, inside: str, how: str) -> None:
    """With a message, and without a new folder that holds half of it."""
    values = given(tmp_path / "run", {"steps": 3}, rewards=None, eval=None)
    place = tmp_path / "run" / inside
    acts: dict[str, Callable[[Path], object]] = {
        "deleted": lambda path: path.unlink() if path.is_file() else shutil.rmtree(path),
        "moved": lambda path: path.rename(tmp_path / "away"),
        "replaced": replaced,
    }
    supplied = vanishing(place, acts[how], calls=20)
    with pytest.raises((MovedError, ValueError), match=r"was deleted, moved or|is missing") as gone:
        go(values, supplied=supplied)
    assert str(place) in str(gone.value).replace("sft: is not as", "sft/model: is not as")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not list(place.iterdir()) if how == "replaced" else not place.exists()


def test_what_was_moved_away_under_a_run_goes_on_where_it_is_put_back(tmp_path: Path) -> None:
    values = given(tmp_path / "run", {"steps": 4, "save_every": 1}, rewards=None, eval=None)
    moved = vanishing(tmp_path / "run", lambda path: path.rename(tmp_path / "away"), calls=40)
    with pytest.raises(MovedError, match=r"Put it back as it was, then call the same function"):
        go(values, supplied=moved)
    (tmp_path / "away").rename(tmp_path / "run")
    quiet = vanishing(tmp_path, lambda path: None, calls=0)
    done, text = go(values, supplied=quiet, resume=True, allow_changes=["supplied"])
    assert "rl: goes on from step 2" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    same(done.folder, go(values, supplied=quiet)[0].folder)


def test_the_command_ends_with_a_message_and_a_code(tmp_path: Path) -> None:
    """Under ``posttrain run`` the folder is deleted by what grades."""
    (tmp_path / "graders.py").write_text(
        "import shutil\ncalls = []\n"
        "def spread(completion: str) -> float:\n"
        "    calls.append(completion)\n"
        f"    if len(calls) == 20: shutil.rmtree({str(tmp_path / 'run')!r})\n"
        "    return len(set(completion)) / 8\n"
    )
    values = given(tmp_path / "run", {"steps": 3}, rewards=None, eval=None, sft=None)
    values["rewards"] = {"graders:spread": 1.0}
    (tmp_path / "recipe.toml").write_text(to_toml(recipe_from_dict(values)))
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.cli", "run", "recipe.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"posttrain: {tmp_path / 'run'}: was deleted, moved or replaced" in done.stderr
    assert f"posttrain resume {tmp_path / 'run'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_manifest_names_what_is_missing_changed_and_added(tmp_path: Path) -> None:
    with new_folder(tmp_path / "rl") as folder:
        (folder / "model").mkdir()
        for name in ("a", "b", "model/c"):
            (folder / name).write_bytes(b"12345")
        write_rollouts(folder / "rollouts" / "step-000001.parquet", [], step=1)
    rl = tmp_path / "rl"
    digest = write_manifest(rl, stage=True)
    files = read_manifest(rl, digest=digest)
    assert files["a"] == {
        "bytes": 5,
        "sha256": "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5",
    }
    assert find_changes(rl, files, stage=True) == []
    (rl / "a").unlink()
    (rl / "b").write_bytes(b"12354")
    (rl / "model" / "d").write_bytes(b"")
    (rl / "rollouts" / "index.arrow").write_bytes(b"derived")
    assert find_changes(rl, files, stage=True) == [
        "a is missing",
        "b has changed",
        "model/d was added",
    ]
    assert find_changes(rl, files, stage=True, hashes=False) == [
        "a is missing",
        "model/d was added",
    ]
    assert find_changes(rl, files, stage=True, within="model/") == ["model/d was added"]
    with pytest.raises(ValueError, match=r"manifest\.json has changed"):
        read_manifest(rl, digest="another")


@pytest.mark.parametrize("left", ["{", "{}"], ids=["cut off", "of nothing"])
def test_a_start_anew_asks_nothing_of_the_config_it_replaces(tmp_path: Path, left: str) -> None:
    """What a killed run has left there goes aside, and its damaged config with it."""
    values = given(tmp_path / "run", {"steps": 2, "save_every": 1}, sft=None, eval=None)
    cut(values, save=2)
    (tmp_path / "run" / "config.json").write_text(left)
    done, text = go(values)
    assert "rl: starts anew; what it had left is in" in text
    assert "to go on instead" not in text
    assert done.folder.finished
