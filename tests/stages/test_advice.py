"""What a run says at its end, and what stops one at its start."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, Result, command_in
from small_runs import TINY, recipe, small_run

from posttrain.check.signal import _learnable
from posttrain.config import Recipe, read_recipe, recipe_from_dict, resolve, to_dict, to_toml
from posttrain.config.read import parse_overrides
from posttrain.report import RunFacts
from posttrain.runs import RunFolder
from posttrain.stages.advice import next_steps as next_steps_of
from posttrain.types.marks import Marks

WARM_UP = {"wrong_share": 0.5, "epochs": 30, "learning_rate": 1e-2}


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    return command_in(tmp_path, columns=300, monkeypatch=monkeypatch, capsys=capsys)


def next_steps(run: RunFolder, recipe: Recipe, **given: Any) -> list[str]:
    """What is proposed where these facts of the run are other ones."""
    facts = RunFacts(run)
    vars(facts).update({"problems": []} | given)
    return next_steps_of(facts, recipe)


def commands(text: str) -> list[str]:
    """The commands that a run proposes."""
    lines = text.partition("What to try next")[2].splitlines()
    return [line.strip() for line in lines if line.strip().startswith("posttrain ")]


def test_a_short_run_without_signal_says_so_and_what_to_change(
    tmp_path: Path, command: Command
) -> None:
    """Three steps in which all is wrong; the command it proposes works, and keeps what was."""
    path = tmp_path / "my recipe.toml"
    never = {"numeric": {"weight": 1.0, "extract": "boxed"}}  # the model writes no box
    given = recipe(tmp_path / "run", sft=None, rewards=never, eval=None, rl={"group_size": 2})
    path.write_text(to_toml(recipe_from_dict(given)))
    done = command("run", path, "--rl.prompts_per_step", 2)
    assert done.code == 0, done
    found = RunFolder(tmp_path / "run").findings()
    assert [(row["finding"], row["step"]) for row in found] == [
        ("no_signal", 3),
        ("all_truncated", 3),
    ]
    assert "no_signal, step 3 to the end" in done.out
    assert "all wrong with random weights" in " ".join(done.out.split())
    (words,) = map(shlex.split, commands(done.out))
    assert words[:3] == ["posttrain", "run", str(path)]
    changed = parse_overrides(words[3:])
    assert changed[("rl", "max_new_tokens")] == 8
    assert changed[("rl", "prompts_per_step")] == 2
    shown = command(*words[1:], "--dry-run")
    assert shown.code == 0, shown
    assert "max_new_tokens = 8" in shown.out


def test_what_is_tried_next_follows_from_the_run(tmp_path: Path) -> None:
    """Each finding has its change; a good run goes on, longer or with another kind of problem."""
    given = recipe(tmp_path / "run", sft=WARM_UP, rl={"steps": 12})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    run, _ = small_run(given)
    written = resolve(read_recipe(path))

    def finding(name: str, change: str, until: int | None = None) -> dict[str, Any]:
        return {"finding": name, "change": change, "until": until, "stage": "rl"}

    def proposed(*findings: dict[str, Any], problems: list[dict[str, Any]] | None = None) -> Any:
        return next_steps(run.folder, written, findings=findings, problems=problems or [])

    slower = finding("kl_blow_up", "--rl.learning_rate 0.0003")
    both = proposed(slower, finding("clip_fraction_near_one", "--rl.learning_rate 0.0003"))
    assert both[0] == "# against kl_blow_up, clip_fraction_near_one"
    changed = parse_overrides(shlex.split(both[1])[3:])
    assert changed == {
        ("rl", "learning_rate"): 0.0003,
        ("run", "folder"): f"{tmp_path / 'run'}-learning_rate-0.0003",
    }
    over = proposed(finding("kl_blow_up", "--rl.learning_rate 0.0003", until=9))
    assert "learning_rate" not in " ".join(over)  # it is over: the run was well in the end
    assert proposed(finding("hacking", ""))[-1].startswith("posttrain view ")
    asked = [
        {"prompt": "1+1=", "correct": True},
        {"prompt": "a longer question, 3+3=", "correct": False},
        {"prompt": "it's 2+2=", "correct": False},
    ]
    question = proposed(problems=asked)[-1]
    assert shlex.split(question)[-1] == "it's 2+2="
    assert shlex.split(proposed(problems=asked[:1])[-1])[-1] == "1+1="
    told = [both, over, proposed(finding("hacking", "")), proposed(problems=asked)]
    assert len({tuple(lines) for lines in told}) == len(told)
    assert "…" not in "".join(line for lines in told for line in lines)


def test_of_an_environment_an_episode_is_shown_and_its_score_decides(
    tmp_path: Path, command: Command
) -> None:
    """The command that is proposed plays the very prompt; the task's answers are no judge."""
    env = {"name": "scripted", "replies": ["+1="], "score": 0.5}
    given = recipe(tmp_path / "run", sft=None, task={"env": env}, rl={"steps": 1})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    run, _ = small_run(given)
    written, facts = resolve(read_recipe(path)), RunFacts(run.folder)
    rows = [{**row, "reward": float(row["index"] != 2)} for row in facts.problems]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    told, proposed = next_steps(run.folder, written, findings=[], problems=rows)[-2:]
    assert told == "# the held-out episode with the lowest score (0)"
    words = shlex.split(proposed)
    assert words[1:] == shlex.split(
        f"play {run.folder.path} --split test --index 2 --temperature 0"
    )
    shown = command(*words[1:])
    assert shown.code == 0, shown
    assert rows[2]["prompt"] in shown.out
    right = {"accuracy": {"value": 1.0}}
    for score, said in [(0.5, "take more"), (0.97, "harder ones"), (9.0, "take more")]:
        after = {"parts": {"env": score}, "estimates": right}
        held_out = replace(facts.held_out, after=after)
        why, *_ = next_steps(run.folder, written, findings=[], held_out=held_out)
        assert said in why


