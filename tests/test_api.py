"""The same from Python: ``posttrain.rl``, ``sft``, ``evaluate`` and ``generate``."""

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import RL, TASK, TINY, same_weights, timeless
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.rollout.engines.weight_probe import why_unproven
from posttrain.stages.whole.from_python import TrainingCall, without_our_frames
from posttrain.tasks import make_task
from posttrain.types import Turn

MODEL = {"options": TINY}


def shortness(completion: str) -> float:
    """Fewer characters are better."""
    return 1 - len(completion) / 10


def first_digit(completion: str, answer: str) -> float:
    """Whether the completion begins as the answer does."""
    return float(completion[:1] == answer[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that ``posttrain.sft`` made, half trained to add."""
    made = posttrain.sft(
        task=TASK,
        model_options=MODEL,
        folder=tmp_path_factory.mktemp("sft") / "run",
        epochs=30,
        batch_size=8,
        learning_rate=5e-3,
    )
    return made.model


def test_rl_on_strings_with_a_function(tmp_path: Path) -> None:
    """Plain prompts and a Python function are all it takes; the reward is named as in a recipe."""
    run = posttrain.rl(prompts=["1+1=", "2+2="], reward=shortness, folder=tmp_path / "r", **RL)
    rows = run.samples(1, limit=100)
    assert {row["prompt"] for row in rows} == {"1+1=", "2+2="}
    assert all(row["reward"] == pytest.approx(shortness(row["completion"])) for row in rows)
    assert all(set(row["parts"]) == {f"{__name__}:shortness"} for row in rows)
    assert run.summary["stages"] == ["rl"]
    assert AutoModelForCausalLM.from_pretrained(run.model).config.hidden_size == 32


def test_conversations_are_shown_where_they_are_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message of the user as it is, which can be asked again; more of them with their roles."""
    options = {"model_options": {"options": {**TINY, "chat": True}}, "reward": "exact"}

    def shown(*before: dict[str, str]) -> tuple[list[str], str]:
        rows = [
            {"prompt": [*before, {"role": "user", "content": f"{n}+1="}], "answer": f"{n + 1}!"}
            for n in range(4)
        ]
        folder = tmp_path / f"{len(before)}"
        run = posttrain.rl(
            prompts=rows[:2], test_prompts=rows[2:], folder=folder, **{**RL, **options}
        )
        assert {row["prompt"] for row in run.samples(1)} == {
            text.replace("2+1", "0+1").replace("3+1", "1+1") for text in asked(folder)
        }
        return asked(folder), capsys.readouterr().out

    def asked(folder: Path) -> list[str]:
        return sorted(row["prompt"] for row in json.loads((folder / "samples.json").read_text()))

    texts, said = shown()
    assert texts == ["2+1=", "3+1="]
    assert "a held-out problem that it got wrong" in said
    texts, said = shown({"role": "system", "content": "Brief."})
    assert texts == ["system: Brief.\nuser: 2+1=", "system: Brief.\nuser: 3+1="]
    assert "a held-out problem" not in said  # no command line asks it as it was asked


def test_the_default_reward_of_rows_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(4)]
    posttrain.rl(prompts=rows, folder=tmp_path / "own", **RL)
    assert "reward: none is given; numeric compares with the answers" in capsys.readouterr().out
    posttrain.rl(prompts=rows, reward="exact", folder=tmp_path / "named", **RL)
    posttrain.rl(prompts=rows, reward=shortness, folder=tmp_path / "function", **RL)
    assert "none is given" not in capsys.readouterr().out


def test_a_key_of_another_section_is_said_as_python_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"write model_options=\{\"chat\": …\}"):
        posttrain.sft(task=TASK, folder=tmp_path, chat=False)  # type: ignore[call-arg]


def test_rl_on_rows_evaluates_on_test_rows(tmp_path: Path) -> None:
    """Columns reach the reward by name; with test prompts there is accuracy before and after."""
    run = posttrain.rl(
        prompts=[{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)],
        test_prompts=[{"prompt": "7+1=", "answer": "8"}, {"prompt": "8+1=", "answer": "9"}],
        reward={first_digit: 1.0, "exact": {"weight": 0.5}},
        folder=tmp_path / "r",
        **RL,
    )
    assert run.summary["stages"] == ["rl", "eval"]
    assert run.summary["accuracy_before"] in (0.0, 0.5, 1.0)
    row = run.samples(1, limit=1)[0]
    named = f"{__name__}:first_digit"
    assert set(row["parts"]) == {named, "exact"}
    assert row["reward"] == row["parts"][named] + 0.5 * row["parts"]["exact"]


