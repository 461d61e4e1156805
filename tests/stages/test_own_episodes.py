"""Environments from Python, with prompts of one's own: named, scored, told apart, gone on with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resumed_runs import dying, go
from small_runs import RL, timeless

import posttrain
from posttrain.build.fingerprint import supplied_digests
from posttrain.build.rows import env_spec, rows_task
from posttrain.check import check_recipe
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.runs import read_rollouts
from posttrain.tasks import make_task
from posttrain.types import Observation

ROWS: list[dict[str, Any]] = [{"prompt": "Find it: ", "target": n} for n in range(10)]
QUICK: dict[str, Any] = {**RL, "steps": 2, "environment": {"workers": 0}, "seed": 1}


class Hidden:
    """One guess at a number that only the row has; it scores by how many characters were said."""

    def reset(self, prompt: str, target: int, **columns: Any) -> str:
        self.target, self.said = target, ""
        return f"(0 to {target}) "

    def on_text(self, text: str) -> None:
        self.said = text

    def reward(self) -> float:
        return self.target + len(self.said) / 100


class HiddenGame:
    """The same with start and reply, and an option."""

    def __init__(self, *, most: int = 2) -> None:
        self.most = most

    def start(self, prompt: Any) -> list[int]:
        return [prompt.columns["target"], 0]

    def reply(self, state: list[int], turn: Any) -> Any:
        state[1] += 1
        return "again " if state[1] < self.most else state[0] + len(turn.text) / 100


def hidden(messages: Any, target: int) -> float:
    return target + len(messages[-1]["content"]) / 100


@pytest.mark.parametrize(
    "env", [Hidden, HiddenGame(), HiddenGame, hidden, f"{__name__}:Hidden",
            {"name": f"{__name__}:HiddenGame", "most": 3}, {"name": HiddenGame, "most": 3}],
)  # fmt: skip
def test_rows_and_an_environment_are_all_that_a_run_takes(env: Any, tmp_path: Path) -> None:
    """A class, an object, a function or a name: rows of one prompt are episodes of their own, which
    the environment alone scores; held-out ones too.
    """
    run = posttrain.rl(
        prompts=ROWS[:6], test_prompts=ROWS[6:], env=env, folder=tmp_path / "run", **QUICK
    )
    rows = read_rollouts(run.folder.stage("rl").rollouts)
    targets = {f"train-{row['target']}": row["target"] for row in ROWS[:6]}
    assert {row["prompt"].partition("(")[0] for row in rows} == {"Find it: "}
    assert len({row["prompt_id"] for row in rows}) > 1
    for row in rows:
        assert row["state"] == "ok"
        assert int(row["reward"]) == targets[row["prompt_id"]]
        assert dict(row["parts"])["env"] == row["reward"]
    found = posttrain.evaluate(
        run.folder.path, prompts=ROWS[6:], environment={"workers": 0}, max_new_tokens=2
    )
    assert sorted(int(r.score.value) for r in found.greedy if r.score is not None) == [6, 7, 8, 9]


def rewarding(completion: str) -> float:
    return len(completion) / 100


def test_a_killed_run_goes_on_with_the_same_rows_and_class(tmp_path: Path) -> None:
    """Bit for bit; other columns or another class of the same name are another run."""
    options = {"prompts": ROWS[:6], "test_prompts": ROWS[6:], "env": Hidden, "seed": 1}
    quick = {**QUICK, **options, "steps": 4, "save_every": 2, "run_options": {"save_minutes": 0.0}}
    whole = posttrain.rl(folder=tmp_path / "whole", **quick)
    with dying(2), pytest.raises(KeyboardInterrupt):
        posttrain.rl(folder=tmp_path / "cut", **quick)
    for changes in (
        {"prompts": [{**row, "target": row["target"] + 20} for row in ROWS[:6]]},
        {"env": type("Hidden", (Hidden,), {"reward": lambda self: 0.0})},
    ):
        with pytest.raises(ValueError, match=r"supplied\.task|task\.env"):
            posttrain.rl(folder=tmp_path / "cut", resume=True, **{**quick, **changes})
    again = posttrain.rl(folder=tmp_path / "cut", resume=True, **quick)
    records = [run.folder.stage("rl").records() for run in (whole, again)]
    assert timeless(records[0]) == timeless(records[1])
    assert read_rollouts(whole.folder.stage("rl").rollouts) == read_rollouts(
        again.folder.stage("rl").rollouts
    )
    assert whole.folder.samples == again.folder.samples


def test_a_class_that_no_module_has_is_found_by_this_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(Hidden):
        """As in a notebook."""

    options = {**QUICK, "environment": {"workers": 1}, "check": "warn"}
    run = posttrain.rl(prompts=ROWS, env=Local, folder=tmp_path / "run", **options)
    assert run.folder.config["task"]["env"]["name"].startswith("object Local ")
    quick: dict[str, Any] = {"environment": {"workers": 0}, "max_new_tokens": 2}
    with pytest.warns(UserWarning, match="reset.. missing 1 .*has no columns of a row"):
        posttrain.generate(run.folder.path, "Find it: ", max_new_tokens=2)
    evaluated = posttrain.evaluate(run.folder.path, prompts=ROWS[:2], **quick)
    assert len(evaluated.greedy) == 2
    monkeypatch.setattr("posttrain.envs.shapes._handed", {})
    with pytest.warns(UserWarning, match="handed over from Python.* every answer is one turn"):
        posttrain.generate(run.folder.path, "Find it: ", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"Local [0-9a-f]{16} was handed over.* give it again"):
        posttrain.evaluate(run.folder.path, prompts=ROWS[:2], **quick)
    posttrain.evaluate(run.folder.path, prompts=ROWS[:2], env=Local, **quick)


def written_rows(folder: Path, name: str, *, targets: Sequence[int]) -> str:
    lines = [json.dumps({"prompt": "Find it: ", "target": n}) + "\n" for n in targets]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines))
    return str(path)


def written(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe of a file of rows with one prompt, an environment of a module, and no rewards."""
    path = written_rows(folder, "rows", targets=range(40))
    task = {"name": "file", "path": path, "test_share": 0.3}
    return {
        "run": {"folder": str(folder / "run"), "seed": 1, "stages": ["rl", "eval"]},
        "model": {"name": "tiny", **RL["model_options"]},
        "task": {**task, "env": f"{__name__}:Hidden"},
        "environment": {"workers": 0},
        "rl": {name: value for name, value in RL.items() if name != "model_options"},
        "eval": {"problems": 4},
        **changes,
    }


