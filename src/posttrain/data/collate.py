"""From rollouts and demonstrations to a batch of right-padded tensors.

Padding stands on the right, so under causal attention no real token ever sees it. The mask comes
from who wrote each token, never from its id: a pad token that equals the end token changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.types import Batch, Rollout, Turn


def collate(rollouts: Sequence[Rollout], *, pad_token: int) -> Batch:
    """Rollouts as a batch: tokens, mask, sampler log-probs, rewards, groups, versions.

    Every rollout must be scored, and so must the greedy completions, where all have one. Where some
    have several turns of the policy, it says which token is of which, and where something was
    earned before the end, which token earned it. Shapes: B rollouts → [B, T], T the longest.
    """
    if not rollouts:
        raise ValueError("rollouts: a batch needs at least one")
    scores = [rollout.score for rollout in rollouts]
    if any(score is None for score in scores):
        raise ValueError("rollouts: score them before collate")
    tokens, attention = _pad([(*r.prompt.tokens, *r.tokens) for r in rollouts], pad_token)
    mask, _ = _pad([(*(False for _ in r.prompt.tokens), *r.mask) for r in rollouts], False)
    drawn = (turn.logprobs for r in rollouts for turn in r.turns if turn.logprobs is not None)
    logprobs, mask = torch.zeros(tokens.shape), mask.bool()
    flat = np.fromiter(itertools.chain.from_iterable(drawn), dtype=np.float64)
    logprobs[mask] = torch.from_numpy(flat).float()
    return Batch(
        tokens=tokens,
        mask=mask,
        attention=attention,
        turns=_turns(rollouts, mask),
        turn_rewards=_turn_rewards(rollouts, mask),
        sampler_logprobs=logprobs,
        rewards=torch.tensor([score.value for score in scores if score], dtype=torch.float64),
        valid=torch.tensor([score.ok for score in scores if score]),
        groups=torch.tensor([r.group for r in rollouts]),
        truncated=torch.tensor([_last(r).stop_reason == "length" for r in rollouts]),
        versions=torch.tensor([r.version for r in rollouts]),
        greedy_rewards=_greedy_rewards(rollouts),
    )


def _turns(rollouts: Sequence[Rollout], mask: Tensor) -> Tensor | None:
    """[B, T]: the number of the policy's turn at its tokens, else −1; None where none has two."""
    sizes = [[len(turn.tokens) for turn in r.turns if turn.sampled] for r in rollouts]
    if max(map(len, sizes)) < 2:
        return None
    numbers = torch.cat(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in sizes]
    )
    return torch.full(mask.shape, -1).masked_scatter(mask, numbers)


def _turn_rewards(rollouts: Sequence[Rollout], mask: Tensor) -> Tensor | None:
    """[B, T]: what was earned before the end, at the tokens that earned it; None where nothing was.

    The reward of a turn stands at its last token, but for what it gives to single tokens. A broken
    rollout has earned nothing.
    """
    if not any(_early(rollout) for rollout in rollouts):
        return None
    values = torch.tensor([e for r in rollouts for e in _by_token(r)], dtype=torch.float64)
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, values)


def _early(rollout: Rollout) -> bool:
    """Whether a rollout has earned something at another place than its end."""
    score = rollout.score
    given = any(turn.reward or turn.token_rewards for turn in rollout.turns)
    return score is not None and score.ok and (given or bool(score.token_rewards))


def _by_token(rollout: Rollout) -> Iterator[float]:
    """What each of the policy's tokens has earned, but for what is left of the score at the end."""
    turns = [[0.0] * len(turn.tokens) for turn in rollout.turns if turn.sampled]
    if _early(rollout):
        number = -1
        for turn in rollout.turns:
            number += turn.sampled
            if not turn.sampled and number >= 0 and turns[number]:
                turns[number] = _plus(turns[number], turn.token_rewards)
                turns[number][-1] += turn.reward - sum(turn.token_rewards)
        turns[-1] = _plus(turns[-1], rollout.score.token_rewards if rollout.score else ())
    yield from itertools.chain.from_iterable(turns)


def _plus(earned: list[float], more: Sequence[float]) -> list[float]:
    """What the tokens of a turn have earned, with more for each of them, where there is any."""
    if more and len(more) != len(earned):
        raise ValueError(
            f"token_rewards: {len(more)} for a turn of {len(earned)} tokens; give one for each"
        )
    return [one + other for one, other in zip(earned, more, strict=True)] if more else earned


def _last(rollout: Rollout) -> Turn:
    """The policy's last turn."""
    return next(turn for turn in reversed(rollout.turns) if turn.sampled)


