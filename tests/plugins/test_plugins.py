"""What a user adds is one file and one line of a recipe, run by the command ``posttrain run``.

The files in ``own`` are the user's; the recipe stands in a folder with them.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import command_in
from small_runs import same_weights
from transformers import AutoModelForCausalLM

from posttrain.runs import read_rollouts

OWN = Path(__file__).parent / "own"
# The user's lines stand in the braces.
RECIPE = """
[run]
folder = "run"
seed = 1
threads = 1
{run}

[model]
name = "tiny"
options = {{ hidden_size = 32, num_layers = 2, max_positions = 64 }}

[task]
{task}

[rewards]
{rewards}

[grading]
workers = 0

[rl]
algorithm = "grpo"
steps = 3
prompts_per_step = 4
group_size = 4
learning_rate = 1e-3
warmup_steps = 0
max_new_tokens = 4
kl = {{ placement = "none" }}
check = "off"
{rl}
"""
ARITHMETIC = 'name = "arithmetic"\noperators = "+"\ndigits = 1\nnum_train = 40\nnum_test = 10'


class Ran:
    """A finished run: its metrics and its rollouts."""

    def __init__(self, folder: Path, said: str) -> None:
        self.folder, self.said = folder, said
        lines = (folder / "rl" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.metrics: list[dict[str, float]] = [json.loads(line) for line in lines]
        self.rows = read_rollouts(folder / "rl" / "rollouts")
        self.model = folder / "rl" / "model"


@pytest.fixture
def posttrain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ran]]:
    """Runs a recipe with these lines in it, in a folder with these files of a user's own."""
    command = command_in(tmp_path, columns=100, monkeypatch=monkeypatch, capsys=capsys)

    def play(*files: str, name: str = "run", **lines: str) -> Ran:
        for file in files:
            shutil.copy(OWN / f"{file}.py", tmp_path)
            sys.modules.pop(file, None)  # the one in this test's folder is meant
        usual = {"run": "", "task": ARITHMETIC, "rewards": "numeric = 1.0", "rl": ""}
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(RECIPE.format(**{**usual, **lines}).replace('"run"', f'"{name}"', 1))
        result = command("run", recipe.name)
        assert result.code == 0, result.out + result.err
        for file in files:
            assert Path(sys.modules[file].__file__ or "").parent == tmp_path
        return Ran(tmp_path / name, result.out + result.err)

    yield play
    for path in OWN.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_a_reward_a_task_and_a_tracker(posttrain_run: Callable[..., Ran]) -> None:
    ran = posttrain_run(
        *("my_reward", "my_task", "my_tracker"),
        task='name = "my_task:reverse"',
        rewards='"my_reward:vowels" = { weight = 2.0, each = 0.25 }',
        run='trackers = [{ name = "my_tracker:Lines", file = "told.txt" }]',
    )
    for row in ran.rows:
        word, sign = row["prompt"][:-1], row["prompt"][-1]
        assert (sign, row["prompt_id"]) == (">", f"train-{word}")
        vowels = sum(row["completion"].count(letter) for letter in "aeiou")
        assert row["parts"]["my_reward:vowels"] == 0.25 * vowels + 2  # an answer has two letters
        assert row["reward"] == 2 * row["parts"]["my_reward:vowels"]
        assert row["parts"]["exact"] == float(row["completion"] == word[::-1])  # the task's check
    lines = (ran.folder / "rl" / "told.txt").read_text(encoding="utf-8").splitlines()
    told = [f"{record['step']} {record['reward/mean']!r}" for record in ran.metrics]
    assert lines == [*told, "closed"]
    assert len(told) == 3


