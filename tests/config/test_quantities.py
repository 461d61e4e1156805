"""A recipe shown: dict, TOML, what changed, and the batch arithmetic."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from config.fakes import read, resolved
from hypothesis import given
from hypothesis import strategies as st
from small_runs import taught

from posttrain.algorithms.table import ALGORITHMS
from posttrain.config import (
    ConfigError,
    arithmetic,
    changed_keys,
    read_recipe,
    recipe_from_dict,
    render_dry_run,
    resolve,
    to_dict,
    to_toml,
)
from posttrain.config.toml import value_text, write_toml

pytestmark = pytest.mark.usefixtures("fake_tables")

WHOLE: dict[str, Any] = {
    "sft": {"num_demonstrations": 100, "batch_size": 32, "epochs": 3, "wrong_share": 0.25},
    "rl": {
        "algorithm": "dapo",
        "steps": 10,
        "prompts_per_step": 6,
        "group_size": 4,
        "epochs": 2,
        "minibatches": 3,
        "max_new_tokens": 100,
        "micro_batch_tokens": 4096,
        "max_resamples": 4,
    },
    "rewards": {"numeric": 1, "brief": {"weight": 0.5, "target": 10}},
    "prefer": {"samples": 4, "repeats": 3, "num_prompts": 50},
    "reward": {"batch_size": 16, "micro_batch_tokens": 1024},
    "eval": {"problems": 50, "samples": 8},
}


def test_the_arithmetic_is_right() -> None:
    found = {(row.stage, row.name): (row.value, row.how) for row in arithmetic(resolved(WHOLE))}
    assert found == {
        ("sft", "sequences per optimiser step"): (32, "batch_size"),
        # ⌈100 ÷ 32⌉ = 4 optimiser steps an epoch
        ("sft", "optimiser steps in all"): (12, "3 epochs × 100 demonstrations ÷ 32, rounded up"),
        ("prefer", "completions per prompt"): (12, "4 samples × 3 repeats"),
        ("prefer", "train completions, at most"): (600, "50 prompts × 12"),
        ("reward", "pairs or sets per optimiser step"): (16, "batch_size"),
        ("reward", "tokens per forward pass"): (1024, "memory and speed, not the result"),
        ("rl", "rollouts per step"): (24, "6 prompts × 4 completions"),
        ("rl", "sampled per step, at most"): (120, "24 rollouts × (1 + 4 resamples)"),
        ("rl", "new tokens per step, at most"): (12_000, "120 sampled × 100 tokens"),
        ("rl", "optimiser steps per batch"): (6, "2 epochs × 3 minibatches"),
        ("rl", "sequences per optimiser step"): (8, "24 rollouts ÷ 3 minibatches"),
        ("rl", "rollouts in all"): (240, "10 steps × 24 rollouts"),
        ("rl", "sampled in all, at most"): (1200, "10 steps × 120 sampled"),
        ("rl", "optimiser steps in all"): (60, "10 steps × 6 per batch"),
        ("rl", "tokens per forward pass"): (4096, "memory and speed, not the result"),
        ("eval", "completions, at most"): (450, "50 problems × (1 greedy + 8 samples)"),
    }


def test_every_row_of_what_is_sampled_counts_what_dynamic_sampling_draws_again() -> None:
    """4 prompts × 2, up to three times over; without it nothing is drawn that is not learned."""
    rl = {"steps": 10, "prompts_per_step": 4, "group_size": 2, "max_new_tokens": 10}
    drawn = {**rl, "dynamic_sampling": True, "max_resamples": 2}
    rows = {row.name: row.value for row in arithmetic(resolved({"rl": drawn}), num_prompts=20)}
    assert rows["rollouts per step"] == 8
    assert rows["sampled per step, at most"] == 24
    assert rows["new tokens per step, at most"] == 240
    assert rows["sequences per optimiser step"] == 8
    assert rows["rollouts in all"] == 80
    assert rows["sampled in all, at most"] == 240
    assert rows["passes over the prompts, at least"] == 2.0
    assert rows["passes over the prompts, at most"] == 6.0
    rows = {row.name: row.value for row in arithmetic(resolved({"rl": rl}), num_prompts=20)}
    assert not [name for name in rows if name.startswith("sampled")]
    assert rows["new tokens per step, at most"] == 80
    assert rows["passes over the prompts"] == 2.0


def test_with_an_environment_tokens_are_counted_for_one_turn_and_said_to_be() -> None:
    """How many turns there will be, only the environment knows."""
    task = {"name": "sums", "env": {"name": "scripted", "replies": ["again"]}}
    rl = {"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 10}
    found = {row.name: row.value for row in arithmetic(resolved({"task": task, "rl": rl}))}
    assert found["new tokens per step and turn, at most"] == 60
    assert "new tokens per step, at most" not in found


def test_auto_has_no_number_before_the_model_is_there_and_stays_auto() -> None:
    """The resolved recipe is what a run is recognised by: a measured number must not be in it."""
    recipe = resolved({"sft": {}, "reward": {}, "rl": {}, "prefer": {}})
    assert "tokens per forward pass" not in {row.name for row in arithmetic(recipe)}
    values = to_dict(recipe)
    assert {values[name]["micro_batch_tokens"] for name in ("sft", "reward", "rl")} == {"auto"}
    with pytest.raises(ConfigError, match='must be a whole number of at least 1 or "auto", got 0'):
        read({"rl": {"micro_batch_tokens": 0}})


def test_the_arithmetic_holds_the_stages_that_run_in_their_order() -> None:
    recipe = resolved({**WHOLE, "run": {"stages": ["eval", "rl"]}})
    assert list(dict.fromkeys(row.stage for row in arithmetic(recipe))) == ["eval", "rl"]
    one = arithmetic(resolved({"rl": {"epochs": 1, "minibatches": 1}}))
    assert "1 epoch × 1 minibatch" in [row.how for row in one]
    every_prompt = arithmetic(resolved({"prefer": {}}))
    assert every_prompt == [("prefer", "completions per prompt", 2, "2 samples × 1 repeat")]


def test_a_dict_of_a_recipe_is_plain_and_reads_back() -> None:
    for recipe in (read(WHOLE), resolved(WHOLE)):
        values = to_dict(recipe)
        assert json.loads(json.dumps(values)) == values
        assert to_dict(recipe_from_dict(values)) == values
        assert tomllib.loads(to_toml(recipe)) == values
    assert "rewards" not in to_dict(read())
    assert "rl" not in to_dict(read())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_dry_run_is_itself_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = resolved({**WHOLE, "rl": {"algorithm": name, "top_p": 0.9}, **taught(name)})
    path = tmp_path / "again.toml"
    path.write_text(render_dry_run(recipe), encoding="utf-8")
    assert to_dict(resolve(read_recipe(path))) == to_dict(recipe)


def test_a_dry_run_shows_arithmetic_cautions_and_what_auto_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('task = "sums"\n[rl]\nalgorithm = "reinforce"\nepochs = 2\n')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = render_dry_run(read_recipe(path)).splitlines()
    assert lines[0] == f"# Resolved from {path}."
    assert "# rl      rollouts per step                    16  16 prompts × 1 completion" in lines
    assert (
        lines.count(
            "# Caution: rl.loss: 'naive' is right for the first optimiser step of a "
            "batch, and there are 2; set rl.loss to unclipped or clipped, or take one step"
        )
        == 1
    )
    assert 'device = "auto"  # cpu on this machine' in lines
    assert 'compute = "auto"  # float32' in lines
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = render_dry_run(read_recipe(path)).splitlines()
    assert 'device = "auto"  # cuda on this machine' in lines
    assert 'compute = "auto"  # bfloat16' in lines
    lines = render_dry_run(read_recipe(path, ["--run.device=cpu"])).splitlines()
    assert 'device = "cpu"' in lines
    assert 'compute = "auto"  # float32' in lines


def test_a_dry_run_of_parts_given_as_objects() -> None:
    text = render_dry_run(recipe_from_dict({"rl": {}}), supplied=("task", "engine"))
    assert "task" not in tomllib.loads(text)


def test_changed_keys_are_dotted_and_hold_both_values() -> None:
    first = resolved({"rl": {"steps": 5}})
    second = resolved({"rl": {"steps": 6, "loss": "naive"}, "rewards": {"numeric": 1}})
    assert changed_keys(first, first) == {}
    assert changed_keys(first, second) == {
        "rl.steps": (5, 6),
        "rl.loss.name": ("clipped", "naive"),
        "rl.loss.clip_low": (0.2, None),
        "rl.loss.clip_high": (0.2, None),
        "rewards.numeric.weight": (None, 1.0),
        "rewards.numeric.tolerance": (None, 0.0),
    }


KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_toml_reads_back_as_it_was_written(values: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(values)) == values


@given(SCALARS)
def test_a_scalar_keeps_its_type(value: Any) -> None:
    back = tomllib.loads(f"value = {value_text(value)}")["value"]
    assert type(back) is type(value)


def test_toml_leaves_none_out_and_refuses_what_it_cannot_hold() -> None:
    assert tomllib.loads(write_toml({"a": None, "b": {"c": None, "d": {"e": None}}})) == {
        "b": {"d": {}}
    }
    with pytest.raises(ValueError, match="TOML has no value for"):
        write_toml({"a": [None]})
    text = write_toml({"a": 1, "b": {"c": 2}}, comments={"a": "one", "b.c": "two"})
    assert text == "a = 1  # one\n\n[b]\nc = 2  # two\n"