def test_rl_on_a_file_is_rl_on_its_rows(tmp_path: Path) -> None:
    """A JSONL path gives the run that its rows give, bit for bit."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [
        posttrain.rl(prompts=given, reward=first_digit, folder=tmp_path / name, **RL)
        for name, given in (("file", tmp_path / "rows.jsonl"), ("rows", rows))
    ]
    first, second = (run.folder.stage("rl").records() for run in runs)
    assert timeless(first) == timeless(second)
    assert same_weights(runs[0].model, runs[1].model)


def test_rl_on_a_task_object_with_a_table_of_rewards(tmp_path: Path) -> None:
    """A task made in Python brings its test problems along, and rewards by name and weight."""
    rewards = {"numeric": {"weight": 2.0, "extract": "whole"}, shortness: 0.0}
    run = posttrain.rl(task=make_task(TASK), reward=rewards, folder=tmp_path / "r", **RL)
    assert run.summary["stages"] == ["rl", "eval"]
    row = run.samples(1, limit=1)[0]
    assert row["reward"] == 2.0 * row["parts"]["numeric"]


def test_the_reward_sees_the_prompt_as_it_was_given(tmp_path: Path) -> None:
    """Not as the chat template wrote it."""
    seen = set()

    def watch(prompt: str, completion: str) -> float:
        seen.add(prompt)
        return shortness(completion)

    posttrain.rl(
        prompts=["1+1=", "2+2="],
        reward=watch,
        grading={"workers": 0},
        folder=tmp_path / "r",
        **RL,
    )
    assert seen == {"1+1=", "2+2="}


def test_top_k_turns_the_correction_on(tmp_path: Path) -> None:
    """Where sampling cuts the distribution, the factor is in the metrics and below 1."""
    given = {"prompts": ["1+1=", "2+2="], "reward": shortness}
    cut = posttrain.rl(**given, top_k=5, top_p=0.9, folder=tmp_path / "cut", **RL)
    whole = posttrain.rl(**given, folder=tmp_path / "whole", **RL)
    assert cut.folder.config["rl"]["correction"]["name"] == "truncated"
    for record in cut.folder.stage("rl").records():
        assert 0 < record["mismatch/correction"] < 0.9
        assert record["mismatch/mean"] > 0.1
    for record in whole.folder.stage("rl").records():
        assert "mismatch/correction" not in record
        assert record["mismatch/max"] < 1e-4


def test_sft_learns_the_demonstrations(folder: Path) -> None:
    """Demonstrations of a task: the trained folder answers them, the untrained model does not."""
    trained = posttrain.evaluate(folder, task=TASK, samples=2, max_new_tokens=4)
    untrained = posttrain.evaluate("tiny", model_options=MODEL, task=TASK, max_new_tokens=4)
    assert set(trained.estimates) == {"accuracy", "mean@2", "pass@1", "pass@2"}
    assert untrained.accuracy.value == 0
    assert trained.mean_reward > untrained.mean_reward
    assert trained.estimates["pass@2"].value >= trained.estimates["mean@2"].value
    assert len(trained.greedy) == 10
    assert len(trained.sampled) == 20


def test_sft_on_a_file(tmp_path: Path) -> None:
    """Rows of prompt and completion, and chats, in one file."""
    rows = [
        {"prompt": "a", "completion": "a"},
        {
            "messages": [
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "b"},
            ]
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = posttrain.sft(
        data=tmp_path / "rows.jsonl",
        model_options={**MODEL, "options": {**MODEL["options"], "chat": True}},
        folder=tmp_path / "run",
        epochs=40,
        learning_rate=1e-2,
    )
    assert run.metrics("sft")["sft/tokens"].to_pylist() == [4.0] * 40  # letter and end, twice
    for letter in "ab":
        (answer,) = posttrain.generate(run.model, letter, max_new_tokens=4)
        assert (answer.text, answer.stop_reason) == (letter, "stop")


def test_evaluate_on_own_prompts(folder: Path) -> None:
    """Prompts and a reward in place of a task."""

    def ends(stop_reason: str) -> float:
        return float(stop_reason == "stop")

    with pytest.warns(
        UserWarning, match=r"1 of 2 test problems were in the training data .* '1\+1='"
    ):
        found = posttrain.evaluate(
            folder, prompts=["1+1=", "2+3="], reward=ends, max_new_tokens=4, problems=1
        )
    assert found.accuracy is None
    assert list(found.estimates) == ["full_marks/ends"]
    assert found.estimates["full_marks/ends"].value == 1.0
    assert len(found.greedy) == 1


def test_generate_is_greedy_and_samples_by_seed(folder: Path) -> None:
    """One greedy answer; several samples that the seed decides."""
    (answer,) = posttrain.generate(folder, "3+4=", max_new_tokens=4)
    assert answer == posttrain.generate(folder, "3+4=", max_new_tokens=4, seed=9)[0]
    options = {"num_samples": 6, "temperature": 2.0, "max_new_tokens": 4}
    first = posttrain.generate(folder, "3+4=", seed=1, **options)
    assert first == posttrain.generate(folder, "3+4=", seed=1, **options)
    assert first != posttrain.generate(folder, "3+4=", seed=2, **options)
    assert len({sample.text for sample in first}) > 1


def test_misspelled_and_missing_options_say_so(tmp_path: Path) -> None:
    """The rules of recipes hold from Python too."""
    with pytest.raises(ValueError, match=r"rl\.group_sise.*group_size"):
        posttrain.rl(prompts=["a"], reward=shortness, folder=tmp_path, group_sise=4)
    with pytest.raises(ValueError, match="give a task or prompts, not both"):
        posttrain.rl(prompts=["a"], task="sort", reward=shortness)
    with pytest.raises(ValueError, match="none given; name at least one"):
        posttrain.rl(prompts=["a"], folder=tmp_path / "r", **RL)
    with pytest.raises(ValueError, match="needs the column 'answer'"):
        posttrain.rl(prompts=["a"], reward=first_digit, folder=tmp_path / "s", **RL)
    with pytest.raises(ValueError, match="prompts: holds no rows"):
        posttrain.rl(prompts=[], reward=shortness, folder=tmp_path / "t", **RL)


def test_a_traceback_shows_the_call_or_else_everything(tmp_path: Path) -> None:
    """The call, and one line of ours, under a mistake; all lines under one of a user's function."""
    mistakes: list[Any] = [
        lambda: posttrain.rl(prompts=["a"], reward=shortness, steps="three"),
        lambda: posttrain.rl(prompts=["a"], reward=shortness, algorithm="gpro"),
        lambda: posttrain.rl(prompts="nowhere.jsonl", reward=shortness),
        lambda: posttrain.sft(data="nowhere.jsonl", folder=tmp_path / "run"),
        lambda: posttrain.evaluate("tiny", task="arithmetics"),
    ]
    for mistake in mistakes:
        with pytest.raises((ValueError, FileNotFoundError)) as failed:
            mistake()
        assert [Path(each.path).name for each in failed.traceback][2:] == ["from_python.py"]
        assert failed.value.__suppress_context__

    def stumbling(*given: Any) -> Any:
        raise ValueError("I stumble")
        yield

    with pytest.raises(ValueError, match="I stumble") as failed:
        posttrain.rl(prompts=stumbling(), reward=shortness)
    assert {"rl", "rows_task", "stumbling"} <= {each.name for each in failed.traceback}
    options = {**RL, "folder": tmp_path / "run", "callbacks": [lambda done: next(stumbling())]}
    with pytest.raises(RuntimeError, match="I stumble") as failed:
        posttrain.rl(prompts=["a"], reward=shortness, **options)
    assert failed.value.__cause__ is not None
    frames = traceback.extract_tb(failed.value.__cause__.__traceback__)
    assert frames[-1].name == "stumbling"


