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
    largest = float("-inf")
    # Sums over a large vocabulary in float64: a float32 would shift the shares of rare tokens.
    total = tl.full([], 0.0, tl.float64)
    for begin in range(0, size, block):
        index = begin + column
        x = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")) * factor
        top = tl.maximum(largest, tl.max(x, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)  # a block of impossible tokens
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(x - safe).to(tl.float64), 0)
        largest = top
    # The first token whose cumulative share exceeds the uniform number.
    target = tl.load(uniforms + row).to(tl.float64) * total
    reached = tl.full([], 0.0, tl.float64)
    found = size
    likeliest = 0
    begin = 0
    while (begin < size) & (found == size):
        index = begin + column
        x = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")) * factor
        mass = tl.exp(x - largest).to(tl.float64)
        sums = reached + tl.cumsum(mass, 0)
        found = tl.min(tl.where((sums > target) & (mass > 0), index, size), 0)
        top = tl.where((x == largest) & (index < size), index, 0)
        likeliest = tl.maximum(likeliest, tl.max(top, 0))
        reached += tl.sum(mass, 0)
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
