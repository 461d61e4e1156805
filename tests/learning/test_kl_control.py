"""Steering by divergence: β finds its target, a batch is left in time, a penalty holds the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from loop_parts import FakeLearner, collected, plan
from small_model import small_model

from posttrain.algorithms.advantages import plain_return
from posttrain.algorithms.kl import Coefficient
from posttrain.build.algorithm import make_plan
from posttrain.config import recipe_from_dict, resolve
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models.critic import Critic
from posttrain.models.frozen import Reference
from posttrain.pipelines.plan import Plan
from posttrain.pipelines.rl import Step, train
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.types import Prompt, Rollout, Sampling, Score

TARGET, START = 0.5, 0.01
STEPS, LAST = 60, 30


class SmallTokens:
    """Rewards the share of tokens with a small number: the reference has no such taste."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        shares = [[token < 50 for token in r.tokens] for r in rollouts]
        return [Score(value=sum(share) / len(share)) for share in shares]


def learn(chosen: Plan, *, steps: int, rate: float = 1e-2) -> list[dict[str, float]]:
    """What the steps of the real loop measured."""
    model = small_model(dtype=torch.float32)
    engine = NativeEngine(model, end_tokens=(1,), decode=str)
    prompts = [Prompt(id=str(n), text="", tokens=(5 + n, 6, 7)) for n in range(4)]
    source = RolloutSource(
        engine,
        SmallTokens(),
        prompts=PromptCycle(prompts, seed=0),
        sampling=Sampling(max_new_tokens=2),
        prompts_per_step=4,
        group_size=16,
        seed=0,
    )
    critic = None
    if chosen.value_loss is not None:
        head = torch.nn.Linear(model.config.hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        critic = Critic(small_model(dtype=torch.float32).get_decoder(), head)
        critic = Trained(critic, adamw(critic, learning_rate=rate))
    learner = LocalLearner(
        model,
        adamw(model, learning_rate=rate),
        save=lambda folder: None,
        reference=Reference(),
        critic=critic,
    )
    found: list[dict[str, float]] = []
    train(
        source.steps(steps),
        learner,
        plan=chosen,
        sync=SharedWeights(engine),
        pad_token=0,
        seed=0,
        on_step=lambda report: found.append(dict(report.metrics())),
    )
    return found


def series(found: Sequence[dict[str, float]], name: str) -> list[float]:
    return [metrics[name] for metrics in found]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def divergence(kl: Coefficient) -> tuple[float, float]:
    """The mean KL of the last steps, and the last β; a batch is learned to the end (8 epochs)."""
    found = learn(plan(kl_placement="loss", kl=kl, epochs=8), steps=STEPS)
    return mean(series(found, "objective/kl")[-LAST:]), found[-1]["kl/coefficient"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kl",
    [
        Coefficient(value=START, rule="proportional", target=TARGET, horizon=64),
        Coefficient(value=START, rule="doubling", target=TARGET),
    ],
    ids=lambda kl: kl.rule,
)
def test_an_adaptive_coefficient_reaches_its_target(kl: Coefficient) -> None:
    """From a β that is far too small, within a fifth of the target over the last steps."""
    reached, coefficient = divergence(kl)
    assert abs(reached - TARGET) < 0.2 * TARGET
    assert coefficient > 3 * START


@pytest.mark.slow
def test_a_fixed_coefficient_does_not() -> None:
    """The same β, left alone, lets the policy go to a multiple of that."""
    reached, coefficient = divergence(Coefficient(value=START))
    assert reached > 3 * TARGET
    assert coefficient == START


@pytest.mark.parametrize("rule", ["proportional", "doubling"])
def test_the_coefficient_waits_while_only_the_critic_learns(rule: str) -> None:
    """A policy that stands still has divergence 0, which is no reason to let go of it."""
    kl = Coefficient(value=0.1, rule=rule, target=10.0, horizon=4)
    reports: list[Step] = []
    train(
        [collected(1.0, 0.0, 1.0, 0.0)] * 4,
        FakeLearner(),
        plan=plan(kl_placement="reward", kl=kl, critic_warmup=2, advantage=plain_return),
        sync=lambda version: None,
        pad_token=0,
        seed=0,
        on_step=reports.append,
    )
    below = 0.5 if rule == "doubling" else 0.8
    after = [report.state.kl.value for report in reports]
    assert after == pytest.approx([0.1, 0.1, 0.1 * below, 0.1 * below**2])


def test_the_coefficient_waits_where_every_score_is_broken() -> None:
    """Nothing was measured: β stays."""
    kl = Coefficient(value=0.1, rule="doubling", target=10.0)
    state = train(
        [collected(None, None)],
        FakeLearner(),
        plan=plan(kl_placement="loss", kl=kl),
        sync=lambda version: None,
        pad_token=0,
        seed=0,
        on_step=lambda report: None,
    )
    assert state.kl.value == 0.1


@pytest.mark.parametrize(("kl_stop", "fires"), [(0.001, True), (100.0, False)])
def test_a_batch_is_left_once_the_policy_has_moved(kl_stop: float, fires: bool) -> None:
    """8 epochs of 2 mini-batches, or fewer; the limit is passed by the last step, and just so."""
    found = learn(plan(epochs=8, minibatches=2, kl_stop=kl_stop), steps=6, rate=1e-3)
    taken, last = series(found, "train/optimiser_steps"), series(found, "policy/step_kl")
    if not fires:
        assert taken == [16.0] * 6
        return
    assert all(1 < steps < 16 for steps in taken)
    assert all(kl_stop < step_kl < 2 * kl_stop for step_kl in last)


@pytest.mark.slow
def test_the_penalty_follows_its_target() -> None:
    """It doubles after a step that went too far, halves after one that did not; and it holds."""
    target = 0.005
    rl = {"algorithm": "ppo_penalty", "penalty_target": target, "loss": {"coefficient": 0.01}}
    given = {"task": "sort", "rl": {**rl, "kl": {"placement": "none"}, "max_new_tokens": 2}}
    chosen = make_plan(resolve(recipe_from_dict(given)).rl)
    found = learn(chosen, steps=30)
    moved, penalties = series(found, "policy/step_kl"), series(found, "policy/penalty")
    assert penalties[0] == 0.01
    for step_kl, before, after in zip(moved, penalties, penalties[1:], strict=False):
        factor = 2.0 if step_kl > 1.5 * target else 0.5 if step_kl < target / 1.5 else 1.0
        assert after == before * factor
    free = learn(dataclasses.replace(chosen, penalty=None), steps=30)
    assert mean(series(free, "policy/step_kl")[-15:]) > 3 * target
    assert target / 2 < mean(moved[-15:]) < 2 * target
