"""The line ``disk`` of a check: what a run takes at its fullest, by hand, and what is free."""

from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe

from posttrain.check import Line, check_recipe, resources
from posttrain.check.resources import StageSpace, free_space, peak, stage_space
from posttrain.config import recipe_from_dict, resolve

HELD = 4000  # 1000 weights of 4 bytes; with AdamW's moments 12,000 bytes
WEIGHTS = 39_712  # of the model of small_runs
Usage = namedtuple("Usage", "total used free")


def rooms(changes: dict[str, Any], stages: Sequence[str] = ()) -> list[StageSpace]:
    run = changes.pop("run", {})
    given = recipe(Path("run"), **changes)
    given["run"] |= run
    found = resolve(recipe_from_dict(given))
    return list(stage_space(found, stages or found.stages, held=HELD))


@pytest.mark.parametrize(
    ("changes", "stage", "expected"),
    [
        # sft: 3 × (12,000 + 4,000 of the best weights) + model/ and best/model.
        ({}, "sft", 3 * 16_000 + 2 * 4_000),
        ({"sft": {"result": "best"}}, "sft", 3 * 16_000 + 4_000),
        # Nothing held out: rl is as full as sft, 3 × 12,000 + 4,000, and has sft's model beside it.
        ({"sft": {"evaluate_every": 0}}, "rl", 3 * 12_000 + 4_000 + 4_000),
        # A critic of its own: 24,000 each, and both models of sft.
        ({"rl": {"algorithm": "ppo"}}, "rl", 3 * 24_000 + 4_000 + 8_000),
        ({"run": {"keep_last": 1}}, "sft", 2 * 16_000 + 8_000),
        # The one at Ctrl-C.
        ({"run": {"save_minutes": 0}, "sft": {"result": "best"}}, "sft", 16_000 + 4_000),
        # Two that were asked for stay while rl runs: 2 × 16,000 and 8,000 of models.
        ({"sft": {"save_every": 2}}, "rl", 3 * 12_000 + 4_000 + 40_000),
        # The reference is in a checkpoint where it is refreshed.
        (
            {"rl": {"kl": {"placement": "loss", "coefficient": 0.1, "refresh_every": 2}}},
            "rl",
            3 * 16_000 + 4_000 + 8_000,
        ),
    ],
)
def test_the_fullest_stage(changes: dict[str, Any], stage: str, expected: int) -> None:
    fullest, needed, _ = peak(rooms(changes))
    assert (fullest.name, needed) == (stage, expected)


def test_once_rl_begins_only_rl_is_still_to_come() -> None:
    (left,) = rooms({}, ["rl"])
    assert (left.name, left.checkpoints + left.models) == ("rl", 40_000)


@pytest.mark.parametrize(("spare", "state"), [(0, "pass"), (-1, "warn")])
@pytest.mark.parametrize("stages", [["sft"], ["sft", "rl"]])
def test_the_line(
    spare: int, state: str, *, stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 × 16 bytes a weight and two models of 4; to the byte, and never a failure."""
    needed = (3 * 16 + 2 * 4) * WEIGHTS
    asked: list[Path] = []

    def usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(0, 0, needed + spare)

    monkeypatch.setattr(resources.shutil, "disk_usage", usage)
    given = recipe(tmp_path / "to" / "come")
    given["run"] |= {"stages": stages}
    line = found(given)
    assert (line.area, line.state) == ("resources", state)
    assert asked == [tmp_path]
    assert "up to 2 MiB in sft (3 x 620 KiB of checkpoints, 310 KiB of models)" in line.text
    assert ("run.keep_last" in line.fix) == (state == "warn")


def test_a_disk_that_cannot_be_asked_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path) -> Usage:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(resources.shutil, "disk_usage", refuses)
    assert found(recipe(tmp_path / "run")).state == "warn"


def test_all_are_kept(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run")
    given["run"] |= {"keep_last": 0}
    assert "every checkpoint is kept" in found(given).text


def test_what_is_free_is_that_of_the_first_folder_there_is(tmp_path: Path) -> None:
    place, free = free_space(tmp_path / "a" / "b")
    assert place == tmp_path
    assert free > 0


def found(given: dict[str, Any]) -> Line:
    (line,) = [n for n in check_recipe(given, fast=True).lines if n.name == "disk"]
    return line