def test_a_recipe_of_a_file_and_an_environment_needs_no_rewards(tmp_path: Path) -> None:
    """It is checked, run, and evaluated as it was, by an environment that scores."""
    values = written(tmp_path)
    report = check_recipe(values, fast=True)
    lines = {line.name: line for line in report.lines}
    assert lines["gold answers"].text == (
        "the environment scores the episodes, and no reward stands beside it"
    )
    assert (lines["duplicates"].state, lines["train/test overlap"].state) == ("pass", "pass")
    assert not [line for line in report.lines if line.state == "fail"]
    done, _ = go(values)
    rows = read_rollouts(done.folder.stage("rl").rollouts)
    assert {int(row["reward"]) for row in rows} <= set(range(40))
    sides = [make_task(values["task"]).prompts(split) for split in ("train", "test")]
    targets = [{prompt.columns["target"] for prompt in side} for side in sides]
    assert targets[0] | targets[1] == set(range(40))
    assert targets[0].isdisjoint(targets[1])
    assert len(targets[1]) == pytest.approx(12, abs=6)
    found = posttrain.evaluate(done.folder.path)  # held-out rows are no train rows
    assert {int(r.score.value) for r in found.greedy if r.score is not None} <= targets[1]
    train = sides[0][0].columns["target"]
    unlike, same = (
        written_rows(tmp_path, name, targets=[n]) for name, n in (("a", 99), ("b", train))
    )
    other = {**values["task"], "path": unlike}
    del other["test_share"]
    new = written_rows(tmp_path, "c", targets=[77, 78])
    found = posttrain.evaluate(done.folder.path, task={**other, "test_path": new})
    assert sorted(int(r.score.value) for r in found.greedy if r.score is not None) == [77, 78]
    with pytest.raises(ValueError, match="1 of 1 test problems were in the training data"):
        posttrain.evaluate(done.folder.path, task={**other, "test_path": same})
    with pytest.raises(ValueError, match="is also train prompt"):
        make_task({**other, "path": values["task"]["path"], "test_path": same})


