"""Accuracy that cannot flatter: what decides it is named, and is a check of the answer or nothing.

The recipes are those of a user whose data has answers and whose rewards are functions of his own.
"""

import io
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from small_runs import TINY, recipe, small_run

import posttrain
from posttrain.build.answer_check import with_check
from posttrain.build.setup import Supplied
from posttrain.config import read_recipe, recipe_from_dict
from posttrain.rewards import declare, numeric_answer
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.stages.diagnosis import _watched
from posttrain.stages.results import Run
from posttrain.stages.run import run
from posttrain.tasks import make_task
from posttrain.types.marks import Marks
from posttrain.viewer.page_answers import ANSWERS
from posttrain.viewer.shelf import Shelf

ROOT = Path(__file__).parents[2]
REWARDS = '''
def ok(completion, answer):
    return float(completion.strip() == answer)


def digits(completion):
    """Hackable: any digits will do."""
    return float(completion.strip().isdigit())


def ten(completion, want):
    """Ten points for the right answer, two for trying."""
    return 10.0 if completion.strip() == want else 2.0
'''
RECIPE = """
[model]
name = "tiny"
options = {{ hidden_size = 32, num_layers = 2, max_positions = 64 }}

[task]
name = "jsonl"
path = "{data}"
test_share = 0.4

[rewards]
{rewards}

[rl]
steps = 2
prompts_per_step = 4
group_size = 4
max_new_tokens = 8
check = "off"

[eval]
problems = 20
"""
HACK, TRUTH = '"flattering:digits" = 1.0', '"flattering:ok" = 0.0'


class Turning(ScriptedEngine):
    """Says one thing when it is first asked, and another ever after: a policy that has learned."""

    def __init__(self, first: str, later: str) -> None:
        super().__init__(lambda prompt, sample: self.says, encode=lambda text: [11] * len(text))
        self.says, self._later = first, later
        self.decode = lambda tokens: self._said  # type: ignore[method-assign]

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self._said = self.says
        found = super().generate(*arguments, **options)
        self.says = self._later
        return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sums with their answers, the same twice: under the usual name and under another."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flattering.py").write_text(REWARDS)
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "want": str(a + b)}
        for a, b in itertools.product(range(1, 6), repeat=2)
    ]
    bare = [{"prompt": row["prompt"], "want": row["want"]} for row in rows]
    for name, given in (("sums.jsonl", rows), ("bare.jsonl", bare)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in given))
    return tmp_path


def run_toml(
    folder: Path, rewards: str, *, data: str = "sums.jsonl", says: tuple[str, str] = ("", "")
) -> tuple[Run, str]:
    """Run a recipe file in a folder of its own, and what it printed."""
    number = len(list(folder.glob("*.toml")))
    path = folder / f"r{number}.toml"
    path.write_text(RECIPE.format(data=folder / data, rewards=rewards))
    console = Console(file=io.StringIO(), width=200)
    place = ["--run.folder", str(folder / f"run{number}"), "--grading.workers", "0"]
    supplied = Supplied(engine=Turning(*says)) if says[0] else None
    done = run(read_recipe(path, place), supplied, console=console)
    return done, console.file.getvalue()


def rows(text: str) -> list[str]:
    """What was printed, each table row with bars between its cells."""
    return [re.sub(r"\s{2,}", " | ", line.strip()) for line in text.splitlines() if line.strip()]


def page(done: Run) -> str:
    """What the page of the run is told."""
    shelf = Shelf([done.folder.path])
    (run,) = shelf.look()
    answers = [ANSWERS[name](shelf, {"run": run.name}) for name in ("runs", "charts", "compare")]
    return json.dumps(answers, ensure_ascii=False)


