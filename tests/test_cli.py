"""The command line: each command does its job, and a mistake gets a message, not a traceback."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, Result, command_in
from small_runs import RECIPE, TINY

from posttrain import __version__, evaluate, generate
from posttrain.config import recipe_from_dict, to_toml
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.rollout.engines.local import LocalEngine
from posttrain.runs import RunFolder
from posttrain.types import Sampling

TASK = ["--task.operators=+", "--task.digits=1", "--task.num_train=20", "--task.num_test=10"]
NO_CHECK = ["--task.accuracy", "none"]


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run a command as a terminal would, in an empty working directory."""
    return command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The small recipe as a file."""
    path = tmp_path / "small.toml"
    path.write_text(to_toml(recipe_from_dict(RECIPE)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_policy(load_policy("tiny", options=TINY), folder)
    return folder


def refused(result: Result, *words: str) -> None:
    """The user is told what is wrong, on stderr, with exit code 2 and without a traceback."""
    assert result.code == 2, result
    assert "Traceback" not in result.err + result.out
    assert all(word in result.err for word in words), result.err


def test_dry_run_prints_a_recipe_and_runs_nothing(
    posttrain: Command, recipe: Path, tmp_path: Path
) -> None:
    """What is printed is itself a recipe, resolved, with the override and the arithmetic."""
    result = posttrain("run", recipe, "--dry-run", "--rl.steps", "6", "--sft.epochs=2")
    assert result.code == 0
    shown = tomllib.loads(result.out)
    assert (shown["rl"]["steps"], shown["sft"]["epochs"]) == (6, 2)
    assert shown["rl"]["loss"]["name"] == "clipped"
    assert "4 prompts × 4" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def test_run_with_overrides_then_again(posttrain: Command, recipe: Path) -> None:
    """The folder says what was run; a second call does nothing; another setting is refused."""
    options = ["--rl.steps", "1", "--sft.epochs", "1", "--run.folder", "out"]
    result = posttrain("run", recipe, *options)
    assert result.code == 0, result.err
    assert "held-out accuracy" in result.out
    assert "What to try next" in result.out
    folder = RunFolder("out")
    assert folder.summary["stages"] == ["sft", "rl", "eval"]
    assert folder.config["rl"]["steps"] == 1
    assert folder.recipe == recipe.read_text()
    assert "already finished" in posttrain("run", recipe, *options).out
    again = posttrain("run", recipe, *options, "--rl.learning_rate", "0.5")
    refused(again, "out: holds the finished run of another recipe (rl.learning_rate")


def test_resume(posttrain: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder or with the recipe; another recipe is refused, unless that is allowed."""
    options = ["--rl.save_every", "1", "--run.folder", "out"]

    def dies(*given: object, **options: object) -> None:
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.stages.rl.learn", dies)
        refused(posttrain("run", recipe, *options), "the power is gone")
    changed = posttrain("run", recipe, *options, "--rl.steps", "2", "--resume")
    refused(changed, "rl.steps: 3 → 2")
    assert "to go on all the same, add --allow-changes rl.steps;" in changed.err.splitlines()[0]
    refused(posttrain("run", recipe, "--allow-changes", "rl"), "without --resume")
    refused(posttrain("resume", "nowhere"), "nowhere: no such folder")
    refused(posttrain("resume", "out/rl"), "is not a run folder", "out is one")
    refused(posttrain("resume", "out", "--rl.steps", "2"), "rl.steps: 3 → 2", "--allow-changes")
    refused(posttrain("resume", "out", "--run.folder", "there"), "the run stays in out; drop it")
    elsewhere = posttrain("resume", "out", "--cluster.address", "127.0.0.1:1")
    refused(elsewhere, "nothing answers at 127.0.0.1:1", "posttrain resume RUN --cluster.address")
    done = posttrain("resume", "out", "--run.trace", "true")
    assert done.code == 0, done.err
    assert (RunFolder("out").stage("rl").path / "trace.json").exists()
    assert "sft: already finished" in done.out
    assert "rl: starts over" in done.out
    assert "out/rl/model" in done.out
    assert str(Path.cwd()) not in done.out  # paths stay as they were typed
    assert "already finished; nothing to do" in posttrain("resume", "out").out


