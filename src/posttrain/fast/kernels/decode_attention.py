"""Attention of one new token per sequence over its prompt and its own tokens, none of them padded.

One program for each slot and key head: it writes the new key and value, then goes over the keys
that are really there, in blocks, with the softmax rescaled as it goes (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Many programs hide each other's waits for memory, and should be small; few must be fast alone.
# Measured on an H200 for heads of 64 and 128 in bfloat16.
MANY = 1024
SMALL = {"block": 16, "num_warps": 1, "num_stages": 3}
LARGE = {"block": 64, "num_warps": 4, "num_stages": 3}
SMALL_TILE = 16 * 128  # mixed values that the registers of one warp hold


@triton.jit
def _look(
    query,
    keys,
    values,
    base,
    first,
    end,
    largest,
    total,
    mixed,
    scale,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    block: tl.constexpr,
    precise: tl.constexpr,
):
    """Continue the softmax over the keys ``first`` to ``end`` of the sequence at ``base``."""
    lane = tl.arange(0, padded_size)
    column = tl.arange(0, block)
    for begin in range(first // block * block, end, block):
        there = (begin + column < end) & (begin + column >= first)
        cells = base + (begin + column)[:, None] * size + lane[None, :]
        inside = there[:, None] & (lane < size)[None, :]
        key = tl.load(keys + cells, mask=inside, other=0.0)
        value = tl.load(values + cells, mask=inside, other=0.0)
        if precise:
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        else:
            scores = tl.dot(query, tl.trans(key)) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp(scores - top[:, None])
        fade = tl.exp(largest - top)
        total = total * fade + tl.sum(shares, 1)
        if precise:
            more = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        else:
            more = tl.dot(shares.to(value.dtype), value)
        largest, mixed = top, mixed * fade[:, None] + more
    return largest, total, mixed


# fmt: off
@triton.jit
def _attend(
    query_pointer, key_pointer, value_pointer, prompt_keys, prompt_values, keys, values,
    rows, prompt, prompt_length, written, out, scale, window, query_row, key_row, value_row,
    num_keys: tl.constexpr, groups: tl.constexpr, size: tl.constexpr,
    prompt_capacity: tl.constexpr, own_capacity: tl.constexpr,
    padded_groups: tl.constexpr, padded_size: tl.constexpr,
    block: tl.constexpr, precise: tl.constexpr,
):
    # fmt: on
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + row).to(tl.int64)
    start = tl.load(prompt_length + slot)
    own = tl.load(written + slot)
    first = 0
    if window > 0:
        first = tl.maximum(start + own + 1 - window, 0)
    lane = tl.arange(0, padded_size)
    kept = lane < size
    group = tl.arange(0, padded_groups)
    heads = head * groups + group
    index = heads[:, None] * size + lane[None, :]
    real = (group[:, None] < groups) & kept[None, :]
    dtype = keys.dtype.element_ty
    query = tl.load(query_pointer + row * query_row + index, mask=real, other=0.0).to(dtype)

    new = head * size + lane
    new_key = tl.load(key_pointer + row * key_row + new, mask=kept, other=0.0).to(dtype)
    new_value = tl.load(value_pointer + row * value_row + new, mask=kept, other=0.0).to(dtype)
    base = (slot * num_keys + head) * own_capacity * size
    tl.store(keys + base + own * size + lane, new_key, mask=kept)
    tl.store(values + base + own * size + lane, new_value, mask=kept)

    # The newest token sees itself: the softmax begins with it, so that it is never empty.
    largest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full([padded_groups], 1.0, tl.float32)
    mixed = tl.zeros([padded_groups, padded_size], tl.float32) + new_value.to(tl.float32)[None, :]

    asked = (tl.load(prompt + slot).to(tl.int64) * num_keys + head) * prompt_capacity * size
    largest, total, mixed = _look(
        query, prompt_keys, prompt_values, asked, first, start, largest, total, mixed, scale,
        size, padded_size, block, precise,
    )  # fmt: skip
    largest, total, mixed = _look(
        query, keys, values, base, tl.maximum(first - start, 0), own, largest, total, mixed, scale,
        size, padded_size, block, precise,
    )  # fmt: skip
    result = mixed / total[:, None]
    out += row * num_keys * groups * size
    tl.store(out + index, result.to(out.dtype.element_ty), mask=real)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    prompt: Tensor,
    prompt_length: Tensor,
    written: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """As :func:`posttrain.fast.kv_slots.plain_decode_attention`."""
    num_keys, size = key.shape[1], key.shape[2]
    groups = query.shape[1] // num_keys
    query, key, value = (_with_whole_rows(states) for states in (query, key, value))
    out = torch.empty(query.shape, dtype=keys.dtype, device=query.device)
    padded = max(16, triton.next_power_of_2(groups)), max(16, triton.next_power_of_2(size))
    precise = keys.dtype == torch.float32
    small = len(rows) * num_keys >= MANY and padded[0] * padded[1] <= SMALL_TILE and not precise
    _attend[(len(rows), num_keys)](
        query,
        key,
        value,
        prompt_keys,
        prompt_values,
        keys,
        values,
        rows,
        prompt,
        prompt_length,
        written,
        out,
        scale,
        window,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        num_keys=num_keys,
        groups=groups,
        size=size,
        prompt_capacity=prompt_keys.shape[2],
        own_capacity=keys.shape[2],
        padded_groups=padded[0],
        padded_size=padded[1],
        precise=precise,
        **(SMALL if small else LARGE),
    )
    return out


def _with_whole_rows(states: Tensor) -> Tensor:
    """The same states, copied unless the heads of a row are contiguous."""
    size = states.shape[2]
    return states if states.stride()[1:] == (size, 1) else states.contiguous()