def _greedy_rewards(rollouts: Sequence[Rollout]) -> Tensor | None:
    """[B]: what the greedy completion of each prompt scored, NaN where its grader broke."""
    greedy = [rollout.greedy for rollout in rollouts]
    if not any(greedy):
        return None
    scores = [None if each is None else each.score for each in greedy]
    if any(score is None for score in scores):
        raise ValueError("rollouts: some have no scored greedy completion, and some have one")
    values = [score.value if score.ok else math.nan for score in scores if score]
    return torch.tensor(values, dtype=torch.float64)


def collate_demonstrations(
    rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, pad_token: int
) -> Batch:
    """Token rows and their loss masks as a batch.

    >>> collate_demonstrations([((5, 6, 7), (False, True, True)), ((8,), (True,))], pad_token=0)
    ...     # doctest: +ELLIPSIS
    Batch(tokens=tensor([[5, 6, 7],
            [8, 0, 0]]), mask=tensor([[False,  True,  True],
            [ True, False, False]]), ...
    """
    if not rows:
        raise ValueError("demonstrations: a batch needs at least one")
    tokens, attention = _pad([tokens for tokens, _ in rows], pad_token)
    mask, _ = _pad([mask for _, mask in rows], False)
    return Batch(tokens=tokens, mask=mask.bool(), attention=attention)


def collate_ranked(
    sets: Sequence[tuple[Sequence[Sequence[int]], float]], *, pad_token: int
) -> Batch:
    """Ranked sets of token rows, best first, with their margins, as a batch for a reward model.

    ``groups`` numbers the sets. The mask is True at the last token of every row, where its score
    is read, and ``weights`` are 1 / N at the first row of each of the N sets, whose loss it holds.

    >>> batch = collate_ranked([(((5, 6, 7), (5, 8)), 0.0)], pad_token=0)
    >>> batch.tokens.tolist(), batch.mask.nonzero().tolist(), batch.groups.tolist()
    ([[5, 6, 7], [5, 8, 0]], [[0, 2], [1, 1]], [0, 0])
    """
    if not sets:
        raise ValueError("preferences: a batch needs at least one set")
    tokens, attention = _pad([row for members, _ in sets for row in members], pad_token)
    leads = [place == 0 for members, _ in sets for place in range(len(members))]
    mask = torch.arange(1, tokens.shape[1] + 1) == attention.sum(dim=1, keepdim=True)
    weights = mask * torch.tensor(leads)[:, None] / len(sets)
    return Batch(
        tokens=tokens,
        mask=mask,
        attention=attention,
        groups=torch.tensor([number for number, (members, _) in enumerate(sets) for _ in members]),
        margins=torch.tensor([margin for members, margin in sets for _ in members]).float(),
        weights=weights.float(),
    )


def collate_completions(
    sets: Sequence[tuple[Sequence[Sequence[int]], int]], *, pad_token: int
) -> Batch:
    """Sets of token rows and where their completions begin, as a batch for a policy.

    ``groups`` numbers the sets. The mask is True on completions, and ``weights`` are 1 / N at the
    first token of the first completion of each of the N sets, which holds the loss of the set.

    >>> batch = collate_completions([(((5, 6, 7), (5, 8)), 1)], pad_token=0)
    >>> batch.mask.nonzero().tolist(), batch.weights.nonzero().tolist(), batch.groups.tolist()
    ([[0, 1], [0, 2], [1, 1]], [[0, 1]], [0, 0])
    """
    rows = [
        (row, (False,) * start + (True,) * (len(row) - start))
        for members, start in sets
        for row in members
    ]
    batch = collate_demonstrations(rows, pad_token=pad_token)
    leads = torch.tensor([place == 0 for members, _ in sets for place in range(len(members))])
    groups = [number for number, (members, _) in enumerate(sets) for _ in members]
    weights = first_tokens(batch.mask) * leads[:, None] / len(sets)
    return batch.replace(groups=torch.tensor(groups), weights=weights.float())


def first_tokens(mask: Tensor) -> Tensor:
    """Where each row is True for the first time. Shapes: [B, T] → [B, T].

    >>> first_tokens(torch.tensor([[False, True, True]])).tolist()
    [[False, True, False]]
    """
    return mask & (mask.cumsum(dim=1) == 1)


def _pad(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Whole numbers in rows of one length, and what of them is real. Shapes: [B, T], [B, T]."""
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    padded = torch.full(real.shape, fill, dtype=torch.long)
    padded[real] = torch.from_numpy(np.fromiter(itertools.chain.from_iterable(rows), np.int64))
    return padded, real