def test_one_stage_alone(posttrain: Command, recipe: Path) -> None:
    """``rl`` takes a recipe and leaves the other stages; ``sft`` does without a recipe."""
    assert posttrain("rl", recipe, "--rl.steps", "1", "--run.folder", "a").code == 0
    assert RunFolder("a").summary["stages"] == ["rl"]
    sizes = [f"--model.options.{name}={size}" for name, size in TINY.items()]
    numbers = ["--sft.batch_size", "10", "--run.folder", "b"]
    result = posttrain("sft", "--task.name", "arithmetic", *TASK, *sizes, *numbers)
    assert result.code == 0, result.err
    assert [record["step"] for record in RunFolder("b").stage("sft").records()] == [0, 1, 2]


def test_mistakes_in_a_recipe(posttrain: Command, recipe: Path) -> None:
    """Unknown keys, files and values, with what was probably meant."""
    refused(posttrain("run", recipe, "--rl.stepz", "6"), "rl.stepz", "steps")
    refused(posttrain("run", recipe, "--rl.steps", "many"), "rl.steps", "whole number")
    refused(posttrain("run", recipe, "--rl.group_size", "1"), "rl.group_size: 1")
    refused(posttrain("run", recipe, "--rl.algorithm", "grppo"), "grppo", "grpo")
    refused(posttrain("run", "smal.toml"), "smal.toml: no such recipe", "small.toml")
    refused(posttrain("run"), "name the recipe first")
    refused(posttrain("run", recipe, "--rl.steps"), "--rl.steps: needs a value")
    refused(posttrain("rum", recipe), "No such command")


def test_mistakes_outside_a_recipe(posttrain: Command, recipe: Path, tmp_path: Path) -> None:
    """Missing models and data, and a reward that breaks in the middle of a run."""
    refused(posttrain("generate", tmp_path / "nothing", "hi"), "there is no 'nothing'")
    refused(posttrain("eval", "tiny", "--task", "arithmetics"), "arithmetics", "arithmetic")
    missing = posttrain("eval", "tiny", "--task", "jsonl", "--task.path", "rows.jsonl")
    refused(missing, "rows.jsonl")
    (tmp_path / "broken_reward.py").write_text("def grade(completion):\n    return 1 / 0\n")
    text = recipe.read_text().partition("[rewards")[0].replace("[run]", "rewards={}\n[run]")
    recipe.write_text(text.replace("rewards={}", 'rewards={"broken_reward:grade"=1.0}'))
    small = ("--rl.max_new_tokens", "2", "--rl.prompts_per_step", "2")
    stopped = posttrain("rl", recipe, *small)
    refused(stopped, "rewards: broken scores: see ✗ above", "--check warn")
    assert "ZeroDivisionError" in stopped.out
    assert "ZeroDivisionError" not in stopped.err
    broken = posttrain("rl", recipe, *small, "--check", "warn")
    assert broken.code == 2
    for words in ("scores are broken", "ZeroDivisionError", "return 1 / 0", "completion: "):
        assert words in broken.err
    assert "/src/posttrain/" not in broken.err  # the traceback is the reward's, not ours


def test_eval_prints_and_writes(posttrain: Command, model: Path, tmp_path: Path) -> None:
    """A table of estimates, and one line for each problem."""
    options = ["--eval.samples", "2", "--eval.max_new_tokens", "3", "--out", "problems.jsonl"]
    result = posttrain("eval", model, "--task", "arithmetic", *TASK, *options)
    assert result.code == 0, result.err
    for name in ("arithmetic, 10 problems", "accuracy (numeric)", "mean@2", "pass@2", "0.0%"):
        assert name in result.out
    rows = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert {row["samples"] for row in rows} == {2}
    assert all(row["prompt"].endswith("=") and row["answer"].isdigit() for row in rows)


