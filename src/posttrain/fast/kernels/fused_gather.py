"""``gather_kv`` and ``scatter_grads``, each in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[Tensor, Tensor]

ELEMENTS = 4096  # numbers that one program of gather_kv copies: a few keys
LOADS = 16  # loads that one program of scatter_grads unrolls, so that they overlap


@triton.jit(do_not_specialize=["count", "last"])
def _gather(
    key,
    value,
    at,
    keys,
    values,
    count,
    last,
    key_row,
    key_head,
    value_row,
    value_head,
    size: tl.constexpr,
    width: tl.constexpr,
    repeats: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    real = (row < count)[:, None] & (column < width)[None, :]
    index = tl.minimum(tl.load(at + row, mask=row < count, other=0), last).to(tl.int64)[:, None]
    head, within = (column // size // repeats)[None, :].to(tl.int64), (column % size)[None, :]
    target = row[:, None] * width + column[None, :]
    found = tl.load(key + index * key_row + head * key_head + within, mask=real)
    tl.store(keys + target, found, mask=real)
    found = tl.load(value + index * value_row + head * value_head + within, mask=real)
    tl.store(values + target, found, mask=real)


@triton.jit
def _scatter(
    of_keys,
    of_values,
    order,
    begins,
    key,
    value,
    size: tl.constexpr,
    width: tl.constexpr,
    repeats: tl.constexpr,
    unrolled: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begins + row), tl.load(begins + row + 1)
    column = tl.arange(0, block)
    # Column (head, within) of a token is the sum of the columns (head · repeats + …, within).
    source = column // size * (repeats * size) + column % size
    keys = tl.zeros([block], tl.float32)
    values = tl.zeros([block], tl.float32)
    for first in range(begin, end, unrolled):
        for number in tl.static_range(unrolled):
            seen = first + number < end
            index = tl.load(order + first + number, mask=seen, other=0).to(tl.int64)
            real = seen & (column < width)
            for repeat in tl.static_range(repeats):
                at = index * (width * repeats) + source + repeat * size
                keys += tl.load(of_keys + at, mask=real, other=0.0).to(tl.float32)
                values += tl.load(of_values + at, mask=real, other=0.0).to(tl.float32)
    target = row * width + column
    tl.store(key + target, keys, mask=column < width)
    tl.store(value + target, values, mask=column < width)


def gather_kv(states: Pair, at: Tensor, *, repeats: int) -> Pair:
    """Keys and values [N, K, D], indices [L] → [L, K · repeats, D] twice."""
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in states)
    if key.shape != value.shape or key.dtype != value.dtype:
        raise NotImplementedError("packed sequences with values unlike the keys")
    tokens, heads, size = key.shape
    keys, values = key.new_empty(2, len(at), heads * repeats, size)
    width = heads * repeats * size
    block = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // block)
    with torch.cuda.device_of(key):
        _gather[(triton.cdiv(len(at), rows),)](
            key,
            value,
            at,
            keys,
            values,
            len(at),
            tokens - 1,
            *key.stride()[:2],
            *value.stride()[:2],
            size=size,
            width=width,
            repeats=repeats,
            rows=rows,
            block=block,
            num_warps=4 if block <= ELEMENTS else 8,
        )
    return keys, values


def scatter_grads(gradients: Pair, order: Tensor, *, begins: Tensor, repeats: int) -> Pair:
    """Gradients [L, K · repeats, D] twice, order [L], begins [N + 1] → [N, K, D] twice."""
    of_keys, of_values = (part.contiguous() for part in gradients)
    _, heads, size = of_keys.shape
    tokens, heads = len(begins) - 1, heads // repeats
    key, value = of_keys.new_empty(2, tokens, heads, size)
    block = triton.next_power_of_2(heads * size)
    with torch.cuda.device_of(of_keys):
        _scatter[(tokens,)](
            of_keys,
            of_values,
            order,
            begins,
            key,
            value,
            size=size,
            width=heads * size,
            repeats=repeats,
            unrolled=max(1, min(4, LOADS // repeats)),
            block=block,
            num_warps=max(1, min(8, block // 256)),
        )
    return key, value