def test_a_key_is_proposed_once_and_a_guess_only_alone(tmp_path: Path) -> None:
    """Demonstrations learned by heart are found three times over: one command is enough."""
    given = recipe(tmp_path / "run", sft=None, eval=None, rl={"steps": 1})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    run, _ = small_run(given)
    changes = {
        "sft_memorises": "--sft.epochs 38",
        "memorised": "--sft.epochs 90",
        "nothing_learned": "--rl.prompts_per_step 32",
    }
    found = [{"finding": n, "change": change, "until": None} for n, change in changes.items()]
    written = resolve(read_recipe(path))
    lines = next_steps(run.folder, written, findings=found)
    assert lines[0] == "# against sft_memorises"
    assert [line for line in lines if line.startswith("posttrain run ")] == lines[1:2]
    assert "--sft.epochs 38" in lines[1]
    alone = next_steps(run.folder, written, findings=found[2:])
    assert "--rl.prompts_per_step 32" in alone[1]


@pytest.mark.parametrize(
    ("means", "said", "key"),
    [
        ((0.1, 0.3, 0.5, 0.7, 0.9), "the reward was still rising: train longer", "steps"),
        ((0.1, 0.6, 0.9, 0.9, 0.9), "in the last 5 steps no longer beyond chance", "group_size"),
        (
            (0.5, 0.5, 0.5, 0.5, 0.5),
            "too few steps to tell whether the reward rises: train longer",
            "steps",
        ),
        (
            (0.5, 0.5, 0.5, 0.46, 0.52),
            "too few steps to tell whether the reward rises: train longer",
            "steps",
        ),
    ],
)
def test_what_the_reward_did_is_said_only_beyond_chance(
    tmp_path: Path, means: tuple[float, ...], said: str, key: str
) -> None:
    """Means of five steps each; a step is off by 0.1, so two of them by 0.06 at one deviation."""
    given = recipe(tmp_path / "run", sft=None, eval=None, rl={"steps": 1})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    run, _ = small_run(given)
    around = (0.1, -0.1, 0.0, 0.1, -0.1)
    rewards = [mean + off for mean in means for off in around]
    rows = [{"step": step, "reward/mean": value} for step, value in enumerate(rewards, start=1)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    run.folder.stage("rl").metrics.write_text(text)
    why, command, *_ = next_steps(run.folder, resolve(read_recipe(path)), findings=[])
    assert said in why
    assert f"--rl.{key} " in command


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("--rl.algorithm dapo", {("rl", "algorithm"): "dapo"}),
        (
            "--rl.algorithm dapo --rl.loss.clip_high 0.4 --rl.group_size 4",  # 4 is in the file
            {("rl", "algorithm"): "dapo", ("rl", "loss", "clip_high"): 0.4},
        ),
        ("--adapter.rank 2", {("adapter", "rank"): 2}),
        ("", {}),
    ],
)
def test_the_command_names_what_was_changed_and_not_what_follows(
    tmp_path: Path, overrides: str, named: dict[tuple[str, ...], Any]
) -> None:
    """Another algorithm brings defaults of its own: they come with its name again."""
    given = recipe(tmp_path / "run", sft=None, eval=None, rl={"steps": 1})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    run, _ = small_run(given)
    asked = resolve(read_recipe(path, overrides.split()))
    line = next_steps(run.folder, asked, findings=[])[1]
    words = shlex.split(line)
    changed = parse_overrides(words[3:])
    folder = ("run", "folder")
    assert changed == {**named, ("rl", "steps"): 5, folder: f"{tmp_path / 'run'}-steps-5"}
    again = to_dict(resolve(read_recipe(path, words[3:])))
    again["run"]["folder"], again["rl"]["steps"] = str(tmp_path / "run"), 1
    assert again == to_dict(asked)


