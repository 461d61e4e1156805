"""``[prefer]``, ``[reward]`` and the reward ``model``: what ``resolve`` fills in and refuses."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from config.fakes import read, refuses, resolved

from posttrain.config import (
    PreferSection,
    RewardSection,
    recipe_from_dict,
    render_dry_run,
    resolve,
    to_dict,
    to_toml,
)

pytestmark = pytest.mark.usefixtures("fake_tables")

MODEL = {
    "path": "reward",
    "normalise": True,
    "dtype": "float32",
    "offload": False,
    "micro_batch_tokens": 8192,
}


def prefer(values: dict[str, Any]) -> PreferSection:
    found = resolved(values).prefer
    assert found is not None
    return found


def reward(values: dict[str, Any]) -> RewardSection:
    found = resolved(values).reward
    assert found is not None
    return found


def test_prefer_takes_its_limit_from_rl() -> None:
    assert prefer({"prefer": {}}).max_new_tokens == 256
    assert prefer({"prefer": {}, "rl": {"max_new_tokens": 32}}).max_new_tokens == 32
    own = {"prefer": {"max_new_tokens": 9}, "rl": {"max_new_tokens": 32}}
    assert prefer(own).max_new_tokens == 9


def test_prefer_has_rewards_of_its_own_else_those_of_the_task() -> None:
    values = {"rewards": {"brief": {"target": 5}}, "prefer": {"rewards": {"numeric": 2}}}
    assert prefer(values).rewards == {"numeric": {"weight": 2.0, "tolerance": 0.0}}
    assert prefer({"rewards": {"brief": {"target": 5}}, "prefer": {}}).rewards == {}
    judge = {"model": {"path": "judge", "normalise": False}}
    expected = {"weight": 1.0, **MODEL, "path": "judge", "normalise": False}
    assert prefer({"prefer": {"rewards": judge}}).rewards == {"model": expected}


def test_rewards_of_the_annotator_are_checked_under_their_own_name() -> None:
    with refuses(
        "rewards: unknown name 'numerc'; did you mean 'numeric'? Known: brief, model, numeric",
        "prefer.rewards: unknown name 'numerc'; did you mean 'numeric'? "
        "Known: brief, model, numeric",
        "prefer.rewards 'brief': option 'target' is required",
        "prefer.rewards 'model': unknown option 'folder'; "
        "known: dtype, micro_batch_tokens, normalise, offload, path; "
        "folder is a key of [run]",
    ):
        resolved(
            {
                "rewards": {"numerc": 1},
                "prefer": {"rewards": {"numerc": 1, "brief": 1, "model": {"folder": "judge"}}},
                "rl": {},
            }
        )


def test_the_reward_model_is_a_weight_or_a_table() -> None:
    stages: dict[str, Any] = {"prefer": {}, "reward": {}, "rl": {}}
    number = resolved({"rewards": {"model": 2}, **stages})
    assert number.rewards == {"model": {"weight": 2.0, **MODEL}}
    table = resolved({"rewards": {"model": {"path": "judge", "offload": True}}, "rl": {}})
    assert table.rewards == {"model": {"weight": 1.0, **MODEL, "path": "judge", "offload": True}}
    over = resolved({"rewards": {"model": 2}, "rl": {}}, "--rewards.model.path", "judge")
    assert over.rewards == {"model": {"weight": 2.0, **MODEL, "path": "judge"}}
    with refuses("rewards 'model': option 'normalise' must be bool, got 'yes'"):
        resolved({"rewards": {"model": {"path": "judge", "normalise": "yes"}}, "rl": {}})


def test_a_share_is_held_out_of_a_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pairs.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("")
    assert reward({"prefer": {}, "reward": {}}).test_share is None
    assert reward({"reward": {"data": "pairs.jsonl"}}).test_share == 0.1
    assert reward({"reward": {"data": "pairs.jsonl", "test_share": 0.3}}).test_share == 0.3
    both = {"reward": {"data": "pairs.jsonl", "test_data": "test.jsonl"}}
    assert reward(both).test_share is None


def test_a_reward_model_from_a_file_needs_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("")
    alone = {"reward": {"data": "pairs.jsonl"}}
    assert resolve(recipe_from_dict(alone)).task is None
    with refuses(
        'task: missing, but required by rl: write [task] with name = "..."; from Python, '
        "give prompts=… or task=…"
    ):
        resolve(recipe_from_dict({**alone, "rl": {}}))


def test_sections_that_are_not_there_are_filled_for_stages_that_are_named() -> None:
    recipe = resolved({"run": {"stages": ["prefer", "reward"]}})
    written = {"prefer": {}, "reward": {}, "run": {"stages": ["prefer", "reward"]}}
    assert dict(recipe) == dict(resolved(written))
    left = {"prefer": {"rewards": {"no such": 1}}, "reward": {"data": "none"}, "eval": {}}
    kept = resolved({**left, "run": {"stages": ["eval"]}}).written
    assert (kept.prefer, kept.reward) == (read(left).prefer, read(left).reward)


@pytest.mark.parametrize(
    "values",
    [
        {"prefer": {"ranked": True, "samples": 4, "error_rate": 0.1}, "reward": {"epochs": 2}},
        {
            "prefer": {"rewards": {"numeric": 1, "brief": {"weight": -0.5, "target": 9}}},
            "reward": {"margins": False, "backbone": "judge"},
            "rewards": {"model": 1, "brief": {"weight": 0.1, "target": 9}},
            "rl": {"algorithm": "ppo", "critic": {"source": "reward"}},
            "eval": {},
        },
    ],
)
def test_preferences_read_back_as_they_were_resolved(values: dict[str, Any]) -> None:
    once = resolved(values)
    assert resolve(once) == once
    assert tomllib.loads(to_toml(once)) == to_dict(once)
    text = render_dry_run(read(values))
    assert dict(resolve(recipe_from_dict(tomllib.loads(text)))) == dict(once)


def test_a_dry_run_shows_what_preferences_take() -> None:
    given = {"prefer": {"num_prompts": 1000}, "reward": {"micro_batch_tokens": 8192}}
    lines = render_dry_run(read(given)).splitlines()
    assert lines[:5] == [
        "# Resolved.",
        "# prefer  completions per prompt                    2  2 samples × 1 repeat",
        "# prefer  train completions, at most            2,000  1000 prompts × 2",
        "# reward  pairs or sets per optimiser step         64  batch_size",
        "# reward  tokens per forward pass               8,192  memory and speed, not the result",
    ]


def test_a_loss_by_the_name_of_a_peer() -> None:
    with pytest.raises(ValueError, match=r'dpo\.loss: .*"sigmoid"; did you mean "dpo"\?'):
        recipe_from_dict({"dpo": {"loss": "sigmoid"}})
