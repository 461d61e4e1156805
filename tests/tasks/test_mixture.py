"""Several tasks with weights, and a curriculum, in whole runs that go on exactly."""

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import cut, given, go, same
from small_runs import TASK

from posttrain.build.answer_check import with_check
from posttrain.build.fingerprint import fingerprints
from posttrain.config import recipe_from_dict
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import read_rollouts
from posttrain.tasks import PromptTask, make_task
from posttrain.tasks.demonstrations import demonstrations
from posttrain.types import Prompt

SORT = {"name": "sort", "length": 3, "maximum": 5, "num_train": 20, "num_test": 5}
MIXTURE = {"name": "mixture", "tasks": [{**TASK, "weight": 2.0}, SORT]}


def short(completions: list[str], **others: Any) -> list[float]:
    """A reward of TRL's signature."""
    return [1.0 for _ in completions]


def is_task(completion: str, task: str) -> float:
    """A reward of a column ``task``."""
    return float(completion == task)


def _own(reward: Any) -> PromptTask:
    asked = (Prompt(id="train-0", text="Which?", columns={"task": "math"}),)
    return PromptTask(name="own", rewards={reward: 1.0}, train=asked, test=(), solve=str)


@pytest.fixture(autouse=True)
def _own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of tasks."""
    own = types.ModuleType("own_tasks")
    vars(own).update(listed=lambda: _own(short), named=lambda: _own(is_task))
    monkeypatch.setitem(sys.modules, "own_tasks", own)


def test_each_task_is_scored_by_its_own_rewards() -> None:
    task = make_task(MIXTURE)
    scorer, marks = with_check(RewardScorer(task.rewards), task, accuracy=None)
    assert marks.check == "by_task"
    assert [len(task.prompts(split)) for split in ("train", "test")] == [60, 15]
    assert {prompt.columns["task"] for prompt in task.prompts("test")[:2]} == {"arithmetic", "sort"}
    for prompt in task.prompts("train"):
        score = scorer.score_text(prompt, task.gold(prompt))
        name = prompt.columns["task"]
        assert score.value == score.parts[f"by_task/{name}"] == 1.0
        assert scorer.score_text(prompt, "?").value < 1.0
    assert len(demonstrations(task, num=30, wrong_share=0.5)) == 30


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([SORT], "at least 2 tasks, got 1"),
        ([SORT, SORT], "two are called 'sort'; give one another name with as"),
        ([SORT, {**TASK, "weight": 0}], "the weight of 'arithmetic' must be above 0, got 0"),
        ([SORT, {**TASK, "weight": "2"}], "must be above 0, got '2'"),
        ([SORT, {"digits": 1}], r"task.tasks\[2\]: expected a name"),
        ([SORT, {"name": "arithmetics"}], "did you mean 'arithmetic'"),
        ([SORT, {**TASK, "digit": 1}], "unknown option 'digit'; did you mean 'digits'"),
        ([SORT, {**MIXTURE, "as": "both"}], "'both' is a mixture itself; list its tasks here"),
        ([SORT, {"name": "own_tasks:listed"}], "'short', a reward of 'own_tasks:listed', takes"),
    ],
)
def test_faults_of_a_mixture(tasks: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task({"name": "mixture", "tasks": tasks})


def test_prompts_without_answers_and_columns_called_task(tmp_path: Path) -> None:
    """Rewards of the recipe are for all; a column ``task`` of the rows is that to their rewards."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say hello."}\n')
    plain = {"name": "file", "path": str(tmp_path / "rows.jsonl")}
    assert make_task({"name": "mixture", "tasks": [SORT, plain]}).rewards == {}
    task = make_task({"name": "mixture", "tasks": [SORT, {"name": "own_tasks:named", "as": "own"}]})
    (prompt,) = (p for p in task.prompts("train") if p.columns["task"] == "own")
    assert RewardScorer(task.rewards).score_text(prompt, "math").value == 1.0


def test_another_function_or_folder_of_a_task_is_another_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows" / "train-00000-of-00001.csv"
    rows.parent.mkdir()
    tasks = [{"name": "own_tasks:named"}, {"name": "file", "path": str(rows.parent)}]
    recipe = recipe_from_dict({"task": {"name": "mixture", "tasks": tasks}})
    known = []
    for text in ("prompt\na\n", "prompt\nb\n"):
        rows.write_text(text)
        known.append(fingerprints(recipe)["contents"])
    assert known[0]["task.tasks[1]"] == known[1]["task.tasks[1]"]
    assert known[0]["task.tasks[2].path"] != known[1]["task.tasks[2].path"]


def test_a_run_of_a_mixture_with_a_curriculum_goes_on_exactly(tmp_path: Path) -> None:
    """Cut short at a checkpoint and resumed: the same prompts, rollouts and weights.

    Of four prompts of a step, two thirds are sums.
    """
    rl = {"steps": 6, "save_every": 2, "curriculum": {"low": 0.01, "high": 0.99, "outside": 0.05}}
    sections = {"task": None, "rewards": None}
    values = [given(tmp_path / name, rl, **sections) for name in ("whole", "cut")]
    for each in values:
        each["task"] = MIXTURE
    whole, _ = go(values[0])
    cut(values[1], save=2)
    resumed, _ = go(values[1], resume=True)
    same(whole.folder, resumed.folder)
    rows = read_rollouts(whole.folder.stage("rl").rollouts)
    groups = Counter(row["prompt_id"].partition("/")[0] for row in rows)
    assert groups == {"arithmetic": 64, "sort": 32}
    state = whole.folder.stage("rl").path / "checkpoints"
    assert any(state.rglob("prompt_order.json"))
