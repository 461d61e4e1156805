"""Settings that can be run and can hardly be meant are said, and those of our recipes are not."""

import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import cautions, read_recipe, recipe_from_dict, resolve
from posttrain.config.describe import find_field, tables
from posttrain.config.usual import USUAL

ROOT = Path(__file__).parents[2]
SMALL = {"name": "tiny", "options": {"hidden_size": 32, "num_layers": 1, "max_positions": 64}}
BASE: dict[str, Any] = {
    "model": SMALL,
    "task": {"name": "arithmetic", "digits": 1, "num_train": 40, "num_test": 10},
    "rewards": {"numeric": {"extract": "whole"}},
    "sft": {},
    "rl": {"max_new_tokens": 4, "steps": 20},
    "eval": {},
}
KL = {"--rl.kl.placement": "loss"}
PPO = {"--rl.algorithm": "ppo"}

# (what is given on the command line, the key that is said to be far from usual)
ABSURD: list[tuple[dict[str, str], str]] = [
    ({**KL, "--rl.kl.coefficient": "1e6"}, "rl.kl.coefficient"),
    ({"--rl.weight_decay": "1000"}, "rl.weight_decay"),
    ({"--sft.weight_decay": "50"}, "sft.weight_decay"),
    ({"--rl.loss.clip_low": "0", "--rl.loss.clip_high": "0"}, "rl.loss.clip_low"),
    ({"--rl.loss.clip_high": "1000"}, "rl.loss.clip_high"),
    ({"--rl.max_gradient_norm": "1e-9"}, "rl.max_gradient_norm"),
    ({"--sft.max_gradient_norm": "1e-9"}, "sft.max_gradient_norm"),
    ({"--rl.temperature": "1e-6"}, "rl.temperature"),
    ({"--rl.temperature": "50"}, "rl.temperature"),
    ({"--eval.samples": "4", "--eval.temperature": "50"}, "eval.temperature"),
    ({"--rl.learning_rate": "1"}, "rl.learning_rate"),
    ({"--sft.learning_rate": "1e-12"}, "sft.learning_rate"),
    ({**PPO, "--rl.critic.learning_rate": "3"}, "rl.critic.learning_rate"),
    ({**PPO, "--rl.critic.coefficient": "1e6"}, "rl.critic.coefficient"),
    ({**PPO, "--rl.advantage.gamma": "0.01"}, "rl.advantage.gamma"),
    ({"--rl.top_p": "0.001"}, "rl.top_p"),
    ({"--rl.entropy_coefficient": "100"}, "rl.entropy_coefficient"),
    ({"--rl.epochs": "5000"}, "rl.epochs"),
    ({"--rl.group_size": "8192"}, "rl.group_size"),
    ({"--rl.max_invalid": "1"}, "rl.max_invalid"),
    ({"--rl.missing_end_penalty": "1e5"}, "rl.missing_end_penalty"),
    ({"--rewards.numeric.weight": "1e9"}, "rewards.numeric.weight"),
    ({"--rewards.numeric.weight": "-1e9"}, "rewards.numeric.weight"),
    ({"--grading.seconds": "1e-4"}, "grading.seconds"),
    ({"--grading.memory_mb": "1"}, "grading.memory_mb"),
    ({"--run.save_minutes": "1e6"}, "run.save_minutes"),
]

# (what is given, the message that refuses it, with what is allowed)
REFUSED: list[tuple[dict[str, str], str]] = [
    ({**KL, "--rl.kl.coefficient": "-1"}, "rl.kl.coefficient: must be a number of at least 0"),
    ({"--rl.loss.clip_low": "-0.2"}, r"rl.loss.clip_low: must be >= 0 and <= 1, got -0.2"),
    ({"--rl.loss.clip_low": "1.5"}, r"rl.loss.clip_low: must be >= 0 and <= 1, got 1.5"),
    ({"--rl.loss.clip_high": "-1"}, "rl.loss.clip_high: must be >= 0, got -1"),
    ({"--rl.weight_decay": "-1"}, "rl.weight_decay: must be a number of at least 0"),
    (
        {"--sft.weight_decay": "1000", "--sft.learning_rate": "0.01"},
        r"sft.weight_decay: 1000 × .* takes 10 of every weight off .*; set it below 100",
    ),
    ({"--rl.max_gradient_norm": "0"}, "rl.max_gradient_norm: must be a number above 0"),
    ({"--rl.learning_rate": "0"}, "rl.learning_rate: must be a number above 0"),
    ({"--rl.temperature": "-1"}, "rl.temperature: must be a number of at least 0"),
    ({"--rl.temperature": "0"}, "rl.temperature: 0 is greedy"),
    ({"--run.seed": "-1"}, "run.seed: must be a whole number of at least 0"),
    ({"--run.save_minutes": "-1"}, "run.save_minutes: must be a number of at least 0"),
    ({"--rl.save_every": "-1"}, "rl.save_every: must be a whole number of at least 0"),
    ({"--rl.group_size": "1"}, "rl.group_size: 1, but advantage"),
    ({"--rl.minibatches": "7"}, "rl.minibatches: 7 does not divide"),
    ({"--rewards.numeric.weight": "0"}, "rewards: every weight is 0"),
    ({"--rl.steps": "0"}, "rl.steps: must be a whole number of at least 1"),
    ({"--eval.problems": "0"}, "eval.problems: must be a whole number of at least 1"),
    ({"--sft.warmup_steps": "99", "--sft.num_demonstrations": "32"}, "sft.warmup_steps: 99, but"),
]


def given(changes: dict[str, str]) -> list[str]:
    return [word for pair in changes.items() for word in pair]


@pytest.mark.parametrize(("changes", "key"), ABSURD)
def test_what_can_hardly_be_meant_is_said(changes: dict[str, str], key: str) -> None:
    found = cautions(resolve(recipe_from_dict(BASE, overrides=given(changes))))
    told = [caution for caution in found if caution.startswith(f"{key}: ")]
    assert len(told) == 1, found
    low_or_both = r"(to \S+ or more|from \S+ to \S+)"
    assert re.search(rf"is far from usual: \w.*; set it {low_or_both}$", told[0])


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_can_only_be_a_mistake_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(recipe_from_dict(BASE, overrides=given(changes)))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_no_recipe_of_ours_is_unusual(path: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.touch()
    data = ["--reward.data", str(pairs)] if "verifier" in path.name else []
    assert cautions(resolve(read_recipe(path, data))) == []


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "dapo", "gspo", "gmpo", "cispo"])
def test_the_defaults_are_usual(algorithm: str) -> None:
    overrides = ["--rl.algorithm", algorithm]
    assert cautions(resolve(recipe_from_dict(BASE, overrides=overrides))) == []


def test_an_option_of_an_own_piece_may_mean_another_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def mine(batch, *, gamma: float = 0.0):\n    return batch.replace(advantages=None)\n"
    (tmp_path / "own_usual.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["--rl.advantage", "own_usual:mine"]
    assert cautions(resolve(recipe_from_dict(BASE, overrides=overrides))) == []


def test_every_range_is_of_a_setting_that_there_is() -> None:
    keys = {key for _, table in tables() for key in table.model_fields}
    options = {"clip_low", "clip_high", "clip", "gamma", "weight"}
    for key in USUAL:
        found, _ = find_field(key.split("."))
        assert found == key or key in keys or key in options, key
