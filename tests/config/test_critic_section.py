"""``[rl.critic]`` and ``rl.penalty_target``: defaults, what asks for them, and what does not."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest
from config.fakes import read, refuses, resolved, rl

from posttrain.algorithms.table import ALGORITHMS
from posttrain.config import CriticSection, recipe_from_dict, render_dry_run, resolve, to_dict

pytestmark = pytest.mark.usefixtures("fake_tables")

OWN_ADVANTAGE = "posttrain.algorithms.advantages:gae"  # any function by module and name
CLIPPED = {"name": "clipped", "clip": 0.2}
PPO_CRITIC = {
    "kind": "separate",
    "source": "policy",
    "learning_rate": 1e-5,
    "warmup_steps": 0,
    "loss": CLIPPED,
    "coefficient": 1.0,
}


def critic(**values: Any) -> CriticSection:
    """The resolved critic of ppo."""
    found = rl(algorithm="ppo", critic=values).critic
    assert isinstance(found, CriticSection)
    return found


@pytest.mark.parametrize("name", ["ppo", "ppo_penalty"])
def test_ppo_brings_a_critic_of_its_own(name: str) -> None:
    section = to_dict(resolved({"rl": {"algorithm": name}}))["rl"]
    assert section["critic"] == PPO_CRITIC
    assert section["advantage"]["name"] == "gae"
    assert (section["group_size"], section["epochs"]) == (1, 4)


def test_the_critic_learns_ten_times_as_fast_unless_told() -> None:
    assert rl(algorithm="ppo", learning_rate=3e-4).critic.learning_rate == 3e-3
    assert rl(algorithm="ppo", learning_rate=1e-6).critic.learning_rate == 1e-5  # to the last bit
    told = rl(algorithm="ppo", learning_rate=3e-4, critic={"learning_rate": 1e-3})
    assert told.critic.learning_rate == 1e-3


def test_the_value_loss_is_the_rows_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert critic(loss={"clip": 0.5}).loss == {"name": "clipped", "clip": 0.5}
    assert critic(loss="huber").loss == {"name": "huber", "delta": 1.0}
    assert critic(loss="squared").loss == {"name": "squared"}
    assert rl(algorithm="grpo", advantage="gae").critic.loss == CLIPPED  # a row without one
    with refuses(
        "rl.critic.loss: unknown name 'square'; did you mean 'squared'? "
        "Known: clipped, huber, squared"
    ):
        critic(loss="square")
    with refuses(
        "rl.critic.loss 'clipped': unknown option 'clip_low'; did you mean 'clip'? Known: clip"
    ):
        critic(loss={"clip_low": 0.1})
    row = replace(ALGORITHMS["ppo"], value_loss={"name": "huber", "delta": 3.0})
    monkeypatch.setitem(ALGORITHMS, "ppo", row)
    assert critic().loss == {"name": "huber", "delta": 3.0}


def test_a_shared_critic_has_no_source() -> None:
    given = {"kind": "shared", "learning_rate": 1e-4, "warmup_steps": 3, "coefficient": 0.1}
    shared = critic(**given)
    recipe = resolved({"rl": {"algorithm": "ppo", "critic": given}})
    assert "source" not in to_dict(recipe)["rl"]["critic"]
    assert (shared.learning_rate, shared.warmup_steps, shared.coefficient) == (1e-4, 3, 0.1)
    assert critic(source="policy").source == "policy"
    assert critic(source="judge").source == "judge"
    with refuses(
        "rl.critic.source: a shared critic is a head on the policy's trunk; drop it, or set "
        'rl.critic.kind to "separate"'
    ):
        critic(kind="shared", source="policy")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"critic": {}}, "group_normalised"),
        ({"algorithm": "reinforce_pp", "critic": {"kind": "shared"}}, "batch_whitened"),
        ({"algorithm": "ppo", "advantage": "return_to_go", "critic": {}}, "return_to_go"),
    ],
)
def test_an_advantage_without_values_has_no_critic(values: dict[str, Any], name: str) -> None:
    with refuses(
        f"rl.critic: no effect, because the advantage {name!r} asks for no values; drop it, or "
        "set rl.advantage to gae (the algorithm ppo does)"
    ):
        rl(**values)
    values = {key: value for key, value in values.items() if key != "critic"}
    assert rl(**values).critic is None


def test_an_advantage_of_the_user_has_a_critic_where_it_asks_for_values() -> None:
    for algorithm in ("grpo", "ppo"):
        section = rl(algorithm=algorithm, advantage=OWN_ADVANTAGE)
        assert section.critic.model_dump() == PPO_CRITIC
    assert rl(advantage=OWN_ADVANTAGE.replace(":gae", ":group_centred")).critic is None
    section = rl(advantage=OWN_ADVANTAGE, critic={"warmup_steps": 2})
    assert section.critic.model_dump() == {**PPO_CRITIC, "warmup_steps": 2}


@pytest.mark.parametrize(
    ("values", "target"),
    [
        ({"algorithm": "ppo_penalty"}, 0.01),
        ({"algorithm": "ppo_penalty", "penalty_target": 0.5}, 0.5),
        ({"algorithm": "ppo_penalty", "loss": {"coefficient": 0.5}}, 0.01),
        ({"algorithm": "ppo_penalty", "loss": "clipped"}, None),
        ({"algorithm": "ppo", "loss": "penalised", "penalty_target": 0.5}, 0.5),
        # its coefficient stays as it is
        ({"loss": "penalised"}, None),
        ({"loss": {"name": "penalised", "coefficient": 0}}, None),
        ({"algorithm": "ppo"}, None),
    ],
)
def test_the_penalty_is_steered_where_the_loss_has_one(
    values: dict[str, Any], target: float | None
) -> None:
    assert rl(**values).penalty_target == target


def test_a_penalty_that_cannot_be_steered_is_refused() -> None:
    nothing = (
        "rl.penalty_target: the loss 'clipped' has no penalty; drop it, or set rl.loss to "
        "penalised (the algorithm ppo_penalty does)"
    )
    with refuses(nothing):
        rl(algorithm="ppo", penalty_target=0.01)
    for values in (
        {"algorithm": "ppo_penalty", "loss": {"coefficient": 0}},
        {"loss": {"name": "penalised", "coefficient": 0.0}, "penalty_target": 0.5},
    ):
        with refuses(
            "rl.loss.coefficient: 0 stays 0 when it is doubled or halved towards "
            "rl.penalty_target; set it above 0"
        ):
            rl(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "ppo"},
        {"algorithm": "ppo", "critic": {"kind": "shared", "loss": "huber"}},
        {"algorithm": "ppo", "kl": {"rule": "proportional", "target": 6.0, "offload": True}},
        {"algorithm": "ppo_penalty", "penalty_target": 0.5, "whiten_rewards": True},
        {"advantage": OWN_ADVANTAGE, "critic": {"loss": "squared"}},
    ],
)
def test_a_recipe_with_a_critic_reads_back_as_it_was_resolved(values: dict[str, Any]) -> None:
    once = resolved({"rl": values})
    assert resolve(once) == once
    text = render_dry_run(read({"rl": values}))
    assert dict(resolve(recipe_from_dict(tomllib.loads(text)))) == dict(once)


def test_the_dry_run_of_ppo_shows_critic_and_penalty() -> None:
    lines = render_dry_run(read({"rl": {"algorithm": "ppo_penalty"}})).splitlines()
    assert (
        'critic = { kind = "separate", source = "policy", learning_rate = 1e-05, warmup_steps = 0, '
        'loss = { name = "clipped", clip = 0.2 }, coefficient = 1.0 }'
    ) in lines
    assert "penalty_target = 0.01" in lines
    assert 'loss = { name = "penalised", coefficient = 1.0 }' in lines
    assert "# rl      optimiser steps per batch             4  4 epochs × 1 minibatch" in lines