def test_a_reward_out_of_ten_does_not_make_an_untrained_model_right(folder: Path) -> None:
    """It was 100 % with ✓ beside wrong answers: any score of 1 and more counted as right."""
    done, text = run_toml(folder, '"flattering:ten" = 1.0')
    summary = done.summary
    assert "100.0%" not in text
    assert (summary["accuracy_by"], summary["accuracy_before"]) == ("numeric", 0.0)
    assert summary["accuracy_after"] == 0.0
    assert summary["rewards"]["flattering:ten"] == {"weight": 1.0, "before": 2.0, "after": 2.0}
    assert summary["rewards"]["numeric"] == {"weight": 0.0, "before": 0.0, "after": 0.0}
    assert "held-out flattering:ten | 2.000 | 2.000 | +0.000" in rows(text)
    assert "held-out numeric (monitored) | 0.000 | 0.000 | +0.000" in rows(text)
    assert "held-out accuracy (numeric)" in page(done)
    assert "held-out accuracy (numeric)" in text
    assert "→ 100.0%" not in text
    assert "✓" not in text
    assert "✗" in text
    assert '"correct": true' not in page(done)
    assert '"correct": false' in page(done)


def test_without_answers_such_a_reward_has_no_share_until_it_declares_its_maximum(
    folder: Path,
) -> None:
    done, text = run_toml(folder, '"flattering:ten" = 1.0', data="bare.jsonl")
    assert done.summary["accuracy_by"] == ""
    assert done.summary["above_one"] == {"flattering:ten": 2.0}
    assert not {"accuracy_before", "accuracy_after", "full_marks"} & set(done.summary)
    unknown = "— (no maximum declared; largest seen 2)"
    assert f"full marks of flattering:ten | {unknown}" in rows(text)
    assert '"flattering:ten" = { weight = …, maximum = … } in [rewards]' in text
    for shown in (text, page(done)):
        assert unknown in shown
        assert "no accuracy: nothing here checks answers" in shown
        assert "accuracy (" not in shown
        assert not set("✓✗") & set(shown)
    assert "[2.000]" in text  # the reward, in place of a mark
    assert '"reward": 2.0, "correct": null' in page(done)
    declared = '"flattering:ten" = { weight = 1.0, maximum = 10 }'
    done, text = run_toml(folder, declared, data="bare.jsonl")
    assert done.summary["full_marks"] == {"flattering:ten": {"before": 0.0, "after": 0.0}}
    assert any(row.startswith("full marks of flattering:ten | 0.0% (0.0–") for row in rows(text))


def test_nor_is_it_a_check_of_answers_until_then(folder: Path) -> None:
    """`task.accuracy` may name it; without its maximum there is neither a share nor a mark."""
    rewards = '"flattering:ten" = 1.0\n[task.accuracy]\nname = "flattering:ten"'
    done, text = run_toml(folder, rewards)
    assert done.summary["accuracy_by"] == "flattering:ten"
    assert "accuracy_after" not in done.summary
    unknown = "— (no maximum declared; largest seen 2)"
    assert f"held-out accuracy (flattering:ten) | {unknown}" in rows(text)
    assert not set("✓✗") & set(text)
    assert '"correct": null' in page(done)
    assert '"correct": true' not in page(done)


def test_a_score_above_the_declared_maximum_is_broken_not_right(folder: Path) -> None:
    declared = '"flattering:ten" = { weight = 1.0, maximum = 1 }'
    message = r"returned 2, above its maximum of 1; fix the reward, or declare the most"
    with pytest.raises(RuntimeError, match=message):
        run_toml(folder, declared)


@pytest.mark.parametrize("order", [(HACK, TRUTH), (TRUTH, HACK)], ids=["hack first", "hack last"])
def test_a_hacked_reward_is_no_accuracy_wherever_it_stands(
    folder: Path, order: tuple[str, str]
) -> None:
    """It was 0 → 100 % with the hackable one first, and the truth with the lines swapped."""
    done, text = run_toml(folder, "\n".join(order), says=("zz", "3333"))
    summary = done.summary
    assert summary["accuracy_by"] == "numeric"
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.0, 0.0)
    assert "full_marks" not in summary
    truth = {"weight": 0.0, "before": 0.0, "after": 0.0}
    assert summary["rewards"] == {
        "flattering:digits": {"weight": 1.0, "before": 0.0, "after": 1.0},
        "flattering:ok": truth,
        "numeric": truth,
    }
    shown = set(rows(text))
    assert {
        "held-out flattering:digits | 0.000 | 1.000 | +1.000",
        "held-out flattering:ok (monitored) | 0.000 | 0.000 | +0.000",
    } <= shown
    assert "training reward, first and last step | 1.000 | 1.000 | +0.000" in shown
    assert '"correct": true' not in page(done)
    for told in (text, page(done)):
        assert "✓" not in told
        assert "→ 100.0%" not in told
        assert "held-out accuracy (numeric)" in told
        assert "flattering:ok (monitored)" in told


