"""``[rl.kl]``: what is given, what the row of the algorithm adds, and what has no effect."""

from typing import Any

import pytest
from config.fakes import refuses, resolved, rl

from posttrain.config import to_dict

pytestmark = pytest.mark.usefixtures("fake_tables")


@pytest.mark.parametrize(
    ("algorithm", "given", "expected"),
    [
        ("grpo", {}, {"placement": "loss", "coefficient": 0.04, "estimator": "k3"}),
        ("grpo", {"coefficient": 0.1}, {"placement": "loss", "coefficient": 0.1}),
        ("grpo", {"coefficient": 0}, {"placement": "none", "coefficient": 0.0, "estimator": None}),
        ("grpo", {"placement": "none"}, {"placement": "none", "coefficient": 0.0}),
        ("grpo", {"estimator": "k2", "direction": "forward"}, {"direction": "forward"}),
        (
            "grpo",
            {"placement": "reward", "coefficient": 0.1},
            {"placement": "reward", "estimator": "k1", "rule": "fixed"},
        ),
        ("rloo", {}, {"placement": "reward", "coefficient": 0.05, "estimator": "k1"}),
        ("rloo", {"placement": "loss", "coefficient": 0.1}, {"estimator": "k3"}),
        ("dapo", {"placement": "loss", "coefficient": 0.1}, {"estimator": "k3"}),
        ("dapo", {"coefficient": 0}, {"placement": "none"}),
        ("grpo", {"rule": "doubling", "target": 0.1}, {"rule": "doubling", "target": 0.1}),
        ("grpo", {"refresh_every": 50}, {"refresh_every": 50, "coefficient": 0.04}),
        ("grpo", {}, {"horizon": None, "dtype": "model", "offload": False}),
        ("grpo", {"dtype": "bfloat16", "offload": True}, {"dtype": "bfloat16", "offload": True}),
        ("grpo", {}, {"weighted": False}),
        ("grpo", {"weighted": True}, {"weighted": True, "estimator": "k3", "coefficient": 0.04}),
        ("rloo", {"weighted": False}, {"weighted": False}),
        ("dapo", {}, {"weighted": None}),
        ("grpo", {"rule": "proportional", "target": 6}, {"horizon": 10_000}),
        ("ppo", {"rule": "proportional", "target": 6, "horizon": 500}, {"horizon": 500}),
        ("grpo", {"rule": "doubling", "target": 6}, {"horizon": None}),
        ("dapo", {}, {"placement": "none", "horizon": None, "dtype": None, "offload": None}),
    ],
)
def test_kl_takes_what_is_given_and_the_rest_from_the_row(
    algorithm: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    kl = to_dict(resolved({"rl": {"algorithm": algorithm, "kl": given}}))["rl"]["kl"]
    assert {key: kl.get(key) for key in expected} == expected  # None: it has no effect


@pytest.mark.parametrize(
    ("algorithm", "given", "problem"),
    [
        (
            "grpo",
            {"placement": "none", "coefficient": 0.1, "target": 1},
            'rl.kl.coefficient, rl.kl.target: no effect, because rl.kl.placement is "none"; '
            'set it to "loss" or "reward", or drop them',
        ),
        (
            "rloo",
            {"weighted": True},
            "rl.kl.weighted: no effect in the reward, which is found before π moves: ρ is 1; "
            'drop it, or set rl.kl.placement to "loss"',
        ),
        (
            "dapo",
            {"weighted": True},
            "rl.kl.weighted: no effect, because algorithm 'dapo' has no KL; "
            'set rl.kl.placement to "loss" or "reward", or drop it',
        ),
        (
            "dapo",
            {"coefficient": 0.1},
            "rl.kl.coefficient: no effect, because algorithm 'dapo' has no KL; "
            'set rl.kl.placement to "loss" or "reward", or drop it',
        ),
        (
            "grpo",
            {"coefficient": 0, "estimator": "k2"},
            "rl.kl.estimator: no effect, because rl.kl.coefficient is 0; "
            "set a coefficient above 0, or drop it",
        ),
        (
            "dapo",
            {"placement": "loss"},
            "rl.kl.coefficient: placement 'loss' needs a coefficient above 0 (0.04, say); "
            'to do without a reference model, set rl.kl.placement to "none"',
        ),
        (
            "grpo",
            {"placement": "loss", "coefficient": 0},
            "rl.kl.coefficient: placement 'loss' needs a coefficient above 0 (0.04, say); "
            'to do without a reference model, set rl.kl.placement to "none"',
        ),
        (
            "grpo",
            {"target": 0.1},
            "rl.kl.target: a fixed coefficient follows no target; "
            'set rl.kl.rule to "proportional" or "doubling", or drop the target',
        ),
        (
            "grpo",
            {"rule": "doubling"},
            "rl.kl.target: rule 'doubling' needs the divergence to steer to, in nats",
        ),
        (
            "grpo",
            {"rule": "proportional", "horizon": 500},
            "rl.kl.target: rule 'proportional' needs the divergence to steer to, in nats",
        ),
        (
            "grpo",
            {"horizon": 500},
            "rl.kl.horizon: no effect with rule 'fixed'; "
            'drop it, or set rl.kl.rule to "proportional"',
        ),
        (
            "grpo",
            {"rule": "doubling", "target": 6, "horizon": 500},
            "rl.kl.horizon: no effect with rule 'doubling'; "
            'drop it, or set rl.kl.rule to "proportional"',
        ),
        (
            "dapo",
            {"horizon": 500, "dtype": "bfloat16", "offload": True},
            "rl.kl.horizon, rl.kl.dtype, rl.kl.offload: no effect, because algorithm 'dapo' has no "
            'KL; set rl.kl.placement to "loss" or "reward", or drop them',
        ),
        (
            "grpo",
            {"coefficient": 0, "offload": False},
            "rl.kl.offload: no effect, because rl.kl.coefficient is 0; "
            "set a coefficient above 0, or drop it",
        ),
    ],
)
def test_kl_without_effect_or_incomplete_is_refused(
    algorithm: str, given: dict[str, Any], problem: str
) -> None:
    with refuses(problem):
        rl(algorithm=algorithm, kl=given)
