"""Policy losses from the recipe through the learner to the weights: a user's own, and new ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import recipe, small_run
from torch import Tensor, nn

from posttrain.build.algorithm import make_plan
from posttrain.config import recipe_from_dict, resolve
from posttrain.learn.learner import LocalLearner
from posttrain.pipelines.plan import Plan, State
from posttrain.pipelines.rl import optimise
from posttrain.protocols import Outputs
from posttrain.types import Batch

MODULE = '''
import torch
from posttrain.algorithms.losses import clipped
from posttrain.algorithms.pieces import piece
from posttrain.types import Terms

def clip_and_square(logprobs, batch, *, strength: float = 0.1):
    """PPO's clip, and a pull back to the old policy wherever a token has gone."""
    square = (logprobs - batch.need("old_logprobs")).square()
    return Terms(loss=clipped(logprobs, batch).loss + strength * square * batch.active)

@piece(zero_with_advantage=True)
def said_to_be_zero(logprobs, batch, *, strength: float = 0.1):
    """The same, with a claim that is not true of it."""
    return clip_and_square(logprobs, batch, strength=strength)

def centred_for(batch, *, scale: float):
    middle = float(batch.need("old_logprobs")[batch.active].mean())
    def loss(logprobs, part):
        return Terms(loss=scale * (logprobs - middle).square() * part.active)
    return loss

@piece(whole_batch=centred_for)
def centred(logprobs, batch, *, scale: float = 1.0):
    """Knows the mean log-prob of the whole batch."""
    return centred_for(batch, scale=scale)(logprobs, batch)
'''
MOVES = [0.5, -0.5, 0.3, -0.2]  # log ρ of four sequences of one token


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_losses.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


class Table(nn.Module):
    """A policy that is its four log-probs."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs = nn.Parameter(torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64))


def answer(model: nn.Module, batch: Batch) -> Outputs:
    assert isinstance(model, Table)
    return Outputs(logprobs=model.logprobs[batch.tokens])


def plan_of(loss: object, **rl: object) -> Plan:
    """A plan as a recipe makes it: GRPO without a reference, every token alike."""
    given = {"kl": {"placement": "none"}, "weights": "token_mean", "loss": loss, **rl}
    read = recipe_from_dict(
        {"rl": {"group_size": 2, "prompts_per_step": 2, **given}, "task": "sort"}
    )
    return make_plan(resolve(read).rl)


def gradient_of(plan: Plan, *, micro_batch_tokens: int = 1) -> Tensor:
    """What one optimiser step of the loop learns by: with plain descent at rate 1, minus the move.

    The first group has no signal, as both got the same reward; the second has advantages ±√½.
    """
    model = Table()
    before = model.logprobs.detach().clone()
    batch = Batch.from_rewards([1.0, 1.0, 1.0, 0.0], groups=[0, 0, 1, 1]).replace(
        tokens=torch.arange(4)[:, None],
        old_logprobs=(before - torch.tensor(MOVES, dtype=torch.float64))[:, None],
    )
    learner = LocalLearner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        save=lambda folder: None,
        forward=answer,
        max_gradient_norm=1e9,
        micro_batch_tokens=micro_batch_tokens,
    )
    optimise(plan.advantage(batch), learner, plan=plan, state=State(kl=plan.kl), seed=0)
    return before - model.logprobs.detach()


def test_a_loss_that_claims_nothing_keeps_its_gradient_on_groups_without_signal() -> None:
    """¼ · 0.2 log ρ of the square is 0.025, −0.025, 0.015 and −0.01. The clip adds nothing in the
    first group, where A = 0, nor to the third, past 1.2 with A > 0; to the fourth ¼ ρ |A|, with
    ρ = e^−0.2 and A = −½ / (√½ + 1e-6)."""
    plan = plan_of("my_own_losses:clip_and_square")
    assert not plan.advantage_only
    found = gradient_of(plan)
    assert [round(value, 3) for value in found.tolist()] == [0.025, -0.025, 0.015, 0.135]
    fourth = (math.exp(-0.2) * 0.5 / (math.sqrt(0.5) + 1e-6) - 0.2 * 0.2) / 4
    assert found.tolist() == pytest.approx([0.025, -0.025, 0.015, fourth], rel=1e-9)


def test_a_loss_with_options_of_its_own_keeps_it_too() -> None:
    loss = {"name": "my_own_losses:clip_and_square", "strength": 0.2}
    assert gradient_of(plan_of(loss))[:3].tolist() == pytest.approx([0.05, -0.05, 0.03], rel=1e-9)


def test_a_loss_is_taken_at_its_word() -> None:
    """What it claims is not true here, so it shows: nothing was computed for the first group."""
    plan = plan_of("my_own_losses:said_to_be_zero")
    assert plan.advantage_only
    found = gradient_of(plan)
    assert [round(value, 3) for value in found.tolist()] == [0.0, 0.0, 0.015, 0.135]
    assert found[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "added", [{"entropy_coefficient": 0.1}, {"kl": {"placement": "loss", "coefficient": 0.1}}]
)
def test_the_word_is_about_the_loss_alone(added: dict[str, object]) -> None:
    """A bonus or a penalty beside it has a gradient whatever the advantage is."""
    assert not plan_of("my_own_losses:said_to_be_zero", **added).advantage_only
    assert plan_of("clipped").advantage_only
    assert not plan_of("clipped", **added).advantage_only


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("micro_batch_tokens", [1, 2, 100])
def test_a_loss_that_must_see_the_whole_batch_does(
    micro_batch_tokens: int, minibatches: int
) -> None:
    plan = plan_of({"name": "my_own_losses:centred", "scale": 2.0}, minibatches=minibatches)
    # Log-probs of π_old are inferred even where one optimiser step is taken.
    assert plan.needs_inference
    assert not plan_of("my_own_losses:clip_and_square").needs_inference
    found = gradient_of(plan, micro_batch_tokens=micro_batch_tokens)
    # The log-probs are −1, −2, −0.5, −3; the old ones −1.5, −1.5, −0.8, −2.8, with mean −1.65.
    # ¼ · 2 scale (log π + 1.65) is log π + 1.65; of a mini-batch of two it is ½ · 2 scale (…).
    wanted = [minibatches * value for value in (0.65, -0.35, 1.15, -1.35)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "rl",
    [
        {"algorithm": "gmpo", "epochs": 2},
        {"algorithm": "clip_cov", "loss": {"covariance_low": 0.01, "share": 0.1}},
        {"algorithm": "kl_cov", "loss": {"share": 0.1}},
        {"kl": {"weighted": True}, "minibatches": 2},
        {"top_k": 5, "correction": {"name": "truncated", "low": 0.5}},
    ],
    ids=str,
)
def test_a_recipe_reaches_it(rl: dict[str, Any], tmp_path: Path) -> None:
    done, _ = small_run(recipe(tmp_path / "run", rl={"audit": True, **rl}, eval=None))
    records = done.folder.stage("rl").records()
    assert len(records) == 3
    assert all(math.isfinite(record["loss/total"]) for record in records)
    assert any(record["train/gradient_norm"] > 0 for record in records)
    if "loss" in rl:
        assert any(record["policy/chosen"] > 0 for record in records)
    if "correction" in rl:
        assert all(record["mismatch/correction"] >= 0.5 for record in records)
