"""What users meet: each outcome is defined, and says what happened in words they understand."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import RL, TINY, recipe, same_weights, small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.build.setup import Supplied
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.report import overview
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.types import Turn

SUMS = [f"{n}+1=" for n in range(4)]
LONG = "1+" * 40 + "1="  # more than the 64 tokens of the small model


def shortness(completion: str) -> float:
    return 1 - len(completion) / 10


def metric(run: posttrain.Run, name: str) -> list[float]:
    return [record[name] for record in run.folder.stage("rl").records()]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_reward_that_raises_on_some(tmp_path: Path) -> None:
    """The run goes on: the share is in the metrics, the reason beside the rollout, no advantage."""
    calls = 0

    def fragile(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls % 16 == 1:
            raise ZeroDivisionError("no answer found")
        return shortness(completion)

    given = {"prompts": SUMS, "reward": fragile, "grading": {"workers": 0}}
    run = posttrain.rl(**given, folder=tmp_path / "r", **RL)
    assert metric(run, "reward/invalid") == [1 / 16] * 3
    broken = [row for row in run.samples(1, limit=16) if row["state"] != "ok"]
    assert [row["state"] for row in broken] == ["invalid"]
    assert (
        "'fragile' raised ZeroDivisionError: no answer found (test_outcomes.py:"
        in (broken[0]["reason"])
    )
    assert broken[0]["advantage"] is None
    mean = sum(row["reward"] for row in run.samples(1, limit=16) if row["state"] == "ok") / 15
    assert metric(run, "reward/mean")[0] == pytest.approx(mean, abs=1e-12)


def test_a_reward_that_raises_on_most_stops_the_run(tmp_path: Path) -> None:
    """With how many, on which prompt, and what the grader said."""

    def broken(completion: str) -> float:
        raise KeyError("answer")

    message = (
        r"16 of 16 scores are broken.*on prompt 'train-\d'.*'broken' raised KeyError: 'answer'"
    )
    with pytest.raises(RuntimeError, match=message):
        posttrain.rl(prompts=SUMS, reward=broken, folder=tmp_path / "r", **RL)
    assert not (tmp_path / "r" / "summary.json").exists()
    assert (tmp_path / "r" / "rl" / "metrics.jsonl").read_text() == ""  # nothing was learned


def test_where_every_score_is_broken_nothing_is_learned(tmp_path: Path) -> None:
    """A user may allow it; the weights then stay as they were, to the bit."""
    save_policy(load_policy("tiny", options=TINY), tmp_path / "start")

    def nothing(completion: str) -> float:
        return float("nan")

    options = {key: value for key, value in RL.items() if key != "model_options"}
    run = posttrain.rl(
        model=tmp_path / "start",
        prompts=SUMS,
        reward=nothing,
        max_invalid=1.0,
        folder=tmp_path / "r",
        **options,
    )
    assert metric(run, "reward/invalid") == [1.0] * 3
    assert not any("reward/mean" in record for record in run.folder.stage("rl").records())
    assert "reward_last" not in run.summary
    assert overview(run.folder.path).reward_last is None
    assert same_weights(run.model, tmp_path / "start")


def test_a_prompt_longer_than_the_context_is_left_out(tmp_path: Path) -> None:
    """With a warning that counts it, in training and in evaluation."""
    with pytest.warns(UserWarning, match=r"1 of 5 train prompts leave no room for 4 new tokens"):
        run = posttrain.rl(prompts=[*SUMS, LONG], reward=shortness, folder=tmp_path / "r", **RL)
    assert {row["prompt"] for row in run.samples(limit=100)} == set(SUMS)
    with pytest.warns(UserWarning, match=r"1 of 3 test prompts leave no room"):
        found = posttrain.evaluate(
            run.model, prompts=["7+8=", "8+7=", LONG], reward=shortness, max_new_tokens=4
        )
    assert len(found.greedy) == 2


def test_where_all_prompts_are_too_long_the_run_ends(tmp_path: Path) -> None:
    """With both lengths and the setting to change."""
    with pytest.raises(ValueError, match=r"leaves no room even for the shortest train prompts.*64"):
        posttrain.rl(prompts=[LONG], reward=shortness, folder=tmp_path / "r", **RL)
    options = {**RL, "max_new_tokens": 99}
    with pytest.raises(ValueError, match=r"max_new_tokens: 99 leaves no room.*context of 64"):
        posttrain.rl(prompts=SUMS, reward=shortness, folder=tmp_path / "s", **options)


def test_a_completion_cut_by_the_limit(tmp_path: Path) -> None:
    """Its share is a metric, its stop reason is kept, and it can cost something."""

    def nothing(completion: str) -> float:
        return 0.0

    options = {**RL, "missing_end_penalty": 0.5, "max_new_tokens": 40}
    run = posttrain.rl(prompts=SUMS, reward=nothing, folder=tmp_path / "r", **options)
    cut = metric(run, "rollout/truncated")
    assert all(0 < share < 1 for share in cut)
    assert metric(run, "reward/mean") == pytest.approx([-0.5 * share for share in cut])
    rows = run.samples(limit=100)
    assert {row["length"] for row in rows if row["stop_reason"] == "length"} == {40}
    assert all((row["stop_reason"] == "length") == (row["advantage"] < 0) for row in rows)


def test_a_model_that_ends_at_once(tmp_path: Path) -> None:
    """An end token alone is an answer like any other: empty text, length 1, and it is learned."""
    end = load_policy("tiny", options=TINY).end_tokens[0]
    engine = ScriptedEngine(
        lambda prompt, sample: "" if sample % 2 else "5",
        encode=lambda text: [11 for _ in text],
        end_token=end,
    )
    given = recipe(tmp_path / "r", sft=None, eval=None, rewards=None)
    scorer = RewardScorer({shortness: 1.0})
    run, _ = small_run(given, supplied=Supplied(engine=engine, rewards=scorer))
    assert metric(run, "rollout/length") == [1.5] * 3
    assert metric(run, "rollout/truncated") == [0.0] * 3
    empty = [row for row in run.samples(1, limit=16) if row["completion"] == ""]
    assert [row["completion_tokens"] for row in empty] == [[end]] * 8
    assert all(row["advantage"] > 0.5 for row in empty)
    assert all(norm > 0 for norm in metric(run, "train/gradient_norm"))


def test_an_engine_that_returns_no_token(tmp_path: Path) -> None:
    """There is nothing to learn from it, and nothing breaks."""
    nothing = Turn(tokens=(), logprobs=(), text="", stop_reason="stop", version=0)
    engine = ScriptedEngine(
        lambda prompt, sample: nothing if sample else "5", encode=lambda text: [11], end_token=1
    )
    given = recipe(tmp_path / "r", sft=None, eval=None, rewards=None)
    scorer = RewardScorer({shortness: 1.0})
    run, _ = small_run(given, supplied=Supplied(engine=engine, rewards=scorer))
    assert metric(run, "rollout/length") == [0.5] * 3
    rows = run.samples(1, limit=16)
    assert [row["advantage"] is None for row in rows] == [False, True, True, True] * 4


def test_a_model_without_pad_token(tmp_path: Path) -> None:
    """Its end token pads, and is still learned: masks do not come from token ids."""
    policy = load_policy("tiny", options=TINY)
    save_policy(policy, tmp_path / "start")
    config = json.loads((tmp_path / "start" / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "start" / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path / "start").pad_token is None
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "what", "completion": "nothing"}]
    run = posttrain.sft(
        model=tmp_path / "start",
        data=jsonl(tmp_path / "rows.jsonl", rows),
        folder=tmp_path / "r",
        epochs=40,
        learning_rate=1e-2,
    )
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == policy.end_tokens[0]
    assert (
        AutoModelForCausalLM.from_pretrained(run.model).generation_config.pad_token_id
        == (policy.end_tokens[0])
    )
    (answer,) = posttrain.generate(run.model, "a", max_new_tokens=4)
    assert (answer.text, answer.stop_reason) == ("b", "stop")


def test_a_file_with_a_duplicate_or_an_empty_row(tmp_path: Path) -> None:
    """A prompt that comes twice is dropped with a warning; an empty one is refused by its line."""
    rows = [{"prompt": text} for text in (*SUMS, SUMS[0])]
    path = jsonl(tmp_path / "twice.jsonl", rows)
    with pytest.warns(UserWarning, match="1 row repeats an earlier one and is dropped"):
        run = posttrain.rl(prompts=path, reward=shortness, folder=tmp_path / "r", **RL)
    assert len({row["prompt_id"] for row in run.samples(limit=100)}) == 4
    path = jsonl(tmp_path / "empty.jsonl", [{"prompt": "a"}, {"prompt": " "}])
    with pytest.raises(ValueError, match=r"empty\.jsonl:2: 'prompt' is empty; fill it in"):
        posttrain.rl(prompts=path, reward=shortness, folder=tmp_path / "s", **RL)
    with pytest.raises(ValueError, match=r"prompts\[1\]: 'prompt' is empty; fill it in"):
        posttrain.rl(prompts=["a", ""], reward=shortness, folder=tmp_path / "s", **RL)
    with pytest.raises(ValueError, match=r"no column 'prompt'"):
        posttrain.rl(prompts=[{"kwestion": "a"}], reward=shortness, folder=tmp_path / "s", **RL)


def test_demonstrations_with_a_duplicate_or_an_empty_row(tmp_path: Path) -> None:
    """A demonstration that comes twice is kept with a warning: that can be meant."""
    row = {"prompt": "a", "completion": "b"}
    options = {"model_options": {"options": TINY}, "folder": tmp_path / "r"}
    with pytest.warns(UserWarning, match=r"1 of 2 demonstrations repeat.*jsonl:2.*are kept"):
        run = posttrain.sft(data=jsonl(tmp_path / "twice.jsonl", [row, row]), **options)
    assert run.metrics("sft")["sft/tokens"].to_pylist() == [4.0]
    path = jsonl(tmp_path / "empty.jsonl", [row, {"prompt": "a", "completion": ""}])
    with pytest.raises(ValueError, match=r"empty\.jsonl:2: 'completion' is empty"):
        posttrain.sft(data=path, **{**options, "folder": tmp_path / "s"})


def test_a_test_problem_that_is_also_trained_on_is_refused(tmp_path: Path) -> None:
    """Accuracy on it would measure memory."""
    with pytest.raises(ValueError, match=r"'train-2' \('.*='\), the first of \d such of \d;"):
        posttrain.rl(prompts=SUMS, test_prompts=SUMS[2:], reward=shortness, folder=tmp_path)
