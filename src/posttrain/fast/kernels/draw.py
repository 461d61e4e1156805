"""Drawing a token from each row of logits, in two passes over the vocabulary and no copy of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _draw(logits, uniforms, tokens, logprobs, factor, size, stride, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    # Every lane has its own maximum and sum, so that no block waits for the others of its row. Sums
    # in float64: over a large vocabulary a float32 would shift the shares of rare tokens.
    tops = tl.full([block], float("-inf"), tl.float32)
    sums = tl.full([block], 0.0, tl.float64)
    places = tl.full([block], 0, tl.int32)
    for begin in range(0, size, block):
        index = begin + column
        x = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")) * factor
        places = tl.where(x > tops, index, places)
        higher = tl.maximum(tops, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # only impossible tokens so far
        sums = sums * tl.exp(tops - safe).to(tl.float64) + tl.exp(x - safe).to(tl.float64)
        tops = higher
    largest = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - largest).to(tl.float64), 0)
    likeliest = tl.max(tl.where(tops == largest, places, 0), 0)
    # The first token whose cumulative share exceeds the uniform number.
    target = tl.load(uniforms + row).to(tl.float64) * total
    reached = tl.full([], 0.0, tl.float64)
    found = size
    begin = 0
    while (begin < size) & (found == size):
        index = begin + column
        x = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")) * factor
        mass = tl.exp(x - largest).to(tl.float64)
        here = tl.sum(mass, 0)
        if reached + here > target:
            shares = reached + tl.cumsum(mass, 0)
            found = tl.min(tl.where((shares > target) & (mass > 0), index, size), 0)
        reached += here
        begin += block
    # Rounding may leave the target just above the sum of all; the last token may be a rare one.
    token = tl.where(found < size, found, likeliest)
    chosen = tl.load(logits + row * stride + token) * factor
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - largest - tl.log(total).to(tl.float32))


def draw(logits: Tensor, uniforms: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs: float32 [N, V], [N] → [N], [N]; as ``sampling.sample`` draws."""
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _draw[(len(logits),)](
        logits,
        uniforms,
        tokens,
        logprobs,
        1.0 / temperature,
        logits.shape[1],
        logits.stride(0),
        block=BLOCK,
        num_warps=8,
    )
    return tokens, logprobs
