"""Exact expectations for the tests: every action of a small softmax policy, nothing sampled.

A batch from :func:`every_action` has one row for each action, and its weights are the actions'
probabilities. So ``weights.total`` is an expectation over the policy, and its gradient the
expected gradient, without noise.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms import weights
from posttrain.algorithms.ops import gather_logprobs
from posttrain.types import Batch


def numbers(*values: Any) -> Tensor:
    """The values as a float64 tensor [N].

    >>> numbers(1, 0.5)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor | float, expected: Any) -> None:
    """Assert equality in float64 to a relative 1e-9, far stricter than any number in print."""
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-13)


def printed(values: Tensor | float, decimals: int) -> list[str]:
    """The numbers as a document with this many decimals would print them.

    >>> printed(numbers(0.8165, -1.2247), 2)
    ['0.82', '-1.22']
    """
    flat = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    return [f"{value:.{decimals}f}" for value in flat]


def softmax_policy(probabilities: Sequence[float]) -> Tensor:
    """Logits [V] of a policy with these probabilities: a leaf that collects gradients."""
    return numbers(*probabilities).log().requires_grad_()


def every_logprob(logits: Tensor) -> Tensor:
    """Log-probability of every action, with gradient. Shapes: [V] → [V, 1].

    >>> every_logprob(torch.zeros(2)).exp().T
    tensor([[0.5000, 0.5000]])
    """
    size = len(logits)
    return gather_logprobs(logits.expand(size, 1, size), torch.arange(size)[:, None])


def every_action(probabilities: Sequence[float], rewards: Sequence[float]) -> Batch:
    """One row for each action, with its reward, weighted by its probability under the sampler."""
    sampler = numbers(*probabilities)[:, None]
    actions = torch.arange(len(rewards))[:, None]
    return Batch.from_rewards(rewards).replace(
        tokens=actions, weights=sampler, old_logprobs=sampler.log()
    )


def expected_gradient(loss: Tensor, logits: Tensor, *, batch: Batch) -> Tensor:
    """The direction in which the expected loss falls: ``−∇ Σ_a π(a) ℓ_a``. Shapes: → logits'."""
    (gradient,) = torch.autograd.grad(weights.total(loss, batch), logits, retain_graph=True)
    return -gradient


def every_gradient(loss: Tensor, logits: Tensor) -> Tensor:
    """The direction in which each action's own loss falls. Shapes: [V, 1], [V] → [V, V]."""
    rows = [torch.autograd.grad(term, logits, retain_graph=True)[0] for term in loss[:, 0]]
    return -torch.stack(rows)


def gradient_variance(loss: Tensor, logits: Tensor, *, batch: Batch) -> float:
    """Total variance of one sample's gradient: ``Σ_a π(a) ‖g_a − E g‖²``."""
    away = every_gradient(loss, logits) - expected_gradient(loss, logits, batch=batch)
    return float((batch.need("weights") * away.square()).sum())