class Mute(Hidden):
    """It never scores, and does not say so."""

    reward = None  # type: ignore[assignment]


class Paid:
    """Two turns, of which each earns what it says; nothing at the end."""

    def start(self, prompt: Any) -> list[str]:
        return []

    def reply(self, state: list[str], turn: Any) -> Any:
        state.append(turn.text)
        return Observation("so? ", reward=0.25 * len(state)) if len(state) < 3 else None


class Endless:
    """It scores who says the end, and has no word for an episode that a limit ended."""

    def start(self, prompt: Any) -> None: ...

    def reply(self, state: None, turn: Any) -> Any:
        return 1.0 if "the end" in turn.text else "so? "


@pytest.mark.parametrize(("env", "section", "parts"), [
    (Paid, {}, {"env": 0.75, "env/earned": 0.75}),
    (Paid, {"max_turns": 2}, {"env": 0.75, "env/earned": 0.75}),
    (Endless, {"max_turns": 2}, {"env": 0.0}),
])  # fmt: skip
def test_what_turns_have_earned_is_a_score(
    env: Any, section: dict[str, Any], parts: dict[str, float], tmp_path: Path
) -> None:
    """Rewards of turns are a score, though none comes at the end; and where a limit ends what no
    method ``score`` judges, the environment has given nothing: 0, not an episode left out.
    """
    quick = {**QUICK, "environment": {"workers": 0, **section}, "steps": 1}
    run = posttrain.rl(prompts=ROWS, env=env, folder=tmp_path / "run", **quick)
    for row in read_rollouts(run.folder.stage("rl").rollouts):
        assert (row["state"], row["reward"], dict(row["parts"])) == ("ok", parts["env"], parts)


def test_where_nothing_scores_it_is_said(tmp_path: Path) -> None:
    """Before the model is asked anything, where the environment says that it never scores."""
    with pytest.raises(ValueError, match=r"does not score, and there is no reward with a weight"):
        posttrain.rl(prompts=ROWS, env="calculator", folder=tmp_path / "never", **QUICK)
    with pytest.raises(RuntimeError, match=r"ended the episode without a score.*let it score"):
        posttrain.rl(prompts=ROWS, env=Mute, folder=tmp_path / "mute", **QUICK)
    with pytest.raises(ValueError, match=r"rewards: none given; name at least one"):
        posttrain.rl(prompts=ROWS[:1], folder=tmp_path / "none", **RL)
    task = written(tmp_path)["task"] | {"env": f"{__name__}:Mute"}
    report = check_recipe(written(tmp_path, task=task), fast=True)
    failed = [line for line in report.lines if line.state == "fail"]
    assert any("ended the episode without a score" in line.text for line in failed)


def test_rewards_beside_an_environment_may_only_be_watched(tmp_path: Path) -> None:
    run = posttrain.rl(
        prompts=ROWS, env=Hidden, reward={rewarding: 0.0}, folder=tmp_path / "run", **QUICK
    )
    for row in read_rollouts(run.folder.stage("rl").rollouts):
        parts = dict(row["parts"])
        assert row["reward"] == parts["env"]
        assert parts[f"{__name__}:rewarding"] == len(row["completion"]) / 100
    with pytest.raises(ValueError, match="every weight is 0"):
        posttrain.rl(prompts=ROWS[:1], reward={rewarding: 0.0}, folder=tmp_path / "plain", **RL)


