"""A whole run: what it leaves behind, that a seed repeats it, and that it goes on where it was."""

import json
import linecache
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import recipe, same_weights, small_run, timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.build.setup import Supplied
from posttrain.config import read_recipe, resolve
from posttrain.rewards.scorer import RewardScorer
from posttrain.stages.results import Run
from posttrain.stages.run import run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The small recipe, run once."""
    return small_run(recipe(tmp_path_factory.mktemp("run") / "first"))[0]


def problems(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_file_is_there_and_true(finished: Run) -> None:
    """Metrics of every step, every rollout, the summary, the samples and the picture."""
    folder = finished.folder.path
    assert [record["step"] for record in finished.folder.stage("sft").records()] == [*range(9)]
    rl = finished.folder.stage("rl").records()
    assert [record["step"] for record in rl] == [1, 2, 3]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["seed"] == 1
    assert summary["seconds"] > 0
    assert summary["stages"] == ["sft", "rl", "eval"]
    before = problems(folder / "rl" / "before.jsonl")
    after = problems(folder / "eval" / "problems.jsonl")
    assert summary["accuracy_before"] == sum(row["correct"] for row in before) / 10
    assert summary["accuracy_after"] == sum(row["correct"] for row in after) / 10
    assert summary["reward_last"] == rl[-1]["reward/mean"]
    samples = json.loads((folder / "samples.json").read_text())
    assert len(samples) == 5
    answers = {row["prompt"]: row["completion"] for row in after}
    assert all(answers[sample["prompt"]] == sample["after"] for sample in samples)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((folder / "config.json").read_text())
    assert config["rl"]["loss"] == {"name": "clipped", "clip_low": 0.2, "clip_high": 0.2}


def test_the_rollouts_add_up_to_the_metrics(finished: Run) -> None:
    """The Parquet files hold every completion: their mean reward is the one that was logged."""
    for record in finished.folder.stage("rl").records()[1:]:
        rows = finished.samples(int(record["step"]), limit=100)
        assert len(rows) == 16
        mean = sum(row["reward"] for row in rows) / 16
        assert mean == pytest.approx(record["reward/mean"], abs=1e-12)
        assert sum(row["length"] for row in rows) == record["rollout/tokens"]
        assert {row["version"] for row in rows} == {record["step"] - 1}
        groups = [rows[start : start + 4] for start in range(0, 16, 4)]
        for group in groups:
            assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-5)
            assert len({row["prompt_id"] for row in group}) == 1


def test_every_metric_that_is_logged_is_explained(finished: Run) -> None:
    """docs/metrics.md has a row for each name."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    explained = set(re.findall(r"^\| `([^`]+)`", page, re.M))
    logged = {
        name
        for stage in ("sft", "rl")
        for record in finished.folder.stage(stage).records()
        for name in record
    }
    logged = {"reward/part/NAME" if name.startswith("reward/part/") else name for name in logged}
    assert logged - {"step"} <= explained


def test_every_model_folder_loads_in_plain_transformers(finished: Run) -> None:
    """SFT and RL each leave an ordinary folder, and RL changed the weights."""
    sft, rl = finished.folder.stage("sft").model, finished.folder.stage("rl").model
    assert finished.model == rl
    assert not same_weights(sft, rl)
    tokenizer = AutoTokenizer.from_pretrained(rl)
    model = AutoModelForCausalLM.from_pretrained(rl)
    tokens = tokenizer("3+4=", return_tensors="pt")
    with torch.no_grad():
        assert bool(torch.isfinite(model(**tokens).logits).all())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_run_object_answers(finished: Run, tmp_path: Path) -> None:
    """Metrics as a frame, samples, a picture elsewhere."""
    frame = finished.metrics()
    assert frame["step"].to_pylist() == [1, 2, 3]
    assert frame["train/optimiser_steps"].to_pylist() == [1.0, 1.0, 1.0]
    assert len(finished.metrics("sft")) == 9  # the held-out loss before the first step, and 8
    assert len(finished.samples(limit=5)) == 5
    assert finished.plot(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert finished.summary["model"] == str(finished.model)


def test_same_seed_same_run(finished: Run, tmp_path: Path) -> None:
    """Every number but the clock's, and every bit of the weights; another seed is another run."""
    again, _ = small_run(recipe(tmp_path / "again"))
    for stage in ("sft", "rl"):
        first, second = finished.folder.stage(stage), again.folder.stage(stage)
        assert timeless(first.records()) == timeless(second.records())
        assert same_weights(first.model, second.model)
    assert finished.folder.samples == again.folder.samples
    other, _ = small_run(recipe(tmp_path / "other", run={"seed": 2}))
    assert timeless(other.folder.stage("rl").records()) != timeless(
        again.folder.stage("rl").records()
    )
    assert not same_weights(other.folder.stage("sft").model, again.folder.stage("sft").model)


def interrupted(step: int) -> RewardScorer:
    """The task's own reward, and a user who presses Ctrl-C in step ``step``."""
    left = iter(range(10 + 16 * (step - 1)))  # the evaluation before asks about 10 problems

    def numeric(completion: str, answer: str) -> float:
        if next(left, None) is None:  # an iterator has no value: both rewards count as one
            raise KeyboardInterrupt
        return float(completion == answer) - 0.1 * len(completion)

    return RewardScorer({numeric: 1.0})


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """The finished stage is kept, the broken one moved aside and run again."""
    given = recipe(tmp_path / "broken", rewards=None, grading={"workers": 0})
    with pytest.raises(KeyboardInterrupt):
        small_run(given, supplied=Supplied(rewards=interrupted(3)))
    folder = tmp_path / "broken"
    assert not (folder / "summary.json").exists()
    written = (folder / "sft" / "model" / "model.safetensors").stat().st_mtime_ns
    done, text = small_run(given, supplied=Supplied(rewards=interrupted(99)))
    assert "sft: already finished" in text
    assert "rl: already finished" not in text
    assert (folder / "sft" / "model" / "model.safetensors").stat().st_mtime_ns == written
    assert len((folder / "rl.old-1" / "metrics.jsonl").read_text().splitlines()) == 2
    whole = {**given, "run": {"seed": 1, "folder": str(tmp_path / "whole")}}
    other, _ = small_run(whole, supplied=Supplied(rewards=interrupted(99)))
    assert same_weights(done.model, other.model)
    assert timeless(done.folder.stage("rl").records()) == timeless(
        other.folder.stage("rl").records()
    )


def test_a_finished_run_is_left_alone(finished: Run) -> None:
    """Nothing is run again, and another recipe is refused by name of what changed."""
    given = recipe(finished.folder.path)
    written = (finished.folder.path / "summary.json").stat().st_mtime_ns
    _, text = small_run(given)
    assert "already finished; nothing to do" in text
    assert (finished.folder.path / "summary.json").stat().st_mtime_ns == written
    changed = recipe(finished.folder.path, rl={"steps": 4})
    with pytest.raises(ValueError, match=r"another recipe \(rl\.steps: 3 → 4\)"):
        small_run(changed)


def test_a_stage_whose_settings_changed_is_run_again(tmp_path: Path) -> None:
    """In an unfinished folder, SFT is kept and RL follows its new settings."""
    folder = tmp_path / "run"
    small_run(recipe(folder, eval=None))
    (folder / "summary.json").unlink()
    done, text = small_run(recipe(folder, eval=None, rl={"steps": 2}))
    assert "sft: already finished" in text
    assert len(done.folder.stage("rl").records()) == 2
    assert (folder / "rl.old-1" / "done.json").exists()


def test_a_recipe_file_is_kept_as_written(tmp_path: Path) -> None:
    """The same from TOML: the text is in the folder, word for word."""
    text = f"""# my recipe
run = {{ folder = "{tmp_path / "run"}" }}
model = {{ name = "tiny", options = {{ hidden_size = 32, num_layers = 1, max_positions = 64 }} }}
task = {{ name = "arithmetic", operators = "+", digits = 1, num_train = 20, num_test = 5 }}
rl = {{ steps = 1, prompts_per_step = 2, group_size = 2, max_new_tokens = 3 }}
"""
    (tmp_path / "mine.toml").write_text(text)
    done = run(read_recipe(tmp_path / "mine.toml"), text=text)
    assert done.folder.recipe == text
    assert done.summary["stages"] == ["rl"]
    assert "accuracy_before" not in done.summary


def test_the_demo_recipe_is_the_same_job() -> None:
    """recipes/demo.toml runs these stages into the folder that `make demo` promises."""
    demo = resolve(read_recipe(Path(__file__).parents[2] / "recipes" / "demo.toml"))
    assert demo.stages == ("sft", "rl", "eval")
    assert demo.run.folder == "runs/demo"


def test_the_curve_starts_before_and_ends_after(tmp_path: Path) -> None:
    """With evaluate_every, the same problems are asked before the first step and after the last."""
    given = recipe(tmp_path / "curve")
    given["rl"] = {**given["rl"], "evaluate_every": 2, "evaluate_problems": 5}
    run, _ = small_run(given)
    points = [r["step"] for r in run.folder.stage("rl").records() if "eval/accuracy" in r]
    assert points == [0, 2, 3]


def test_an_edited_reward_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a reward function is part of what a run folder remembers."""
    given = recipe(tmp_path / "edited")
    given["rewards"] = {"edited_reward:score": 1.0}
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_reward.py"
    file.write_text("def score(completion):\n    return float(len(completion))\n")
    small_run(given)
    file.write_text("def score(completion):\n    return -1.0 * len(completion)\n")
    sys.modules.pop("edited_reward")
    linecache.clearcache()
    with pytest.raises(ValueError, match="holds the finished run of another recipe"):
        small_run(given)


def test_a_run_leaves_the_threads_of_its_process_as_they_were(tmp_path: Path) -> None:
    """The next run of the same process may be of a larger model."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        small_run(recipe(tmp_path / "run", rl=None, eval=None))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_demonstrations_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": text} for text in ("2", "2" * 100)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"sft": {"data": str(data), "wrong_share": 0.0}, "rl": None, "rewards": None}
    with pytest.warns(UserWarning, match="1 of 2 demonstrations are longer than the model's"):
        small_run(recipe(tmp_path / "run", eval=None, **options))
    data.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(ValueError, match=r"none of the 1 demonstrations fits .* of 64 tokens"):
        small_run(recipe(tmp_path / "none", eval=None, **options))
