"""The same as ``plain``, each in one Triton kernel: one pass over the logits and no other buffer.

On a GPU these operations cost memory traffic and nothing else; what PyTorch does in eight passes
over a gigabyte of logits is one pass here. Programs never share a row: the results do not depend on
the order in which they run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.fast.kernels.plain import Statistics

_MAX_BLOCK = 4096
_WARPS = 8


def statistics(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    keep: bool = False,
) -> Statistics:
    """See :func:`posttrain.fast.kernels.plain.statistics`; the logits stay in any case."""
    del keep
    found = [logits.new_empty(len(logits)) for _ in Statistics._fields]
    with torch.cuda.device_of(logits):
        _statistics_kernel[(len(logits),)](
            logits,
            tokens,
            *found,
            temperature,
            logits.stride(0),
            logits.shape[1],
            ENTROPY=entropy,
            **_sizes(logits),
        )
    return Statistics(*found)


def gradient(
    logits: Tensor,
    tokens: Tensor,
    *,
    log_sums: Tensor,
    of_logprobs: Tensor,
    entropies: Tensor | None = None,
    of_entropies: Tensor | None = None,
    temperature: float = 1.0,
    cap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See :func:`posttrain.fast.kernels.plain.gradient`; in place where the type allows it."""
    result = logits if dtype in (None, logits.dtype) else torch.empty_like(logits, dtype=dtype)
    size, has_entropy = _sizes(logits), entropies is not None and of_entropies is not None
    with torch.cuda.device_of(logits):
        _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], size["BLOCK"]))](
            logits,
            result,
            tokens,
            log_sums.contiguous(),
            of_logprobs.contiguous(),
            entropies.contiguous() if entropies is not None else log_sums,
            of_entropies.contiguous() if of_entropies is not None else log_sums,
            temperature,
            1.0 if cap is None else cap,
            logits.stride(0),
            result.stride(0),
            logits.shape[1],
            ENTROPY=has_entropy,
            CAPPED=cap is not None,
            **size,
        )
    return result


def _sizes(logits: Tensor) -> dict[str, Any]:
    """How much of a row is worked on at once, and by how many threads."""
    return {"BLOCK": min(_MAX_BLOCK, triton.next_power_of_2(logits.shape[1])), "num_warps": _WARPS}


@triton.jit
def _statistics_kernel(
    logits,
    tokens,
    logprobs,
    log_sums,
    entropies,
    temperature,
    stride,
    size,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: the running maximum m, ``s = Σ e^(z−m)``, ``u = Σ e^(z−m)·(z−m)``.

    When the maximum grows by d, s becomes ``s·e^−d`` and u ``(u − s·d)·e^−d``.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, size, BLOCK):
        index = first + tl.arange(0, BLOCK)
        scaled = tl.load(start + index, mask=index < size, other=-float("inf")) / temperature
        now = tl.maximum(largest, tl.max(scaled, 0))
        # Where all was −inf so far there is nothing to rescale, and −inf − −inf would be NaN.
        base = tl.where(now == -float("inf"), 0.0, now)
        grown = base - tl.where(largest == -float("inf"), base, largest)
        shifted = tl.where(scaled == -float("inf"), -1e4, scaled - base)
        terms = tl.exp(shifted)
        if ENTROPY:
            weighted = (weighted - total * grown) * tl.exp(-grown) + tl.sum(terms * shifted, 0)
        total = total * tl.exp(-grown) + tl.sum(terms, 0)
        largest = now
    chosen = tl.load(start + tl.load(tokens + row)) / temperature
    log_total = tl.log(total)
    tl.store(logprobs + row, (chosen - largest) - log_total)
    tl.store(log_sums + row, largest + log_total)
    if ENTROPY:
        tl.store(entropies + row, log_total - weighted / total)
    else:
        tl.store(entropies + row, 0.0)


@triton.jit
def _gradient_kernel(
    logits,
    result,
    tokens,
    log_sums,
    of_logprobs,
    entropies,
    of_entropies,
    temperature,
    cap,
    stride,
    result_stride,
    size,
    ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A piece of one row per program: ``g·(onehot − p) − h·p·(log p + H)``, over temperature."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    given = tl.load(logits + row * stride + index, mask=inside, other=-float("inf"))
    possible = given != -float("inf")
    logs = given / temperature - tl.load(log_sums + row)
    shares = tl.exp(logs)
    direct = tl.load(of_logprobs + row)
    change = tl.where(index == tl.load(tokens + row), direct, 0.0) - shares * direct
    if ENTROPY:
        deviation = tl.where(possible, logs, 0.0) + tl.load(entropies + row)
        change -= tl.load(of_entropies + row) * shares * deviation
    change /= temperature
    if CAPPED:
        capped = given / cap
        change *= tl.where(possible, 1 - capped * capped, 0.0)
    tl.store(result + row * result_stride + index, change.to(result.dtype.element_ty), mask=inside)