def test_after_sft_alone_rl_is_next(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", eval=None, run={"stages": ["sft"]})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    run, _ = small_run(given)
    _, line = next_steps(run.folder, resolve(read_recipe(path)), findings=[])
    words = shlex.split(line)
    assert words[:3] == ["posttrain", "rl", str(path)]
    assert parse_overrides(words[3:])[("model", "name")] == str(run.model)


def test_a_recipe_that_is_broken_meanwhile_does_not_cost_the_summary(
    tmp_path: Path, command: Command
) -> None:
    """The next run is proposed with what was changed on the command line, by the copy kept."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "recipe.toml"
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(8)]
    (path.parent / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path.parent / "saboteur.py").write_text(
        f"import pathlib\n\ndef zero(completion):\n"
        f"    pathlib.Path({str(path)!r}).write_text('[rl\\nsteps = ')\n    return 0.0\n"
    )
    given = recipe(tmp_path / "run", sft=None, eval=None, rl={"group_size": 2})
    given |= {"task": {"name": "jsonl", "path": "sums.jsonl"}, "rewards": {"saboteur:zero": 1.0}}
    path.write_text(to_toml(recipe_from_dict(given)))
    done = command("run", path, "--rl.prompts_per_step", 2)
    assert path.read_text() == "[rl\nsteps = "
    assert done.code == 0, done
    assert "no_signal, step 3 to the end" in done.out
    changed = parse_overrides(shlex.split(commands(done.out)[0])[3:])
    assert changed == {
        ("rl", "prompts_per_step"): 2,
        ("rl", "max_new_tokens"): 8,
        ("run", "folder"): f"{tmp_path / 'run'}-max_new_tokens-8",
    }
    (tmp_path / "run" / "recipe.toml").unlink()  # as in a run from Python: the file is all there is
    known = resolve(recipe_from_dict(given, source=str(path)))
    found = [{"finding": "no_signal", "change": "--rl.group_size 8", "until": None}]
    lines = next_steps(RunFolder(tmp_path / "run"), known, findings=found)
    assert lines == ["# against no_signal: rl.group_size = 8"]


Start = Callable[..., Result]


@pytest.fixture
def constant(tmp_path: Path, command: Command) -> Start:
    """A run whose reward gives everything 1, from the command line."""
    (tmp_path / "always.py").write_text("def one(completion, answer):\n    return 1.0\n")
    given = recipe(tmp_path / "run", sft=None, eval=None, rl={"steps": 1, "check": "stop"})
    given["rewards"] = {"always:one": 1.0}
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    return lambda *more: command("run", path, *more)


def test_a_failed_check_stops_the_run(constant: Start, tmp_path: Path) -> None:
    """With a mark, what to do, how to go on all the same, and an exit code; nothing is trained."""
    done = constant()
    assert done.code == 2
    assert "✗ check: signal: groups with signal: nothing to learn from" in done.out
    assert "check: this run cannot work as it is" in done.err
    assert 'Fix it, or continue anyway with --check warn (Python: check="warn")' in done.err
    assert not (tmp_path / "run").exists()


def test_a_failed_check_may_be_a_warning_or_left_out(constant: Start) -> None:
    """What fails keeps its mark; and the old words are refused with the new ones."""
    done = constant("--check", "warn")
    assert done.code == 0, done
    assert "✗ check: signal: groups with signal" in done.out
    assert "passed; passes: 0.1 epochs (1 step × 4 prompts ÷ 40)" in done.out
    done = constant("--check", "off", "--run.folder", "other")
    assert done.code == 0, done
    assert "check:" not in done.out
    done = constant("--rl.check", "false")
    assert done.code == 2
    assert 'rl.check: must be "stop", "warn" or "off", got false' in done.err


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (Marks(check="exact", weights={"exact": 1.0}), "no answer is right"),
        (Marks(check="exact", weights={"exact": 1.0, "seen": 0.0}), "no answer is right"),
    ],
)
def test_other_rewards_are_spoken_of_only_where_there_are_any(marks: Marks, said: str) -> None:
    assert _learnable(marks) == (
        f"{said}, so only the differences between lower marks can be learned"
    )
    more = replace(marks, check="exact", weights={"exact": 1.0, "form": 0.2})
    said = "no answer is right, so only the other rewards (form) can be learned"
    assert _learnable(more) == said


@pytest.mark.filterwarnings("default:.*leave no room")
def test_prompts_that_are_left_out_are_counted_once_and_without_a_path(
    tmp_path: Path, command: Command
) -> None:
    """In the line of the check; without it, in a warning that names no file of the source."""
    rows = [{"prompt": "1+" * 40 * (n % 2) + f"{n}+1=", "answer": f"{n + 1}"} for n in range(8)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "run": {"folder": str(tmp_path / "run")},
        "model": {"name": "tiny", "options": TINY},
        "task": {"name": "jsonl", "path": str(data)},
        "rl": {"steps": 1, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
    }
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe_from_dict(given)))
    done = command("run", path)
    assert done.code == 0, done
    assert "! check: data: prompt length" in done.out
    assert "room for 60 tokens; 4 of 8 train prompts (50%) are longer and left out; th" in done.out
    assert "lower max_new_tokens" not in done.out  # nothing would come of it
    assert "leave no room" not in done.err
    assert "indexing errors" not in done.err
    done = command("run", path, "--check", "off", "--run.folder", "other")
    assert "! 4 of 8 train prompts leave no room for 4 new tokens" in done.err
    assert ".py" not in done.err