def test_the_order_of_the_table_changes_no_number(folder: Path) -> None:
    """Two runs, all that they derive: the summary, the metrics, the rows but for their order."""
    lines = [HACK, TRUTH, "format = 0.5"]
    first, text = run_toml(folder, "\n".join(lines), says=("zz", "3333"))
    other, other_text = run_toml(folder, "\n".join(reversed(lines)), says=("zz", "3333"))

    def timeless(summary: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in summary.items() if k not in ("seconds", "model")}

    assert timeless(first.summary) == timeless(other.summary)
    held_out = [sorted(row for row in rows(t) if "held-out" in row) for t in (text, other_text)]
    assert held_out[0] == held_out[1]
    assert first.folder.stage("rl").accuracy_by == other.folder.stage("rl").accuracy_by == "numeric"


def test_a_format_reward_beside_the_answer_check_of_the_data(folder: Path) -> None:
    """`3 + 5 = 8` was ✗ beside the expected 8: the format decided. Now numeric does, monitored."""
    numeric = 'numeric = { weight = 0.0, extract = "last_number" }'
    done, text = run_toml(folder, f"format = 1.0\n{numeric}", says=("so 8", "maybe 6"))
    problems = (done.folder.stage("eval").path / "problems.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in problems]
    right = sum(problem["answer"] == "6" for problem in answers)
    assert 0 < right < len(answers)
    assert done.summary["accuracy_by"] == "numeric"
    assert done.summary["accuracy_after"] == right / len(answers)
    assert [p["correct"] for p in answers] == [p["answer"] == "6" for p in answers]
    share = right / len(answers)
    assert any(
        row.startswith("held-out numeric (monitored) | ") and f" | {share:.3f} | " in row
        for row in rows(text)
    )
    assert "held-out format | 0.000 | 0.000 | +0.000" in rows(text)
    assert "held-out accuracy (numeric)" in page(done)


def checked_by(
    table: dict[Any, Any], task: str | dict[str, Any] | None = "arithmetic", accuracy: Any = None
) -> str:
    """What decides, under a table of rewards and a task."""
    made = None if task is None else make_task(task)
    return with_check(RewardScorer(table), made, accuracy=accuracy)[1].check


def shortness(completion: str) -> float:
    return 1 - len(completion) / 10


@declare(checks_answer=True)
def my_check(completion: str, answer: str) -> float:
    return float(completion == answer)


def numeric(completion: str) -> float:
    """Called like one of the library's, and no check at all."""
    return 1.0


@pytest.mark.parametrize(
    ("table", "task", "accuracy", "check"),
    [
        ({"format": 1, "numeric": {"extract": "last_number"}}, "arithmetic", None, "numeric"),
        ({shortness: 1}, "arithmetic", None, "numeric"),  # the task's own, added
        ({shortness: 1, "exact": 0}, "arithmetic", None, "exact"),  # the user's way of answering
        ({"exact": 1, "math": 1}, "arithmetic", None, "numeric"),  # several: the task's own
        ({"exact": 1, "numeric": 1}, "arithmetic", None, "numeric"),
        ({my_check: 1, shortness: 1}, "arithmetic", None, "my_check"),
        ({numeric: 1}, "arithmetic", None, "task:numeric"),  # not who it is called like
        ({"sort": {"credit": "positions"}}, "sort", None, "sort"),
        ({"melody": 1}, "melody", None, ""),
        ({shortness: 1}, None, None, ""),
        ({my_check: 1, shortness: 1}, None, None, "my_check"),
        ({my_check: 1, "exact": 1}, None, None, ""),  # two, and nobody says which
        ({my_check: 1, "exact": 1}, None, "exact", "exact"),
        ({shortness: 1, "exact": 1}, "arithmetic", "shortness", "shortness"),
        ({shortness: 1}, "arithmetic", {"name": "exact", "extract": "tag"}, "exact"),
        ({"numeric": 1}, "arithmetic", "none", ""),
    ],
)
def test_what_decides_whatever_the_order(
    table: dict[Any, Any], task: Any, accuracy: Any, check: str
) -> None:
    for order in itertools.permutations(table.items()):
        assert checked_by(dict(order), task, accuracy) == check


def test_an_added_check_counts_for_nothing_and_reads_answers_where_the_task_says() -> None:
    task = make_task({"name": "arithmetic", "think": True, "num_train": 20, "num_test": 5})
    scorer, marks = with_check(RewardScorer({shortness: 1.0}), task, accuracy=None)
    prompt = task.prompts("test")[0]
    score = scorer.score_text(prompt, task.gold(prompt))
    assert score.parts["numeric"] == 1.0
    assert score.value == score.parts["shortness"]
    assert marks.weights == {"shortness": 1.0, "numeric": 0.0}
    options = {"name": "numeric", "extract": "tag"}
    with pytest.raises(ValueError, match=r"task\.accuracy: 'numeric' is a reward of this run"):
        checked_by({"numeric": 1.0}, "arithmetic", options)


def test_the_recipes_of_the_repository_decide_the_same_in_every_order(tmp_path: Path) -> None:
    """Reward models stand in their tables as scorers of whole batches, of any scale."""

    class Model:
        name = "model"

        def score(self, rollouts: Any) -> Any:
            raise AssertionError("only its name and weight are asked for")

    for split in ("train", "test"):
        problem = {"question": f"one {split} problem", "answer": "#### 1"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(problem))
    found = {}
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        given = read_recipe(path)
        if given.task is None:
            continue
        task = make_task(given.task | ({"path": str(tmp_path)} if "path" in given.task else {}))
        table = {
            Model() if name == "model" else name: spec["weight"] if name == "model" else spec
            for name, spec in (given.rewards or task.rewards).items()
        }
        marks = [
            with_check(RewardScorer(dict(order)), task, accuracy=None)[1]
            for order in itertools.permutations(table.items())
        ]
        assert (
            len({(m.check, m.counted_rewards, tuple(sorted(m.weights.items()))) for m in marks})
            == 1
        )
        found[path.stem] = (marks[0].check, marks[0].counted_rewards)
    assert found["demo"] == ("numeric", ("numeric",))
    assert found["gsm8k"] == ("numeric", ("numeric",))
    assert found["smollm2_arithmetic"] == ("numeric", ("numeric",))
    assert found["rlhf"] == ("", ())  # no answers, and a model that has no full marks


def test_task_accuracy_of_a_recipe_decides(tmp_path: Path) -> None:
    """By the name of a row of [rewards], or of another reward with options of its own."""
    task = {"accuracy": {"name": "exact", "extract": "tag"}}
    done, text = small_run(recipe(tmp_path / "a", sft=None, task=task))
    assert done.summary["accuracy_by"] == "exact"
    assert "held-out accuracy (exact)" in text
    assert "held-out exact (monitored)" in text
    assert "reward/part/exact" in done.folder.stage("rl").records()[0]
    done, text = small_run(recipe(tmp_path / "b", sft=None, task={"accuracy": "none"}))
    assert done.summary["accuracy_by"] == ""
    assert set(done.summary["full_marks"]) == {"length", "numeric"}


@pytest.mark.parametrize(
    ("accuracy", "message"),
    [
        ("numerci", r"task\.accuracy: unknown name 'numerci'; did you mean 'numeric'"),
        ("model", r"task\.accuracy: .* a reward model says nothing of right"),
        (3, r"task\.accuracy: .*; write a name, or a table with one"),
        ({"name": "numeric", "extract": "tag"}, r"options stand in \[rewards\] for 'numeric'"),
        ({"name": "exact", "extrct": "tag"}, r"task\.accuracy 'exact': unknown option 'extrct'"),
    ],
)
def test_a_wrong_task_accuracy_is_refused_at_once(
    tmp_path: Path, accuracy: Any, message: str
) -> None:
    given = recipe(tmp_path / "a", task={"accuracy": accuracy})
    with pytest.raises(ValueError, match=message):
        run(recipe_from_dict(given))
    assert not (tmp_path / "a").exists()


def test_held_out_answers_are_a_fair_sample_and_say_so(tmp_path: Path) -> None:
    """Those whose verdict changed came first: five of five right at 16 %."""
    shown = []
    for seed in range(2):
        given = recipe(tmp_path / f"{seed}", sft=None, run={"seed": seed})
        done, text = small_run(given)
        how = f"5 of 10 held-out problems, drawn at random (seed {seed})"
        assert f"Held-out answers: {how}" in text
        assert done.summary["answers_shown"] == how
        shown.append(tuple(sample["prompt"] for sample in done.folder.samples))
    assert len(set(shown)) > 1


def test_every_way_of_looking_shows_the_same_training_reward(tmp_path: Path) -> None:
    """Summary, page, overview and the end of the curve: one number under one name."""
    done, text = small_run(recipe(tmp_path / "a", rl={"steps": 20}, eval=None))
    rewards = [record["reward/mean"] for record in done.folder.stage("rl").records()]
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    summary = done.summary
    assert summary["reward_steps"] == 2
    assert (summary["reward_first"], summary["reward_last"]) == pytest.approx((first, last))
    assert f"training reward, first and last 2 steps | {first:.3f} | {last:.3f}" in "\n".join(
        rows(text)
    )
    said = json.loads(page(done))[0]["runs"][0]
    assert said["reward_steps"] == 2
    assert (said["reward_first"], said["reward_last"]) == pytest.approx((first, last))


def test_sft_alone_shows_its_losses(tmp_path: Path) -> None:
    done, text = small_run(recipe(tmp_path / "a", rl=None, eval=None, rewards=None))
    records = done.folder.stage("sft").records()
    losses = [record["loss/total"] for record in records if "loss/total" in record]
    assert f"sft loss, first and last step | {losses[0]:.3f} | {losses[-1]:.3f}" in "\n".join(
        rows(text)
    )
    assert losses[-1] < losses[0]


def test_an_evaluation_prints_in_a_few_words() -> None:
    """It was 50,000 characters of token ids."""
    found = posttrain.evaluate(
        "tiny",
        prompts=[{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(7)],
        reward={numeric_answer: 1.0, shortness: 0.0},
        model_options={"options": TINY},
        max_new_tokens=4,
    )
    assert len(repr(found)) < 300
    assert repr(found).startswith("Evaluation of 7 problems: accuracy (numeric) 0.0% [0.0%")
    assert f"mean reward 0.000, numeric 0.000, {__name__}:shortness (monitored) " in repr(found)


def test_checkpoints_are_kept_by_reward_where_there_is_no_accuracy(tmp_path: Path) -> None:
    """run.keep_best goes by the accuracy, else by the held-out reward."""
    for accuracy, name in (("numeric", "eval/accuracy"), ("none", "eval/reward")):
        given = recipe(
            tmp_path / accuracy,
            sft=None,
            task={"accuracy": accuracy},
            run={"keep_best": 1},
            rl={"evaluate_every": 1, "evaluate_problems": 4, "save_every": 1},
        )
        done, _ = small_run(given)
        stage = done.folder.stage("rl")
        points = {record["step"]: record for record in stage.records()}
        for path in stage.checkpoints.iterdir():
            state = json.loads((path / "state.json").read_text())
            assert state["accuracy"] == points[state["step"]][name]
        assert ("eval/accuracy" in points[1]) == (accuracy == "numeric")
        assert {"eval/part/numeric", "eval/part/length", "eval/reward"} <= set(points[1])
        full = sorted(key for key in points[1] if key.startswith("eval/full_marks/"))
        both = ["eval/full_marks/length", "eval/full_marks/numeric"]
        assert full == ([] if accuracy == "numeric" else both)


@pytest.mark.parametrize(("name", "watched"), [("format", False), ("numeric", True)])
def test_what_a_task_itself_only_shows_is_no_sign_of_hacking(name: str, watched: bool) -> None:
    """The form that gsm8k shows may fall while answers become right; its check may not."""
    task = SimpleNamespace(rewards={"numeric": 1.0, "format": {"weight": 0.0}})
    setup: Any = SimpleNamespace(
        task=task, recipe=SimpleNamespace(rewards={}), marks=Marks(check="numeric")
    )
    assert _watched(setup, name) == watched
    setup.recipe.rewards = {"format": {"weight": 0.0}}  # who names it wants to know
    assert _watched(setup, "format")