def test_eval_prints_every_reward_and_some_answers(
    posttrain: Command, model: Path, tmp_path: Path
) -> None:
    """Means of monitored rewards too; the answers are drawn, and say how."""
    options = ["--eval.max_new_tokens", "3", "--show", "3"]
    rewards = ["--rewards", '{numeric = { weight = 0.5, extract = "whole" }, format = 0.0}']
    result = posttrain("eval", model, "--task", "arithmetic", *TASK, *options, *rewards)
    assert result.code == 0, result.err
    told = ("mean reward, weighted sum", "mean of numeric", "mean of format (monitored)")
    assert all(words in result.out for words in told), result.out
    assert "3 of 10 answers, drawn at random (seed 0)" in result.out
    assert result.out.count("✗") == 3
    result = posttrain("eval", model, "--task", "arithmetic", *TASK, *options, *rewards, *NO_CHECK)
    assert "full marks of numeric" in result.out
    assert "accuracy (" not in result.out
    assert "no accuracy: nothing here checks answers" in result.out
    assert not set("✓✗") & set(result.out)


def test_eval_says_what_broke(posttrain: Command, model: Path, tmp_path: Path) -> None:
    """The share of broken scores, and the first reason as it is."""
    (tmp_path / "strict.py").write_text('def grade(completion):\n    return {}["[red]"]\n')
    options = ["--eval.max_new_tokens", "3", "--rewards", '{"strict:grade" = 1.0}']
    result = posttrain("eval", model, "--task", "arithmetic", *TASK, *options)
    assert result.code == 0, result.err
    assert "broken scores" in result.out
    assert "100.0%" in result.out
    assert "the first broken one: reward 'strict:grade' raised KeyError: '[red]'" in result.out


def test_generate(posttrain: Command, model: Path) -> None:
    """One greedy answer, or several that the seed decides."""
    greedy = posttrain("generate", model, "1+1=", "--max-new-tokens", "4")
    assert greedy.code == 0
    assert greedy.out == posttrain("generate", model, "1+1=", "--max-new-tokens", "4").out
    options = ["--max-new-tokens", "4", "--num-samples", "3", "--temperature", "1"]
    first = posttrain("generate", model, "1+1=", *options).out
    assert first == posttrain("generate", model, "1+1=", *options).out
    assert first != posttrain("generate", model, "1+1=", *options, "--seed", "1").out
    refused(posttrain("generate", model, "1+1=", "--temperature", "-1"), "--temperature")
    refused(posttrain("generate", model, "1+1=", "--top-p", "2"), "top_p")