@pytest.mark.parametrize(("given", "said"), [
    ({"prompts": ROWS}, r"prompts\[1\]: the prompt of prompts\[0\] again, .*env=…"),
    ({"prompts": ROWS[:1], "task": {"name": "file", "env": "scripted"}}, "of prompts is env=…"),
    ({"env": Hidden}, "an environment brings none; give prompts=…, or a task"),
    ({"env": "scripted", "task": {"name": "arithmetic", "env": "wordle"}}, "env: .*one already"),
    ({"prompts": ROWS, "env": lambda m: 1.0}, "environment '<lambda>': the first parameter"),
    ({"prompts": ROWS, "env": {"name": Hidden, "most": 1}}, "unknown option 'most'"),
    ({"prompts": ROWS, "env": {"name": 3}}, "env: expected an environment, its name"),
    ({"prompts": ROWS, "env": 3}, "env: expected an environment, its name, or its class"),
    ({"prompts": ROWS, "env": "script"}, r"task\.env: unknown name 'script'; did you mean"),
    ({"prompts": ROWS[:1], "environment": Hidden}, "an environment itself is env=…"),
    ({"prompts": ROWS[:1], "environment_factory": Hidden}, "posttrain.rl calls it env"),
    ({"prompts": ROWS, "env": {"name": f"{__name__}:HiddenGame", "least": 1}}, "option 'least'"),
])  # fmt: skip
def test_mistakes_are_explained(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        posttrain.rl(reward=rewarding, folder=tmp_path / "run", **{**RL, **given})


def test_a_task_and_an_environment_of_another_place(tmp_path: Path) -> None:
    """A task by name or as an object, with an environment beside it; another one to evaluate."""
    one: dict[str, Any] = {"environment": {"workers": 0}, "max_new_tokens": 2}
    task = {"name": "arithmetic", "num_train": 4, "num_test": 2}
    ends = {"name": "scripted", "score": 0.5}
    for asked in (task, make_task(task)):
        found = posttrain.evaluate("tiny", task=asked, env=ends, **one)
        assert [r.score.value for r in found.greedy if r.score is not None] == [0.5, 0.5]
    assert env_spec(hidden) == f"{__name__}:hidden"
    run = posttrain.rl(task=task, env=ends, folder=tmp_path / "run", **{**QUICK, "steps": 1})
    found = posttrain.evaluate(run.folder.path, env={**ends, "score": 2.0}, **one)
    assert [r.score.value for r in found.greedy if r.score is not None] == [2.0, 2.0]


def test_demonstrations_call_the_tools_of_an_environment_without_a_task(tmp_path: Path) -> None:
    """The same as beside a task that nothing else is asked of; also in a recipe, and its check."""
    wide = {"hidden_size": 32, "num_layers": 2, "max_positions": 1024}
    policy = load_policy("tiny", options=wide)
    policy.tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    save_policy(policy, tmp_path / "chat")
    call = {"function": {"name": "calculate", "arguments": {"expression": "2*3"}}}
    chat = [
        {"role": "user", "content": "2*3="},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
    data, model = tmp_path / "calls.jsonl", str(tmp_path / "chat")
    data.write_text(json.dumps({"messages": chat}) + "\n")
    quick: dict[str, Any] = {"data": str(data), "epochs": 1}
    task: dict[str, Any] = {"name": "arithmetic", "env": "calculator"}
    alone, beside, plain = (
        timeless(run.folder.stage("sft").records())
        for run in (
            posttrain.sft(model=model, folder=tmp_path / "0", env="calculator", **quick),
            posttrain.sft(model=model, folder=tmp_path / "1", task=task, **quick),
            posttrain.sft(model=model, folder=tmp_path / "2", **quick),
        )
    )
    assert alone == beside
    assert alone != plain  # without tools in the prompt
    values = {
        "run": {"folder": str(tmp_path / "recipe"), "stages": ["sft"]},
        "model": {"name": model},
        "task": {"env": "calculator"},
        "sft": quick,
    }
    assert not [line for line in check_recipe(values, fast=True).lines if line.state == "fail"]
    with pytest.raises(ValueError, match=r"task: missing, but required by rl"):
        go({**values, "run": {**values["run"], "stages": ["sft", "rl"]}, "rl": {}})


def test_rows_that_differ_inside_of_a_long_array_are_two() -> None:
    """What is printed of an array leaves out its middle."""
    arrays = [np.zeros(3000) for _ in range(3)]
    arrays[1][1500] = 1.0
    rows = [{"prompt": "Find it: ", "target": array} for array in arrays]
    with pytest.warns(UserWarning, match="1 row repeats an earlier one"):
        task = rows_task(None, prompts=rows, test_prompts=(), env="scripted")
    assert [prompt.columns["target"].sum() for prompt in task.prompts("train")] == [0.0, 1.0]
    digests = {
        supplied_digests({"task": rows_task(None, prompts=[row], test_prompts=(), env="scripted")})[
            "supplied"
        ]["task"]["prompts"]
        for row in rows
    }
    assert len(digests) == 2
