"""A grader that breaks on held-out problems: it is told, marked, and ends the run in time."""

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import RL, recipe, small_run

import posttrain
from posttrain.build.setup import Supplied
from posttrain.config import read_recipe, recipe_from_dict, to_toml
from posttrain.rewards import declare
from posttrain.rewards.scorer import RewardScorer
from posttrain.stages.eval import evaluate_recipe
from posttrain.stages.run import run

TRAIN = [{"prompt": f"{n}+1=", "key": "answer"} for n in range(4)]
TEST = [{"prompt": f"{n}+2=", "key": "[red]result"} for n in range(2)]
FIRST = f"reward '{__name__}:lookup' raised KeyError: '[red]result' (test_held_out.py:"


def lookup(completion: str, key: str) -> float:
    """Works on train prompts, and raises on every test prompt."""
    return {"answer": -0.1 * len(completion)}[key]


def breaks_from(call: int) -> Callable[..., float]:
    """A grader that raises from its nth held-out answer on."""
    seen = 0

    def grade(completion: str, key: str) -> float:
        nonlocal seen
        seen += key != "answer"
        return lookup(completion, key if seen >= call else "answer")

    return grade


def run_rl(folder: Path, grade: Callable[..., float] = lookup, **options: Any) -> posttrain.Run:
    return posttrain.rl(
        prompts=TRAIN,
        test_prompts=TEST,
        reward=grade,
        grading={"workers": 0},
        folder=folder,
        **{**RL, **options},
    )


@pytest.mark.parametrize(
    "options", [{}, {"evaluate": False, "evaluate_every": 1, "evaluate_problems": 2}]
)
def test_a_run_ends_before_its_first_step(tmp_path: Path, options: dict[str, Any]) -> None:
    """By the evaluation before the stage, and by the first point of the curve."""
    message = (
        r"2 of 2 scores of held-out problems are broken, more than max_invalid = 0\.1\. "
        rf"The first, on prompt 'test-0': reward '{__name__}:lookup' raised KeyError"
    )
    with pytest.raises(RuntimeError, match=message):
        run_rl(tmp_path / "r", **options)
    assert not any(path.read_text() for path in tmp_path.glob("r/rl/metrics.jsonl"))
    with pytest.raises(RuntimeError, match=message):  # a result that is refused is not kept
        run_rl(tmp_path / "r", resume=True, **options)


