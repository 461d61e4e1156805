"""The run folder: what may be taken up, what is refused, what is skipped."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from posttrain.runs import RunFolder, config_digest, new_folder
from posttrain.track import JsonlTracker, Stage

CONFIG = {"run": {"folder": "runs/a", "seed": 1}, "sft": {"epochs": 2}, "rl": {"steps": 6}}
RECIPE = "# mine\n[rl]\nsteps = 6\n"


def with_steps(steps: int) -> dict[str, Any]:
    return CONFIG | {"rl": {"steps": steps}}


def test_a_run_keeps_what_it_was_given(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "runs" / "a", config=CONFIG, recipe=RECIPE)
    run = RunFolder(tmp_path / "runs" / "a")
    assert (run.recipe, run.config, run.summary, run.samples) == (RECIPE, CONFIG, None, [])
    assert (run.path / "recipe.toml").read_text() == RECIPE
    assert not run.finished
    run.write_samples([{"prompt": "1+1=", "before": "3", "after": "2"}])
    run.write_summary({"accuracy_after": 1.0})
    assert run.summary == {"accuracy_after": 1.0}
    assert run.samples == [{"prompt": "1+1=", "before": "3", "after": "2"}]
    assert run.finished


def test_a_run_started_from_python_has_no_recipe(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path, config=CONFIG).recipe is None


def test_finished_stages_are_known_by_their_config(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    digest = config_digest(CONFIG["sft"])
    assert not run.stage_done("sft", digest)
    assert run.stage_record("sft") is None
    stage = run.begin("sft")
    assert stage.previous is None
    run.finish("sft", digest=digest, record={"accuracy": 0.5})
    again = RunFolder.create(tmp_path, config=CONFIG)
    assert again.stage_done("sft", digest)
    assert not again.stage_done("sft", config_digest({"epochs": 3}))
    record = again.stage_record("sft")
    assert record is not None
    assert (record["digest"], record["accuracy"]) == (digest, 0.5)


def test_what_a_killed_process_began_to_write_is_no_attempt(tmp_path: Path) -> None:
    """Killed while the first file of a stage was being written: nothing is moved aside."""
    run = RunFolder.create(tmp_path, config=CONFIG)
    run.begin("rl")
    (tmp_path / "rl" / ".begun.json.4711.tmp").write_text("{")
    assert run.begin("rl").previous is None
    assert list((tmp_path / "rl").iterdir()) == []
    assert not list(tmp_path.glob("rl.old-*"))


def test_weights_that_a_killed_process_handed_over_are_removed(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config=CONFIG)
    (tmp_path / "vllm-x7f3" / "2").mkdir(parents=True)
    (tmp_path / "vllm.log").write_text("started")
    RunFolder.create(tmp_path, config=CONFIG)
    assert not (tmp_path / "vllm-x7f3").exists()
    assert (tmp_path / "vllm.log").exists()


def test_a_digest_depends_on_all_it_is_given_and_not_on_order() -> None:
    assert config_digest({"a": 1, "b": {"c": 2, "d": 3}}) == config_digest(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    digests = [
        config_digest({"a": 1}),
        config_digest({"a": 2}),
        config_digest({"a": 1}, "the stage before"),
        config_digest({"a": "1"}),
        config_digest({}),
    ]
    assert len(set(digests)) == len(digests)


def test_an_attempt_that_was_cut_short_is_moved_aside_and_not_lost(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    for attempt in range(3):
        stage = run.begin("rl")
        assert list(stage.path.iterdir()) == []
        stage.metrics.write_text(str(attempt))
    assert stage.previous == tmp_path / "rl.old-2"
    assert (tmp_path / "rl.old-1" / "metrics.jsonl").read_text() == "0"
    assert (tmp_path / "rl.old-2" / "metrics.jsonl").read_text() == "1"
    assert stage.metrics.read_text() == "2"


def test_a_finished_stage_is_replaced_only_when_told(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    run.begin("rl").metrics.write_text("first")
    run.finish("rl", digest="1")
    run.write_summary({})
    with pytest.raises(ValueError, match="the stage 'rl' is finished"):
        run.begin("rl")
    assert run.stages == ["rl"]
    stage = run.begin("rl", replace=True)
    assert stage.previous is not None
    assert (stage.previous / "metrics.jsonl").read_text() == "first"
    assert (run.stages, run.stage_record("rl"), run.finished) == ([], None, False)


def test_the_model_is_that_of_the_last_stage_that_made_one(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    assert run.model is None
    for stage in ("sft", "rl", "eval"):  # neither the order of the alphabet nor of its reverse
        folder = run.begin(stage)
        if stage != "eval":
            with new_folder(folder.model) as model:
                (model / "config.json").write_text("{}")
        run.finish(stage, digest=stage)
    assert run.stages == ["sft", "rl", "eval"]
    assert run.model == tmp_path / "rl" / "model"


def test_a_model_of_an_unfinished_stage_does_not_count(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    run.begin("rl").model.mkdir()
    assert run.model is None


def test_metrics_of_a_stage_are_records_and_a_frame(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    folder = run.begin("rl")
    assert folder.records() == []
    assert folder.frame().num_rows == 0
    tracker = JsonlTracker(Stage(name="rl", folder=folder.path, total_steps=2))
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log(1, {"eval/accuracy": 1.0})
    tracker.close()
    assert len(folder.records()) == 2
    frame = run.stage("rl").frame()
    assert frame.to_pylist() == [{"step": 1, "reward/mean": 0.5, "eval/accuracy": 1.0}]
    assert folder.checkpoint(12).relative_to(tmp_path) == Path("rl/checkpoints/step-000012")


def test_a_folder_of_something_else_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # a model folder has one, too
    (tmp_path / "model.safetensors").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"is not a run folder \(it holds config.json, model.saf"):
        RunFolder.create(tmp_path, config=CONFIG)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="is not a run folder"):
        RunFolder(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ValueError, match="is a file; choose another run folder"):
        RunFolder.create(tmp_path / "a", config=CONFIG)
    with pytest.raises(ValueError, match="cannot be written"):
        RunFolder.create(tmp_path / "a" / "b", config=CONFIG)


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write anywhere
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\); choose"):
        RunFolder.create(tmp_path, config=CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_of_another_recipe_is_refused_with_the_difference(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config=CONFIG, recipe=RECIPE).write_summary({})
    with pytest.raises(ValueError, match=r"of another recipe \(rl.steps: 6 → 12\); extend"):
        RunFolder.create(tmp_path, config=with_steps(12), recipe="new")
    assert RunFolder(tmp_path).recipe == RECIPE
    elsewhere = CONFIG | {"run": {"folder": "copied/to", "seed": 1}}  # a run can be moved
    assert RunFolder.create(tmp_path, config=elsewhere).finished


def test_a_run_that_is_not_finished_may_change_its_recipe(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config=CONFIG, recipe=RECIPE)
    run = RunFolder.create(tmp_path, config=with_steps(12), recipe="new")
    assert (run.recipe, run.config) == ("new", with_steps(12))


def test_creation_that_was_cut_short_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".run.json.123.tmp").write_text("{")
    run = RunFolder.create(tmp_path, config=CONFIG)
    (tmp_path / "config.json").unlink()
    assert RunFolder.create(tmp_path, config=CONFIG).config == CONFIG == run.config


@pytest.mark.parametrize("mark", ['{"layout": 99}', "[]"])
def test_a_layout_of_the_future_is_refused(mark: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(mark)
    with pytest.raises(ValueError, match="this posttrain knows 1"):
        RunFolder(tmp_path)


@pytest.mark.parametrize("stage", ["", "../rl", "rl.old-1", "RL", "a/b"])
def test_a_stage_has_a_plain_name(stage: str, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, config=CONFIG)
    with pytest.raises(ValueError, match="expected a name like 'rl'"):
        run.stage(stage)


def test_hacking_that_lasted_is_the_first_finding(tmp_path: Path) -> None:
    """Whichever stage found it: what was cut, or learned by heart before, is told after it."""
    given = {"sft": ["sft_memorises"], "eval": ["all_truncated", "hacking"]}
    run = RunFolder.create(tmp_path / "run", config=CONFIG, recipe=RECIPE)
    for stage, names in given.items():
        (run.path / stage).mkdir()
        rows = [{"step": 3, "finding": name, "until": None} for name in names]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run.path / stage / "diagnosis.jsonl").write_text(text)
    found = run.findings()
    assert found[0]["finding"] == "hacking"
    assert {row["finding"] for row in found[1:]} == {"sft_memorises", "all_truncated"}


def test_a_finished_run_of_fewer_steps_is_told_how_to_be_prolonged(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config=CONFIG).write_summary({})
    with pytest.raises(ValueError, match=rf"extend it \(posttrain resume {tmp_path} --rl.steps 9"):
        RunFolder.create(tmp_path, config=with_steps(9))
    with pytest.raises(ValueError, match=r"rl.rate: .*\); choose another run folder"):
        RunFolder.create(tmp_path, config=CONFIG | {"rl": {"steps": 9, "rate": 1}})
