"""The advantage of on-policy distillation: a teacher scores every token that the policy chose."""

from __future__ import annotations

import torch

from posttrain.algorithms import checks
from posttrain.algorithms.advantages.baselines import group_normalised
from posttrain.algorithms.ops import compact, keep, window_sum
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


@piece(needs={"teacher_logprobs"}, smallest_group=lambda *, reward, **_: 2 if reward else 1)
def towards_teacher(
    batch: Batch, *, coefficient: float = 1.0, discount: float = 0.0, reward: float = 0.0
) -> Batch:
    """``A_t = c · Σ_{l ≥ 0} γ^l (log π_teacher − log π_old)_{t+l} + w · (R − mean) / std``.

    The tokens come from the policy, so ``log π_teacher − log π_old`` is minus the sampled reverse
    KL(π ‖ π_teacher) of each, and at γ = 0 the expected gradient is that of minus its exact value
    in every state (On-Policy Distillation, Thinking Machines, 2025); ``discount`` is γ, and at 1
    it is that of the sequence's KL (MiniLLM; Gu et al., 2023, arXiv:2306.08543). ``reward`` is w: a
    mixture with GRPO's advantage.
    Shapes: old_logprobs, teacher_logprobs [B, T], rewards, groups [B] → [B, T].

    >>> batch = Batch.from_rewards([0.0]).replace(
    ...     old_logprobs=torch.tensor([[0.5]]).log(), teacher_logprobs=torch.tensor([[0.25]]).log())
    >>> towards_teacher(batch).advantages  # the teacher finds it half as likely: log ½
    tensor([[-0.6931]])
    """
    checks.number("coefficient", coefficient, above=0.0)
    checks.number("discount", discount, low=0.0, high=1.0)
    checks.number("reward", reward, low=0.0)
    active = batch.active
    old, teacher = batch.need("old_logprobs").detach(), batch.need("teacher_logprobs").detach()
    checks.finite("old_logprobs", old, where=active)
    checks.finite("teacher_logprobs", teacher, where=active)
    order = compact(active)
    ahead = window_sum(keep(teacher - old, active).gather(1, order), discount)
    advantages = coefficient * keep(torch.zeros_like(ahead).scatter(1, order, ahead), active)
    if reward:
        advantages = advantages + reward * group_normalised(batch).need("advantages")
    return batch.replace(advantages=advantages.to(batch.dtype))
