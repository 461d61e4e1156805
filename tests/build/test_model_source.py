"""A run or a recipe in place of a model: evaluated as it says, and never on training rows."""

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, command_in
from rich.console import Console
from small_runs import RECIPE, RL, TINY, recipe

import posttrain
from posttrain.config import recipe_from_dict, to_toml
from posttrain.runs import read_rollouts
from posttrain.stages.results import Run
from posttrain.stages.run import run
from posttrain.tasks import PromptTask
from posttrain.types import Prompt

SUMS = [{"prompt": f"{a}+{b}=\n", "answer": str(a + b)} for a in range(6) for b in range(6)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def go(values: dict[str, Any], *, width: int = 200) -> tuple[Run, str]:
    console = Console(file=io.StringIO(), width=width)
    return run(recipe_from_dict(values), console=console), console.file.getvalue()


def problems(done: Run) -> dict[str, dict[str, Any]]:
    """The evaluation at the end of a run, by problem."""
    text = (done.folder.path / "eval" / "problems.jsonl").read_text()
    return {row["id"]: row for row in map(json.loads, text.splitlines())}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run on a file named by a relative path, and what it printed at 40 columns."""
    folder = tmp_path_factory.mktemp("project")
    write_rows(folder / "sums.jsonl", SUMS)
    values = recipe(
        folder / "runs" / "one",
        task={},
        model={"chat": False},
        sft={"wrong_share": 0.0},
        eval={"problems": 5, "samples": 2, "temperature": 0.7},
    )
    values["task"] = {"name": "jsonl", "path": "sums.jsonl", "test_share": 0.3}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return go(values, width=40)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    return command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)


def test_a_run_is_evaluated_as_it_evaluated_itself(finished: tuple[Run, str]) -> None:
    """From any folder: the same problems, answers, samples and estimates, by the same rewards."""
    done, _ = finished
    after = done.folder.stage_record("eval")["after"]
    link = done.folder.path.parent / "best"
    link.symlink_to(done.model)
    for given in (done.folder.path, str(done.model), link):
        found = posttrain.evaluate(given)
        assert {r.prompt.id: r.text for r in found.greedy} == {
            name: row["completion"] for name, row in problems(done).items()
        }
        values = {name: estimate.value for name, estimate in found.estimates.items()}
        assert values == {name: row["value"] for name, row in after["estimates"].items()}
        assert dict(found.parts) == after["parts"]
        assert max(len(r.tokens) for r in found.rollouts) <= 4  # that of [rl]


def test_what_is_given_wins(finished: tuple[Run, str], command: Command) -> None:
    done, _ = finished
    found = posttrain.evaluate(done.folder.path, problems=2, samples=1, max_new_tokens=1)
    assert len(found.rollouts) == 2 * 2
    assert all(len(r.tokens) == 1 for r in found.rollouts)
    shown = command("eval", done.folder.path, "--eval.problems", 3)
    assert shown.code == 0, shown.err
    assert "jsonl, 3 problems" in shown.out
    assert f"{done.model}, with the settings of {done.folder.path}" in shown.out
    other = command("eval", done.model, "--task", "sort", "--task.num_test", 4, "--out", "o.jsonl")
    assert "sort, 4 problems" in other.out, other.err
    rows = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert not {"numeric", "length"} & set(rows[0]["parts"])  # sort has rewards of its own
    idle = command("eval", done.folder.path, "--rl.steps", 3)
    assert (idle.code, "--rl.steps: has no effect" in idle.err) == (2, True)


def test_training_rows_are_refused(
    finished: tuple[Run, str], command: Command, tmp_path: Path
) -> None:
    """By the prompts themselves: another share, another file, other white space, a chat."""
    done, _ = finished
    file = done.folder.path.parents[1] / "sums.jsonl"
    said = command("eval", done.folder.path, "--task.test_share", 0.6)
    assert said.code == 2
    assert "were in the training data of" in said.err
    assert f"posttrain eval {done.folder.path}" in said.err
    fresh = ("--task", "jsonl", "--task.path", file, "--task.test_share", 0.6)
    assert "were in the training data of" in command("eval", done.model, *fresh).err
    others = write_rows(tmp_path / "others.jsonl", [{"prompt": "9 + 9 =", "answer": "18"}])
    spaced = [{"prompt": f" {row['prompt'].strip()}", "answer": row["answer"]} for row in SUMS]
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in SUMS
    ]
    for rows in (spaced, chats):
        test = write_rows(tmp_path / "test.jsonl", rows)
        given = ("--task", "jsonl", "--task.path", others, "--task.test_path", test)
        assert "were in the training data of" in command("eval", done.model, *given).err
    held_out = [
        row for row in SUMS if row["prompt"] in {p["prompt"] for p in problems(done).values()}
    ]
    test = write_rows(tmp_path / "test.jsonl", held_out)
    given = ("--task", "jsonl", "--task.path", others, "--task.test_path", test)
    assert f"jsonl, {len(held_out)} problems" in command("eval", done.model, *given).out


def test_what_has_changed_since_the_run_is_said(
    finished: tuple[Run, str], command: Command, tmp_path: Path
) -> None:
    """A longer file is another one; and rows that it has lost were still trained on."""
    done, _ = finished
    copy = Path(shutil.copytree(done.folder.path, tmp_path / "copy"))
    rows = write_rows(tmp_path / "sums.jsonl", [*SUMS, {"prompt": "7+7=\n", "answer": "14"}])
    places = json.loads((copy / "places.json").read_text())
    (copy / "places.json").write_text(json.dumps({**places, "folder": str(tmp_path)}))
    assert f"task.path: has changed since {copy} used it" in command("eval", copy).out
    with pytest.warns(UserWarning, match=r"task\.path: has changed since"):
        posttrain.evaluate(copy)
    seen = read_rollouts(done.folder.stage("rl").rollouts, limit=1)[0]["prompt"]
    write_rows(rows, [row for row in SUMS if row["prompt"] != seen])
    test = write_rows(tmp_path / "test.jsonl", [row for row in SUMS if row["prompt"] == seen])
    fresh = ("--task", "jsonl", "--task.path", rows, "--task.test_path", test)
    said = command("eval", copy, *fresh)
    assert f"1 of 1 test problems were in the training data of {copy}" in said.err
    before = test.read_text()
    assert "is the file that is read" in command("eval", copy, *fresh, "--out", test).err
    assert test.read_text() == before


def test_rows_of_the_run_before_are_refused(finished: tuple[Run, str], tmp_path: Path) -> None:
    """Of the model that a run began from, and of its demonstrations; what it held out is not."""
    done, _ = finished
    trained = [row for row in SUMS if row["prompt"] not in held_out(done)]
    demonstrations = [{"prompt": "x=\n", "completion": "7"}, {"prompt": "y=\n", "completion": "8"}]
    values = recipe(
        tmp_path / "two",
        model={"name": str(done.model), "options": {}},
        sft={"data": str(write_rows(tmp_path / "d.jsonl", demonstrations)), "wrong_share": 0.0},
        rl=None,
        eval=None,
    )
    second, _ = go(values)
    for row in (trained[0], {"prompt": "y=\n", "answer": "8"}):
        task = object_task([row])
        with pytest.raises(ValueError, match="1 of 1 test problems were in the training data"):
            posttrain.evaluate(second.folder.path, task=task, reward="exact")
    found = posttrain.evaluate(second.model, task=object_task(SUMS_NOT_TRAINED), reward="exact")
    assert len(found.greedy) == 1


def test_demonstrations_of_the_held_out_problems_are_refused(
    finished: tuple[Run, str], tmp_path: Path
) -> None:
    """A run that would be measured by them does not begin; one that was not, is not evaluated."""
    done, _ = finished
    task = {"name": "jsonl", "path": str(write_rows(tmp_path / "s.jsonl", SUMS)), "test_share": 0.3}
    held = sorted(held_out(done))
    rows = [{"prompt": f" {text}", "completion": "1"} for text in held]
    data = str(write_rows(tmp_path / "d.jsonl", rows))
    values = recipe(tmp_path / "leak", task={}, sft={"data": data, "wrong_share": 0.0}, rl=None)
    values["task"], values["eval"]["max_new_tokens"] = task, 4
    told = rf"{len(held)} of {len(held)} held-out problems are in sft\.data"
    with pytest.raises(ValueError, match=told):
        go(values)
    assert not (tmp_path / "leak" / "sft" / "model").exists()
    del values["eval"]
    second, _ = go(values)
    for given in (second.folder.path, second.model):
        with pytest.raises(ValueError, match="test problems were in the training data"):
            posttrain.evaluate(given)


def test_a_recipe_whose_run_is_finished_says_so(command: Command, tmp_path: Path) -> None:
    """What is evaluated is the model of the recipe: it has learned nothing."""
    values = recipe(
        tmp_path / "runs" / "mine", sft={"epochs": 1}, rl=None, eval={"max_new_tokens": 4}
    )
    values["run"]["folder"] = "runs/mine"
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(recipe_from_dict(values)))
    told = "runs/mine holds a finished run of this recipe: posttrain eval runs/mine evaluates its"
    assert told not in command("eval", path).out
    go(values)
    shown = command("eval", path)
    assert (shown.code, told in shown.out) == (0, True), shown
    assert told not in command("eval", "runs/mine").out


SUMS_NOT_TRAINED = [{"prompt": "8+8=\n", "answer": "16"}]


def object_task(rows: list[dict[str, Any]]) -> PromptTask:
    """A task whose test split is these rows."""
    test = tuple(
        Prompt(id=f"test-{n}", text=row["prompt"], columns={"answer": row["answer"]})
        for n, row in enumerate(rows)
    )
    return PromptTask(name="own", rewards={}, train=(), test=test, solve=lambda prompt: "")


def held_out(done: Run) -> set[str]:
    from posttrain.tasks import make_task

    config = done.folder.config["task"]
    path = done.folder.path.parents[1] / config["path"]
    return {prompt.text for prompt in make_task({**config, "path": str(path)}).prompts("test")}


def test_a_run_of_python_objects_says_what_it_needs(tmp_path: Path, command: Command) -> None:
    """Its prompts and function are not in the folder; what it was trained on is, in rollouts."""

    def short(num_tokens: int) -> float:
        return -float(num_tokens)

    options = {**RL, "steps": 1}
    done = posttrain.rl(prompts=["1+1=", "2+2="], reward=short, folder=tmp_path / "own", **options)
    with pytest.raises(ValueError, match=r"\(task, rewards\) that no .*, prompts=…, reward=…\)"):
        posttrain.evaluate(done.folder.path)
    said = command("eval", done.folder.path, "--task", "sort")
    assert "(rewards) that no folder holds" in said.err
    with pytest.raises(ValueError, match=r"\(task\) that no folder holds; .*', prompts=…\), or by"):
        posttrain.evaluate(done.folder.path, reward="numeric")
    found = posttrain.evaluate(done.folder.path, prompts=["5+5="], reward=short)
    assert len(found.greedy[0].tokens) <= 4
    seen = object_task([{"prompt": "2+2=", "answer": "4"}])
    with pytest.raises(ValueError, match="1 of 1 test problems were in the training data"):
        posttrain.evaluate(done.folder.path, task=seen, reward=short)
    shown = command("eval", done.folder.path, "--task", "arithmetic", "--rewards.numeric", 1)
    assert "arithmetic, 200 problems" in shown.out, shown.err


def test_a_recipe_is_enough(finished: tuple[Run, str], command: Command, tmp_path: Path) -> None:
    """``eval`` and ``generate`` take the model, template and limits of a recipe; options win."""
    done, _ = finished
    file = tmp_path / "small.toml"
    file.write_text(to_toml(recipe_from_dict(RECIPE)))
    shown = command("eval", file)
    assert "arithmetic, 10 problems" in shown.out, shown.err
    assert f"tiny, with the settings of {file}" in shown.out
    shown = command("eval", file, "--model.name", done.model)
    assert f"{done.model}, with the settings of {file}" in shown.out, shown.err
    said = command("generate", file, "1+1=\n", "--model.name", done.model)
    assert said.out == command("generate", done.folder.path, "1+1=\n").out
    untrained = posttrain.generate(file, "1+1=\n")[0]
    assert len(untrained.tokens) <= RECIPE["rl"]["max_new_tokens"]
    assert untrained.text != said.out.rstrip("\n")
    assert not Path("runs").exists()


def test_generate_speaks_as_the_run_did(tmp_path: Path) -> None:
    """With its chat template and system message, unless told otherwise."""
    from posttrain.models.load import load_policy
    from posttrain.models.save import save_policy

    policy = load_policy("tiny", options=TINY)
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save_policy(policy, tmp_path / "chat")
    file = tmp_path / "chat.toml"
    model = f'name = "{tmp_path / "chat"}"\nsystem = "A"'
    file.write_text(f'[model]\n{model}\n[task]\nname = "sort"\n[eval]\nmax_new_tokens = 3\n')
    with pytest.warns(UserWarning, match="writes the system's messages like the user's"):
        spoken = posttrain.generate(file, "BC", temperature=1.0, num_samples=4)
    plain = posttrain.generate(tmp_path / "chat", "ABC", chat=False, temperature=1.0, num_samples=4)
    by_eye = [answer.tokens[:3] for answer in plain]
    assert [answer.tokens for answer in spoken] == by_eye
    without = posttrain.generate(file, "ABC", chat=False, temperature=1.0, num_samples=4)
    assert [answer.tokens for answer in without] == by_eye


def test_the_suggested_command_answers_as_the_run_did(
    finished: tuple[Run, str], command: Command
) -> None:
    """Copied from a screen of 40 columns into a shell, newline in the prompt and all."""
    done, printed = finished
    assert "…" not in printed.partition("What to try next")[2]
    line = next(line for line in printed.splitlines() if line.startswith("  posttrain generate"))
    parsed = subprocess.run(
        ["bash", "-c", line.replace("posttrain", "printf '%s\\0'", 1)],
        capture_output=True,
        check=True,
    )
    arguments = parsed.stdout.decode().split("\0")[:-1]
    asked = {row["prompt"]: row["completion"] for row in problems(done).values()}
    assert arguments[-1] in asked
    assert arguments[-1].endswith("\n")
    said = command(*arguments)
    assert said.out == asked[arguments[-1]] + "\n", said.err


def test_an_empty_test_split_says_the_fix(command: Command, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "sums.jsonl", SUMS)
    said = command("eval", "tiny", "--task", "jsonl", "--task.path", file)
    assert said.code == 2
    assert "the test split is empty" in said.err
    assert "task.test_share = 0.2" in said.err
    assert "task.test_path" in said.err
    none = command("eval", "tiny", "--task", "sort", "--task.num_test", 0)
    assert "raise task.num_test" in none.err
    bare = command("eval", "tiny").err
    assert "eval: name the task; tiny has none" in bare
    assert "posttrain eval tiny --task QUESTIONS.jsonl" in bare
    missing = command("eval", "tiny", "--task", "sums.jsnl").err
    assert "sums.jsnl: there is no such file" in missing


def test_a_file_of_questions_is_a_task_for_a_model(command: Command, tmp_path: Path) -> None:
    """All of its rows are asked; its columns are chosen as in a recipe."""
    shown = [{"prompt": row["prompt"], "completion": row["answer"]} for row in SUMS]
    for rows, more in ((SUMS, ()), (shown, ("--task.columns", '{ answer = "completion" }'))):
        file = write_rows(tmp_path / "sums.jsonl", rows)
        done = command("eval", "tiny", "--task", file, "--eval.max_new_tokens", 2, *more)
        assert f"file, {len(SUMS)} problems, greedy answers" in done.out, done.err


def test_a_run_without_a_policy_says_so(finished: tuple[Run, str], tmp_path: Path) -> None:
    """A stage that was cut short has left no model."""
    values = recipe(tmp_path / "cut", sft=None)
    values["rl"]["max_invalid"] = 0.0
    values["rewards"] = {"no_such_module_of_mine:f": 1.0}
    with pytest.raises(ValueError, match="cannot import"):
        go(values)
    from posttrain.runs import RunFolder

    RunFolder.create(tmp_path / "cut", config={})
    with pytest.raises(ValueError, match="no stage of this run has finished a policy"):
        posttrain.evaluate(tmp_path / "cut")


def test_a_finished_run_without_a_policy_is_not_to_be_resumed(tmp_path: Path) -> None:
    """A run of an evaluation alone has nothing to go on with."""
    values = recipe(
        tmp_path / "measured",
        sft=None,
        rl=None,
        eval={"problems": 2, "samples": 1, "max_new_tokens": 4},
    )
    done, _ = go(values)
    assert done.folder.stages == ["eval"]
    with pytest.raises(ValueError, match="its stages are eval; name another run"):
        posttrain.evaluate(done.folder.path)


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_picture_that_fails_costs_the_picture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise error("no [font] of that name")

    monkeypatch.setattr("posttrain.stages.results.plot_curves", broken)
    done, told = go(recipe(tmp_path / "plain"))
    assert f"could not be drawn: {error.__name__}('no [font] of that name')" in told
    assert done.folder.finished
    assert done.summary["stages"] == ["sft", "rl", "eval"]
