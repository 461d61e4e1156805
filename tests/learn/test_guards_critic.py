"""Guards of a learner with a critic: the two step together, or neither does."""

import math

import pytest
import torch
from critic_parts import batch, learner, objective, parts, value_objective
from small_model import parameters
from torch import Tensor

from posttrain.algorithms.weights import sequence_mean
from posttrain.learn.trained import Trained


def moments(trained: Trained) -> list[Tensor]:
    """Everything the optimiser keeps, copied."""
    entries = trained.optimizer.state.values()
    return [torch.as_tensor(value).clone() for entry in entries for value in entry.values()]


@pytest.mark.parametrize("ill", ["policy", "critic"])
def test_of_policy_and_critic_either_skips_both(ill: str) -> None:
    """A healthy half of a step would part the two."""
    model, critic = parts("separate")
    student = learner(model, critic)
    given = sequence_mean(student.infer(batch()))
    student.step(given, objective)
    owner = model if ill == "policy" else critic
    weight = next(iter(owner.parameters()))
    hook = weight.register_hook(lambda gradient: gradient * math.nan)
    before = [parameters(model), parameters(critic)]
    held = moments(student.trained), moments(student.critic)
    result = student.step(given, objective)
    assert result.skipped
    assert math.isfinite(result.loss)
    assert math.isnan(result.gradient_norm) is (ill == "policy")
    assert math.isnan(result.metrics["critic_gradient_norm"]) is (ill == "critic")
    assert torch.equal(parameters(model), before[0])
    assert torch.equal(parameters(critic), before[1])
    assert all(map(torch.equal, moments(student.trained), held[0]))
    assert all(map(torch.equal, moments(student.critic), held[1]))
    assert (student.trained.num_steps, student.critic.num_steps) == (1, 1)
    hook.remove()
    assert not student.step(given, objective).skipped


def test_a_critic_that_learns_alone_is_guarded_too() -> None:
    model, critic = parts("separate")
    student = learner(model, critic)
    given = sequence_mean(student.infer(batch()))
    broken = given.replace(returns=given.returns / 0)
    before = parameters(critic)
    assert student.step(broken, value_objective).skipped
    assert torch.equal(parameters(critic), before)
    assert not student.step(given, value_objective).skipped