@pytest.mark.filterwarnings("default:tracker:UserWarning")
def test_a_tracker_that_raises_is_left_out_and_the_run_goes_on(
    posttrain_run: Callable[..., Ran],
) -> None:
    """It is told no more after step 2; one warning says so, and later stages do without it."""
    ran = posttrain_run(
        "my_failing_tracker",
        run='trackers = ["my_failing_tracker:Server"]\nstages = ["sft", "rl"]',
        rl="[sft]\nepochs = 1\nbatch_size = 10",
    )
    said = " ".join(ran.said.split())
    assert "'my_failing_tracker:Server': ConnectionError at step 2: the server is gone; " in said
    assert said.count("left out for the rest of the run") == 1
    assert (ran.folder / "sft" / "told.txt").read_text().split() == ["0", "1", "2"]
    assert not (ran.folder / "rl" / "told.txt").exists()
    assert len(ran.metrics) == 3


@pytest.mark.filterwarnings("default:tracker:UserWarning")
def test_a_tracker_that_a_later_stage_cannot_make_is_left_out_of_it(
    posttrain_run: Callable[..., Ran],
) -> None:
    ran = posttrain_run(
        "my_failing_tracker",
        run='trackers = ["my_failing_tracker:OneStage"]\nstages = ["sft", "rl"]',
        rl="[sft]\nepochs = 1\nbatch_size = 10",
    )
    said = " ".join(ran.said.split())
    assert "'my_failing_tracker:OneStage': ConnectionError as rl began: no server; " in said
    assert len(ran.metrics) == 3


def test_an_advantage_for_each_token_without_a_critic(posttrain_run: Callable[..., Ran]) -> None:
    """The score stands at the last token, so it is to come for every one: the centred reward."""
    ran = posttrain_run(
        *("my_token_advantage", "my_reward"),
        rewards='"my_reward:vowels" = 1.0',
        rl='advantage = { name = "my_token_advantage:to_come", scale = 3.0 }',
    )
    assert "loss/value" not in ran.metrics[0]
    for step in (1, 2, 3):
        rows = [row for row in ran.rows if row["step"] == step]
        tokens = sum(row["length"] for row in rows)
        mean = math.fsum(row["reward"] * row["length"] for row in rows) / tokens
        for row in rows:
            assert row["advantage"] == pytest.approx(3 * (row["reward"] - mean), abs=1e-5)


def test_an_advantage_that_is_given_a_critic(posttrain_run: Callable[..., Ran]) -> None:
    """Every completion earns 1: the critic learns it, and what surprises shrinks."""
    ran = posttrain_run(
        *("my_critic_advantage", "my_reward"),
        rewards='"my_reward:agreed" = 1.0',
        rl='advantage = "my_critic_advantage:surprise"',
    )
    losses = [record["loss/value"] for record in ran.metrics]
    assert losses[0] > losses[1] > losses[2] > 0
    surprises = [record["advantage/mean_abs"] for record in ran.metrics]
    assert surprises[0] == pytest.approx(1.0, abs=1e-5)  # a new critic expects nothing
    assert surprises[2] < surprises[1] < surprises[0]


def test_a_loss_that_is_no_multiple_of_the_advantage(posttrain_run: Callable[..., Ran]) -> None:
    """All groups agree: the clip alone learns nothing from them, this one does."""
    line = '"my_reward:agreed" = 1.0'
    clip = posttrain_run("my_reward", name="clip", rewards=line)
    own = posttrain_run(
        "my_reward", "my_loss", name="own", rewards=line, rl='loss = "my_loss:hesitant"'
    )
    for ran in (clip, own):
        assert {r["rollout/groups_without_signal"] for r in ran.metrics} == {1.0}
        assert {row["advantage"] for row in ran.rows} == {0.0}
    assert {record["train/gradient_norm"] for record in clip.metrics} == {0.0}
    assert min(record["train/gradient_norm"] for record in own.metrics) > 0.01
    assert not same_weights(clip.model, own.model)


