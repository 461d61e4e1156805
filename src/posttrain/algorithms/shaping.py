"""Shaping: from one score a sequence to the rewards that the advantage sees."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.choices import Direction, Estimator
from posttrain.algorithms.kl import estimate
from posttrain.algorithms.ops import Deviation, keep, whiten
from posttrain.algorithms.turns import turn_ends, turn_index, turn_sum
from posttrain.types import Batch


def score_at_last_token(batch: Batch) -> Batch:
    """``r_t = R`` at the policy's last token, else 0: what was earned before stays where it was.

    ``r_t = e_t``, and at the last token ``e_t + R − Σ e``, with e the batch's ``turn_rewards``
    (0 where it has none): the sum is R. Shapes: rewards [B], turn_rewards [B, T] → token_rewards
    [B, T].

    >>> import torch
    >>> batch = Batch.from_tensors(torch.tensor([[1, 0, 1, 1]]), rewards=torch.tensor([5.0]))
    >>> score_at_last_token(batch).token_rewards
    tensor([[0., 0., 0., 5.]])
    >>> early = torch.tensor([[-1.0, 0.0, 0.0, 0.0]])
    >>> score_at_last_token(batch.replace(turn_rewards=early)).token_rewards
    tensor([[-1.,  0.,  0.,  6.]])
    """
    rewards, end = batch.need("rewards"), last(batch)
    checks.finite("rewards", rewards, where=batch.valid)
    if batch.turn_rewards is None:
        return batch.replace(token_rewards=keep(rewards[:, None].expand(batch.mask.shape), end))
    checks.finite("turn_rewards", batch.turn_rewards, where=batch.active)
    early = keep(batch.turn_rewards, batch.active).to(rewards.dtype)
    rest = rewards - early.sum(dim=1)
    return batch.replace(token_rewards=early + keep(rest[:, None].expand(early.shape), end))


def last(batch: Batch) -> Tensor:
    """[B, T] bool: True at each sequence's last active token (nowhere in an empty one).

    >>> import torch
    >>> last(Batch.from_tensors(torch.tensor([[1, 1, 0]])))
    tensor([[False,  True, False]])
    """
    active = batch.active
    still_to_come = active.flip(1).cumsum(1).flip(1)
    return active & (still_to_come == 1)


def kl_in_reward(
    batch: Batch,
    *,
    coefficient: float,
    estimator: Estimator = "k1",
    direction: Direction = "reverse",
) -> Batch:
    """``r_t ← r_t − β · KL_t(π_old, π_ref)`` at every token: the penalty is part of the reward.

    k1 is the default here: the sum of it over the tokens is the sequence's log-ratio, and a reward
    needs no low-variance gradient of its own. Shapes: old_logprobs, ref_logprobs, token_rewards
    [B, T] → token_rewards [B, T].

    >>> import torch
    >>> batch = score_at_last_token(Batch.from_rewards([0.8])).replace(
    ...     old_logprobs=torch.tensor([[-1.0]]), ref_logprobs=torch.tensor([[-1.05]]))
    >>> kl_in_reward(batch, coefficient=6.0).token_rewards
    tensor([[0.5000]], dtype=torch.float64)
    """
    checks.number("coefficient", coefficient, low=0.0)
    batch = batch if batch.token_rewards is not None else score_at_last_token(batch)
    old, ref = batch.need("old_logprobs").detach(), batch.need("ref_logprobs").detach()
    checks.finite("old_logprobs", old, where=batch.active)
    checks.finite("ref_logprobs", ref, where=batch.active)
    divergence = keep(estimate(old, ref, estimator=estimator, direction=direction), batch.active)
    return batch.replace(token_rewards=batch.need("token_rewards") - coefficient * divergence)


def whiten_rewards(
    batch: Batch, *, shift_mean: bool = False, deviation: Deviation = "population"
) -> Batch:
    """``r_t ← r_t / std``, or ``(r_t − mean) / std``, over the batch's active tokens.

    The critic's targets then keep one scale, whatever that of the score (Huang et al., 2024,
    arXiv:2403.17031); ``deviation`` divides its squares by the n tokens (``"population"``) or by
    n − 1 (``"sample"``). A reward of 0 stays 0. Code that divides and then adds the mean back gives
    every token a constant, which pays or fines length; ``shift_mean`` does too. Rewards without
    spread keep their scale.
    Shapes: token_rewards, mask [B, T] → token_rewards [B, T], 0 where inactive.

    >>> import torch
    >>> rewards = torch.tensor([[9.0, 0.0, 5.0]])
    >>> batch = Batch.from_tensors(torch.tensor([[0, 1, 1]]), token_rewards=rewards)
    >>> whiten_rewards(batch).token_rewards
    tensor([[0., 0., 2.]])
    """
    rewards, active = batch.need("token_rewards"), batch.active
    checks.finite("token_rewards", rewards, where=active)
    whitened = whiten(rewards, active, centre=shift_mean, deviation=deviation)
    return batch.replace(token_rewards=whitened)


def overlong(batch: Batch, *, limit: int, buffer: int, factor: float = 1.0) -> Batch:
    """DAPO's soft punishment of long answers (arXiv:2503.14476).

    ``R ← R − factor · clip((|o| − (limit − buffer)) / buffer, 0, 1)``: free up to
    ``limit − buffer`` tokens, the full ``factor`` at ``limit``. Each turn of the policy has the
    limit for itself, and is punished for its own length, at its own last token.
    Shapes: rewards [B], mask, turns [B, T] → rewards [B], turn_rewards [B, T].

    >>> import torch
    >>> batch = Batch.from_tensors(torch.ones(1, 9), rewards=torch.tensor([1.0]))
    >>> overlong(batch, limit=10, buffer=4).rewards
    tensor([0.2500])
    """
    checks.number("buffer", buffer, low=1)
    checks.number("limit", limit, low=buffer)
    checks.number("factor", factor, low=0.0)
    rewards = _score(batch)
    excess = turn_sum(batch.mask.long(), batch) - (limit - buffer)
    fines = factor * (excess.to(rewards.dtype) / buffer).clamp(0, 1)
    fined = batch.replace(rewards=rewards - fines.sum(dim=1))
    if batch.turns is None:
        return fined
    early = torch.zeros_like(fines[:, :1]) if batch.turn_rewards is None else batch.turn_rewards
    return fined.replace(
        turn_rewards=early - keep(fines.gather(1, turn_index(batch)), turn_ends(batch))
    )


def missing_end(batch: Batch, *, penalty: float = 1.0) -> Batch:
    """``R ← R − penalty`` where the length limit cut the answer. Shapes: [B] → rewards [B].

    >>> import torch
    >>> batch = Batch.from_rewards([1.0, 1.0]).replace(truncated=torch.tensor([True, False]))
    >>> missing_end(batch, penalty=0.5).rewards
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    checks.number("penalty", penalty, low=0.0)
    rewards, truncated = _score(batch), batch.need("truncated")
    return batch.replace(rewards=rewards - penalty * truncated.to(rewards.dtype))


def _score(batch: Batch) -> Tensor:
    if batch.token_rewards is not None:
        raise ValueError(
            "token_rewards: already made from the score, so changing the score now would do "
            "nothing; shape the score first"
        )
    return batch.need("rewards")