def test_stop_strings_of_generate_and_eval(
    posttrain: Command, recipe: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model by --stop, for a recipe by its own key as well; and the same from Python."""
    asked: list[tuple[tuple[str, ...], int]] = []
    sample = LocalEngine.generate

    def listening(self: Any, prompts: Any, sampling: Sampling, **given: Any) -> Any:
        asked.append((sampling.stop, sampling.max_new_tokens))
        return sample(self, prompts, sampling, **given)

    monkeypatch.setattr(LocalEngine, "generate", listening)
    task = ("--task", "arithmetic", "--task.num_test", 2)
    stop = ("--stop", r"\n\nQ:", "--stop", '", "')
    for words in (("eval", model, *task), ("eval", model, *task, *stop)):
        assert posttrain(*words).code == 0
    assert [strings for strings, _ in asked] == [(), ("\n\nQ:", ", ")]
    assert asked[0][1] == asked[1][1]  # a stop string is no other limit
    asked.clear()
    assert posttrain("eval", recipe, "--rl.stop", "a, b", "--model.name", model).code == 0
    assert posttrain("generate", model, "1+1=", "--max-new-tokens", 2, *stop).code == 0
    generate(model, "1+1=", max_new_tokens=2, stop=["c"])
    evaluate(model, task="arithmetic", problems=1, stop=("c",))
    assert [strings for strings, _ in asked] == [("a, b",), ("\n\nQ:", ", "), ("c",), ("c",)]
    refused(posttrain("generate", model, "1+1=", "--stop", r"\text"), r"--stop: \text may mean")
    with pytest.raises(ValueError, match=r"rl\.stop: must be a list of texts"):
        generate(model, "1+1=", stop="ab")


def test_explain(posttrain: Command) -> None:
    """All, one, two; and a name that is not in the table."""
    listed = posttrain("explain").out
    assert all(name in listed for name in ("reinforce", "grpo", "dapo", "cispo"))
    assert "2402.03300" in posttrain("explain", "grpo").out
    assert "group_centred" in posttrain("explain", "grpo", "dr_grpo").out
    refused(posttrain("explain", "grpoo"), "grpoo", "grpo")
    refused(posttrain("explain", "a", "b", "c"), "two names to compare")


def test_model_import(posttrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file, or that of a package, becomes a folder that generates; others are refused."""
    pytest.importorskip("gguf")
    from models.test_gguf import build, write

    write(tmp_path / "small.gguf", build(tied=True))
    result = posttrain("model", "import", tmp_path / "small.gguf", tmp_path / "out")
    assert result.code == 0, result.err
    assert "out: written" in result.out
    answer = posttrain("generate", tmp_path / "out", "ab", "--max-new-tokens", "3", "--no-chat")
    assert answer.code == 0, answer.err
    kept = (tmp_path / "out" / "config.json").read_bytes()
    again = posttrain("model", "import", tmp_path / "small.gguf", tmp_path / "out")
    refused(again, "out: is there already; name another folder, or remove it")
    assert (tmp_path / "out" / "config.json").read_bytes() == kept
    (tmp_path / "empty").mkdir()
    assert posttrain("model", "import", tmp_path / "small.gguf", tmp_path / "empty").code == 0
    package = tmp_path / "weights_of_mine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: weights-of-mine\nVersion: 1\n")
    (package / "RECORD").write_text("small.gguf,,\nraises.py,,\n")
    (tmp_path / "raises.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    installed = posttrain("model", "import", "weights-of-mine", tmp_path / "installed")
    assert installed.code == 0, installed.err
    assert (tmp_path / "installed" / "model.safetensors").exists()
    refused(posttrain("model", "import", "pytest", tmp_path / "b"), "pytest holds 0 GGUF files")
    (tmp_path / "text.txt").write_text("hello")
    refused(posttrain("model", "import", tmp_path / "text.txt", tmp_path / "b"), "not a .gguf file")
    refused(posttrain("model", "import", tmp_path / "none.gguf", tmp_path / "c"), "none.gguf")


def test_version_and_help(posttrain: Command) -> None:
    """The two first things one types; ``-h`` is help everywhere."""
    assert posttrain("--version").out == f"posttrain {__version__}\n"
    whole = posttrain("--help")
    assert (whole.code, posttrain("-h").out) == (0, whole.out)
    assert "--version" in whole.out
    for words in (["eval"], ["model", "import"], ["run"]):
        assert posttrain(*words, "-h").out == posttrain(*words, "--help").out
        assert posttrain(*words, "-h").code == 0


def test_mistakes_in_generate(posttrain: Command, model: Path) -> None:
    """A prompt without quotes, and an option that is none."""
    refused(posttrain("generate", model, "what", "is"), "one prompt, in quotes", "'is'")
    refused(posttrain("generate", model, "1+1=", "--temprature", "1"), "did you mean --temperature")
    refused(posttrain("generate", model, "1+1=", "--model.nam", "x"), "model.nam", "name")
    refused(posttrain("generate", model, "1+1=", "--rl.steps", "6"), "--rl.steps has no effect")
    assert posttrain("generate", "--", model, "-1+1=").code == 0


def test_an_evaluation_that_cannot_be_is_told_before_anything_is_trained(
    posttrain: Command, recipe: Path
) -> None:
    """[eval] on a task without test problems, with what would give it some."""
    said = posttrain("run", recipe, "--task.num_test", "0", "--run.folder", "out")
    refused(said, "no test prompts", "raise task.num_test")
    assert not Path("out/sft").exists()


def test_a_folder_that_is_not_there_is_named_with_the_one_that_is(
    posttrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a folder on the way to it is mistyped, which looks like a name on the hub."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.setattr("posttrain.models.load.why_unreachable", lambda: "no connection")
    refused(
        posttrain("eval", "rusn/mine"),
        "rusn/mine: no such run folder, recipe or model folder here (did you mean runs/mine?)",
        "a hub id needs --task NAME",
    )
    missing = posttrain("eval", "nowhere/at-all")
    refused(missing, "nowhere/at-all: no such run folder, recipe or model folder here; a hub id")
    refused(posttrain("eval", "tiny"), "eval: name the task")
    refused(posttrain("generate", "rusn/mine", "1+1="), "did you mean 'runs/mine'?")
    gone = posttrain("resume", "runs/mien")
    refused(gone, "no such folder; did you mean", str(Path("runs", "mine")))