def test_an_error_that_nobody_raised_keeps_its_traceback() -> None:
    """A built-in's, in the middle of our code: a bug, and where it is must be seen."""
    turn = Turn(tokens=(1,), text="", logprobs=(0.0,))
    with pytest.raises(ValueError, match="zip") as failed:
        without_our_frames(why_unproven)([turn], [], tolerance=1.0)
    assert failed.traceback[-1].name == "why_unproven"


def test_a_warning_about_rows_is_of_the_line_that_gave_them() -> None:
    repeated = pytest.warns(UserWarning, match="1 row repeats")
    with repeated as caught, pytest.raises(ValueError, match="no_such"):
        posttrain.rl(prompts=["a", "a", "b"], reward="no_such")
    assert caught[0].filename == __file__


def test_what_generate_cannot_do_is_said(folder: Path) -> None:
    with pytest.raises(ValueError, match="max_new_tokens: must be at least 1, got 0"):
        posttrain.generate(folder, "3+4=", max_new_tokens=0)
    with pytest.raises(ValueError, match="prompts: expected a text, the messages of a chat"):
        posttrain.generate(folder, None)
    for number in (0, 100_000_000):
        with pytest.raises(
            ValueError, match=f"num_samples: must be from 1 to 10,000, got {number:,}"
        ):
            posttrain.generate(folder, "3+4=", num_samples=number, max_new_tokens=1)