def test_an_engine_whose_weights_are_its_own_and_fresh(posttrain_run: Callable[..., Ran]) -> None:
    """It says what the learner says, step after step; one that is left behind does not."""
    files, rewards = ("my_engine", "my_reward"), '"my_reward:vowels" = 1.0'
    engine = 'engine = {{ name = "my_engine:make", fresh = {} }}'
    fresh = posttrain_run(*files, name="fresh", rewards=rewards, rl=engine.format("true"))
    module = sys.modules["my_engine"]
    (elsewhere,) = module.MADE
    assert elsewhere.closed
    assert elsewhere.version == 3
    assert max(record["mismatch/mean"] for record in fresh.metrics) < 1e-5
    # What it would say now is what the finished model says, and not what it began with.
    tokens = [*fresh.rows[0]["prompt_tokens"], *fresh.rows[0]["completion_tokens"]]
    finished = AutoModelForCausalLM.from_pretrained(fresh.model)
    said = module.logprobs(elsewhere.model, tokens)
    torch.testing.assert_close(said, module.logprobs(finished, tokens), rtol=0, atol=1e-5)
    begun = torch.tensor(fresh.rows[0]["sampler_logprobs"])
    assert (said[-len(begun) :] - begun).abs().max() > 1e-2
    stale = posttrain_run(*files, name="stale", rewards=rewards, rl=engine.format("false"))
    assert max(record["mismatch/mean"] for record in stale.metrics) > 1e-3


def places(row: dict[str, Any]) -> list[bool]:
    """The mask of a stored rollout: which tokens the policy chose."""
    return [known is not None for known in row["sampler_logprobs"]]


def test_an_environment_of_two_turns(posttrain_run: Callable[..., Ran]) -> None:
    """Its three tokens stand between two turns of the policy, and no loss has weight on them."""
    ran = posttrain_run(
        *("my_env", "my_loss"),
        task=f'{ARITHMETIC}\nenv = "my_env:AsksAgain"',
        rl='loss = { name = "my_loss:hesitant", strength = 0.0 }',
    )
    for row in ran.rows:
        mask = places(row)
        begin = mask.index(False)
        assert 1 <= begin <= 4
        assert mask[begin : begin + 3] == [False] * 3
        assert all(mask[:begin])
        assert all(mask[begin + 3 :])
        assert 1 <= len(mask[begin + 3 :]) <= 4
        assert row["length"] == sum(mask)
        assert row["reward"] == row["parts"]["env"]
        assert row["parts"]["numeric"] in (0.0, 1.0)  # monitored beside it
    assert len({row["reward"] for row in ran.rows}) > 1
    trained = sys.modules["my_loss"].SEEN
    stored = {tuple(row["prompt_tokens"] + row["completion_tokens"]): row for row in ran.rows}
    seen: list[Sequence[int]] = []
    for batch in trained:
        for tokens, mask, weights in zip(
            batch.tokens.tolist(), batch.mask.tolist(), batch.need("weights").tolist(), strict=True
        ):
            length = max(place for place, chosen in enumerate(mask) if chosen) + 1
            row = stored[tuple(tokens[:length])]
            expected = [False] * len(row["prompt_tokens"]) + places(row)
            assert mask[:length] == expected
            assert {w for w, chosen in zip(weights, mask, strict=True) if not chosen} <= {0.0}
            assert min(w for w, chosen in zip(weights, mask, strict=True) if chosen) > 0
            seen.append(tokens)
    assert len(seen) >= len(ran.rows)


def test_an_environment_that_breaks_costs_its_own_rollouts(
    posttrain_run: Callable[..., Ran],
) -> None:
    """They are invalid, with the reason, and the run goes on."""
    ran = posttrain_run(
        "my_env",
        task=f'{ARITHMETIC}\nenv = {{ name = "my_env:AsksAgain", breaks = true }}',
        rl="max_invalid = 1.0",
    )
    assert len(ran.metrics) == 3
    states = [row["state"] for row in ran.rows]
    assert {*states} == {"ok", "invalid"}
    for row in ran.rows:
        if row["state"] == "invalid":
            assert row["reason"].startswith("the environment raised RuntimeError: the tool is gone")
            assert row["advantage"] is None
    assert ran.metrics[0]["reward/invalid"] == states[:16].count("invalid") / 16