@pytest.mark.parametrize(
    ("options", "call", "steps"),
    [
        ({}, 3, [1, 2, 3]),
        ({"evaluate": False, "evaluate_every": 2, "evaluate_problems": 2}, 3, [0, 1]),
    ],
)
def test_a_run_ends_where_the_grader_begins_to_break(
    tmp_path: Path, options: dict[str, Any], call: int, steps: list[int]
) -> None:
    """In the evaluation at the end, and at a later point of the curve."""
    with pytest.raises(RuntimeError, match="2 of 2 scores of held-out problems are broken"):
        run_rl(tmp_path / "r", breaks_from(call), **options)
    lines = (tmp_path / "r" / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps


def test_where_broken_scores_are_allowed_they_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the metrics, the summary, and the table, where no ungraded answer is called wrong."""
    monkeypatch.setenv("COLUMNS", "250")
    run = run_rl(tmp_path / "r", max_invalid=1.0, evaluate_every=3, evaluate_problems=2)
    records = run.folder.stage("rl").records()
    assert [r["eval/invalid"] for r in records if "eval/invalid" in r] == [1.0, 1.0]
    assert (run.summary["invalid_before"], run.summary["invalid_after"]) == (1.0, 1.0)
    assert run.summary["invalid_reason"].startswith(FIRST)
    assert [sample["right_after"] for sample in run.folder.samples] == [None, None]
    shown = capsys.readouterr().out
    assert f"broken held-out scores  100% (first: {FIRST}" in shown
    assert " ?" in shown
    assert "✗" not in shown


def test_shares_before_and_after_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    run = run_rl(tmp_path / "r", breaks_from(4), max_invalid=0.5)
    assert (run.summary["invalid_before"], run.summary["invalid_after"]) == (0.0, 0.5)
    assert [sample["reward_after"] is None for sample in run.folder.samples] == [False, True]
    assert "broken held-out scores  before 0%, after 50% (first: " in capsys.readouterr().out


def test_a_reward_that_decides_and_is_only_monitored_is_told_as_well(tmp_path: Path) -> None:
    """What is learned from works; accuracy goes by the other, which breaks."""

    @declare(checks_answer=True)
    def check(completion: str, key: str) -> float:
        return lookup(completion, key)

    def short(completion: str) -> float:
        return -0.1 * len(completion)

    common: dict[str, Any] = {"prompts": TRAIN, "test_prompts": TEST, **RL}
    common["grading"] = {"workers": 0}
    table = {check: 0.0, short: 1.0}
    with pytest.raises(RuntimeError, match="2 of 2 scores of held-out problems are broken"):
        posttrain.rl(reward=table, folder=tmp_path / "a", **common)
    run = posttrain.rl(reward=table, folder=tmp_path / "b", max_invalid=1.0, **common)
    assert run.summary["invalid_after"] == 1.0
    assert [sample["right_after"] for sample in run.folder.samples] == [None, None]


def test_a_run_whose_graders_work_says_nothing_of_it(tmp_path: Path) -> None:
    run, shown = small_run(recipe(tmp_path / "r"))
    assert (run.summary["invalid_before"], run.summary["invalid_after"]) == (0.0, 0.0)
    assert "invalid_reason" not in run.summary
    assert "broken held-out scores" not in shown


def test_without_rl_there_is_no_limit_and_the_share_is_shown(tmp_path: Path) -> None:
    def nothing(completion: str) -> None:
        return None

    given = recipe(tmp_path / "r", rl=None, rewards=None, eval={"max_new_tokens": 4})
    run, shown = small_run(given, supplied=Supplied(rewards=RewardScorer({nothing: 1.0})))
    assert run.summary["invalid_after"] == 1.0
    assert "broken held-out scores  100% (first: reward 'nothing' returned None" in shown


def test_an_evaluation_alone_has_a_result_and_the_first_reason() -> None:
    """Sampled answers count as well; no limit ends it."""
    options: dict[str, Any] = {"grading": {"workers": 0}, "samples": 2, "max_new_tokens": 2}
    found = posttrain.evaluate("tiny", prompts=TEST, reward=breaks_from(4), **options)
    assert found.invalid == 3 / 6
    assert found.reason == found.rollouts[3].score.reason
    assert "raised KeyError" in found.reason
    assert posttrain.evaluate("tiny", prompts=TEST, reward=breaks_from(99), **options).reason == ""


def test_what_is_printed_for_copying_is_quoted(tmp_path: Path) -> None:
    """A folder, a recipe and a question that a shell would tear apart."""
    question = """it's "$(2)" ;"""
    rows = {"train.jsonl": "1+1=", "test.jsonl": question}
    for name, text in rows.items():
        (tmp_path / name).write_text(json.dumps({"prompt": text, "answer": "2"}))
    given = recipe(tmp_path / "a run", sft=None)
    given["task"] = {"name": "jsonl", "path": str(tmp_path / "train.jsonl")}
    given["task"] |= {"test_path": str(tmp_path / "test.jsonl")}
    path = tmp_path / "a recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    console = Console(file=io.StringIO(), width=400)
    done = run(read_recipe(path), console=console)
    shown = [line.strip() for line in console.file.getvalue().splitlines()]
    commands = [shlex.split(line) for line in shown if line.startswith("posttrain ")]
    assert ["posttrain", "generate", str(done.folder.path), question] in commands
    assert ["posttrain", "run", str(path)] in [command[:3] for command in commands]


def test_an_evaluation_beside_a_run_says_that_it_uses_no_cluster(tmp_path: Path) -> None:
    """So does an answer: a cluster that is not there is not asked for."""
    changes = {"cluster": {"address": "127.0.0.1:9", "engines": 1}, "rl": {"max_new_tokens": 2}}
    given = recipe(tmp_path / "run", sft=None, eval={"problems": 2}, **changes)
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe_from_dict(given)))
    with pytest.warns(UserWarning, match="samples in its own process"):
        evaluate_recipe(read_recipe(str(file)))
    with pytest.warns(UserWarning, match="samples in its own process"):
        posttrain.generate(str(file), "1+1=", max_new_tokens=2)
