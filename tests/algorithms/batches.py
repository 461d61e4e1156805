"""Ragged batches in float64, and what the tests of the algorithms do to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from posttrain.types import Batch

# One row each: p prompt, # chosen by the policy, t a tool's answer between two turns, . padding.
PATTERNS = (
    "pp#####...",
    "p###tt##..",
    "ppp#......",
    "pppp######",
    "pp........",  # an empty completion
    "p#t#t#t#..",
    "p#########",
    "ppp##.....",
    "pp###t#...",
    "p####.....",
    "pp##t####.",
    "ppppp#....",
)
GROUPS = (7, 3, 7, 5, 3, 9, 5, 7, 9, 5, 7, 5)  # four sizes, in no order
EMPTY, BROKEN = 4, 6  # an empty completion, and one whose grader broke
VOCABULARY = 5


def ragged(seed: int = 0) -> Batch:
    """Twelve sequences of four groups, with every field that does not follow from another."""
    generator = torch.Generator().manual_seed(seed)
    size, width = len(PATTERNS), len(PATTERNS[0])

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(size, width).abs() - 0.1
    chosen = pattern("#")
    valid = torch.arange(size) != BROKEN
    return Batch(
        tokens=torch.randint(VOCABULARY, (size, width), generator=generator),
        mask=chosen,
        attention=pattern("p#t"),
        turns=turn_numbers(),
        rewards=normal(size).masked_fill(~valid, torch.nan),
        valid=valid,
        groups=torch.tensor(GROUPS),
        truncated=torch.arange(size) % 3 == 0,
        versions=torch.arange(size) // 4,
        old_logprobs=old,
        sampler_logprobs=old + normal(size, width, scale=0.4),
        ref_logprobs=old + normal(size, width, scale=0.4),
        values=normal(size, width),
        token_rewards=normal(size, width),
        score_norms=normal(size).square(),
        margins=normal(size).square(),
        greedy_rewards=normal(size),
        baseline=torch.tensor(0.3, dtype=torch.float64),
        turn_rewards=normal(size, width) * chosen,
        teacher_logprobs=old + normal(size, width, scale=0.4),
        divergence=normal(size, width).square(),
    )


def ready(seed: int = 0) -> Batch:
    """:func:`ragged`, with advantages and returns that differ from token to token."""
    batch = ragged(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    shape = (2, *batch.tokens.shape)
    advantages, returns = torch.randn(shape, generator=generator, dtype=torch.float64)
    return batch.replace(advantages=advantages, returns=returns)


def moved(batch: Batch, seed: int = 0, *, scale: float = 0.5) -> Tensor:
    """Log-probs of a policy that has moved away from the old one."""
    generator = torch.Generator().manual_seed(seed + 2000)
    step = scale * torch.randn(batch.tokens.shape, generator=generator, dtype=torch.float64)
    return batch.need("old_logprobs") + step


def pattern(marks: str) -> Tensor:
    """[B, T] bool: where the pattern holds one of ``marks``."""
    return torch.tensor([[mark in marks for mark in row] for row in PATTERNS])


def turn_numbers() -> Tensor:
    """[B, T]: the number of the turn that a token which the policy chose is in, else −1."""
    rows = []
    for row in PATTERNS:
        before = ["p", *row]
        starts = [mark == "#" != last for last, mark in zip(before, row, strict=False)]
        numbers = torch.tensor(starts).cumsum(0) - 1
        rows.append(numbers.masked_fill(~torch.tensor([mark == "#" for mark in row]), -1))
    return torch.stack(rows)


def spoiled(batch: Batch, garbage: float) -> Batch:
    """The same batch with garbage wherever a number may not count."""
    fields = {
        name: tensor.masked_fill(~batch.active, garbage)
        for name, tensor in per_token_numbers(batch).items()
    }
    assert batch.valid is not None
    fields |= {
        name: getattr(batch, name).masked_fill(~batch.valid, garbage)
        for name in ("rewards", "score_norms", "margins", "greedy_rewards")
    }
    return batch.replace(**fields)


def widened(batch: Batch, *, left: int, right: int) -> Batch:
    """The same batch with columns of padding, NaN inside, on both sides."""
    names = [*per_token_numbers(batch), "tokens", "mask", "attention"]
    names += [] if batch.turns is None else ["turns"]
    return batch.replace(**{name: wide(getattr(batch, name), left, right) for name in names})


def wide(tensor: Tensor, left: int, right: int) -> Tensor:
    """[B, T] → [B, left + T + right], with NaN (or 0, or False) in the new columns.

    Of turns that is a 0 where the policy chose nothing, which may not count either.
    """
    fill = torch.nan if tensor.is_floating_point() else 0
    return torch.nn.functional.pad(tensor, (left, right), value=fill)


def per_token_numbers(batch: Batch) -> dict[str, Tensor]:
    """The [B, T] floating fields that a batch carries."""
    names = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "values", "token_rewards")
    names += ("turn_rewards", "advantages", "returns", "correction", "weights")
    names += ("teacher_logprobs", "divergence")
    fields = {name: getattr(batch, name) for name in names}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def members(batch: Batch) -> Iterator[list[int]]:
    """The rows of the valid members of each group."""
    valid, groups = batch.valid, batch.need("groups").tolist()
    for group in sorted(set(groups)):
        yield [
            row
            for row, other in enumerate(groups)
            if other == group and (valid is None or bool(valid[row]))
        ]


def chosen(batch: Batch, row: int) -> list[int]:
    """The columns of a row's active tokens, in order."""
    return batch.active[row].nonzero().flatten().tolist()


def close(actual: Tensor, expected: object, *, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    """Equal in float64 but for rounding. (torch.testing would first import half of torch.)"""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    off = ~torch.isclose(actual, wanted, rtol=rtol, atol=atol)
    assert not off.any(), f"{actual[off][:5]} != {wanted[off][:5]} at {off.nonzero()[:5].tolist()}"


@contextmanager
def refuses(message: str) -> Iterator[None]:
    """Expect a ``ValueError`` with exactly this message."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        yield