def test_some_reward_needs_a_weight(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward: every weight is 0, so nothing can be learned"):
        posttrain.rl(
            prompts=["1+1="], reward={lambda completion: 1.0: 0.0}, folder=tmp_path / "run", **RL
        )


@pytest.mark.parametrize("job", [posttrain.rl, posttrain.sft, posttrain.prefer, posttrain.reward])
def test_what_is_no_folder_no_model_and_no_file_is_said(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is made of the text of an object: neither a folder None nor a model Linear(…)."""
    monkeypatch.chdir(tmp_path)
    data = {"data": "pairs.jsonl"} if job is posttrain.reward else {"task": "sort"}
    with pytest.raises(
        ValueError,
        match=r"folder: expected the path of a folder, got an object of type int; .*runs/",
    ):
        job(model="tiny", folder=7, **data)
    with pytest.raises(
        ValueError, match=r"model: .* got an object of type torch\.nn.*Linear; write"
    ):
        job(model=torch.nn.Linear(2, 2), folder="run", **data)
    if "data" in data or job is posttrain.sft:
        with pytest.raises(ValueError, match="data: expected a list of rows, got int"):
            job(model="tiny", folder="run", data=5)
    assert list(tmp_path.iterdir()) == []


def test_sft_on_rows_is_sft_on_their_file(tmp_path: Path) -> None:
    """Bit for bit; the recipe names rows by their digest, so that others are another run."""
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model_options": MODEL, "epochs": 2, "batch_size": 4}
    runs = [
        posttrain.sft(data=data, folder=tmp_path / name, **given)
        for name, data in (("file", tmp_path / "rows.jsonl"), ("rows", rows))
    ]
    assert same_weights(runs[0].model, runs[1].model)
    assert runs[1].folder.config["sft"]["data"].startswith("rows:")
    with pytest.raises(ValueError, match=r"holds the finished run of another recipe.*sft\.data"):
        posttrain.sft(data=rows[:4], folder=tmp_path / "rows", **given)


def test_what_is_no_model_is_said_where_it_is_asked() -> None:
    for model in (torch.nn.Linear(2, 2), None, 7):
        with pytest.raises(ValueError, match=r"model: expected .*save_pretrained"):
            posttrain.evaluate(model, task="sort")
        with pytest.raises(ValueError, match=r"model: expected .*save_pretrained"):
            posttrain.generate(model, "1+1=")


def test_keys_of_run_are_given_as_options(tmp_path: Path) -> None:
    """As ``[run]`` of a recipe has them, by the same checks; what has a parameter is refused."""
    given = {"prompts": ["1+1="], "reward": shortness, "folder": tmp_path / "r", **RL}
    posttrain.rl(run_options={"trackers": ["tensorboard"], "device": "cpu"}, **given)
    written = json.loads((tmp_path / "r" / "config.json").read_text(encoding="utf-8"))
    assert written["run"]["trackers"] == ["tensorboard"]
    assert list((tmp_path / "r" / "rl" / "tensorboard").iterdir())
    with pytest.raises(ValueError, match=r"run\.device: must be"):
        posttrain.rl(run_options={"device": "gpu"}, **given)
    with pytest.raises(ValueError, match="run_options: seed, stages cannot be given here"):
        posttrain.rl(run_options={"stages": ["rl"], "seed": 1}, **given)
    with pytest.raises(ValueError, match=r"run\.device: must be"):
        posttrain.evaluate("tiny", task=TASK, model_options=MODEL, run_options={"device": "gpu"})


def test_an_unknown_option_of_generate_is_named() -> None:
    options: dict[str, Any] = {"max_tokens": 3}
    hint = "generate: unknown option 'max_tokens'; did you mean 'max_new_tokens'"
    with pytest.raises(ValueError, match=hint):
        posttrain.generate("tiny", "a", **options)


def test_an_evaluation_without_prompts_names_the_parameters() -> None:
    with pytest.raises(ValueError, match="from Python, give prompts=… or task=…"):
        posttrain.evaluate("tiny")


def test_a_number_is_a_rank_and_a_coefficient(tmp_path: Path) -> None:
    """What is refused is the steps alone."""
    options: dict[str, Any] = {"steps": 0, "kl": 0.25, "adapter": 4}
    with pytest.raises(ValueError, match=r"^rl\.steps: must be [^\n]*$"):
        posttrain.rl(prompts=["a"], reward="length", folder=tmp_path / "run", **options)


@pytest.mark.parametrize("function", ["rl", "sft", "prefer", "reward", "dpo"])
def test_what_every_function_is_given_arrives_under_its_name(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {name: object() for name in ("model", "tokenizer", "folder", "seed")}
    given |= {name: object() for name in ("resume", "overwrite", "allow_changes")}
    given |= {} if function == "prefer" else {"callbacks": object()}
    data = {"data": "pairs.jsonl"} if function in ("reward", "dpo") else {"task": TASK}
    calls: list[TrainingCall] = []
    monkeypatch.setattr(TrainingCall, "run", lambda call, *stages, **more: calls.append(call))
    getattr(posttrain, function)(**given, **data)
    assert {name: getattr(calls[0], name) for name in given} == given
