"""Forward and backward passes of a trunk played from recordings: no launch is waited for.

A decoder of thirty layers launches thousands of kernels for a micro-batch; for small models the
host takes longer to launch them than the GPU to run them. Here each pass is a CUDA graph, recorded
for a few sizes (:mod:`posttrain.models.frames`) and played for every micro-batch that fits one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention import attending
from posttrain.models.block_attention import Flash, offsets_of
from posttrain.models.frames import Frame, Framed
from posttrain.models.shared_prompt import Blocks, Make, SharedAttention

_active = threading.local()
MOST = 8  # recordings; what fits none of them is computed as usual


class FramedAttention:
    """The attention of a framed row, for :func:`posttrain.models.attention.attending`."""

    def __init__(self, blocks: Blocks, *, grouped: bool) -> None:
        self._blocks = blocks
        self._grouped = grouped

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Mix values over one row: [1, H, N, D], [1, K, N, D] twice → [1, N, H, D]."""
        return SharedAttention.mix(
            (query, key, value), self._blocks, scale=scale, grouped=self._grouped
        )


def framed_states(trunk: nn.Module, tokens: Tensor, *, framed: Framed, make: Make) -> Tensor:
    """The states of ``framed.before``, computed as a recording would. Shapes: [B, T] → [M, D]."""
    heads, *others = (make(block, like=tokens) for block in framed.blocks())
    rest, given = others or (None, None)
    begin = framed.frame.heads
    blocks = Blocks(heads, rest, given, completions_begin=begin, prompts_end=begin)
    row = tokens.flatten()[framed.source.to(tokens.device)]
    positions = framed.positions.to(tokens.device)
    attention = FramedAttention(blocks, grouped=make is Flash)
    states = _Pass(trunk, attention)(row, positions)
    return states[framed.before.to(tokens.device)]


class _Pass(nn.Module):
    """One row through a trunk, with attention of ours. Shapes: [N], [N] → [N, D]."""

    def __init__(self, trunk: nn.Module, attention: FramedAttention) -> None:
        super().__init__()
        self.trunk = trunk
        self._attention = attention

    def forward(self, row: Tensor, positions: Tensor) -> Tensor:
        """The last hidden state of each token."""
        model: Any = self.trunk
        with attending(model, self._attention):
            states: Tensor = model(
                input_ids=row[None],
                position_ids=positions[None],
                attention_mask=torch.ones_like(row[None]),
                use_cache=False,
            ).last_hidden_state
        return states[0]


@contextmanager
def playing(*recordings: Recordings) -> Iterator[None]:
    """Inside, passes of the trunks that have recordings are played from them."""
    before = getattr(_active, "recordings", {})
    _active.recordings = {id(one.trunk): one for one in recordings}
    try:
        yield
    finally:
        _active.recordings = before


def recordings_of(trunk: nn.Module, frame: Frame) -> Recordings | None:
    """What this trunk may be played from at the moment, in a pass of this size."""
    found: Recordings | None = getattr(_active, "recordings", {}).get(id(trunk))
    return found if found is not None and found.takes(frame) else None


class Recordings:
    """The recordings of a trunk, one for each frame that has come up."""

    def __init__(self, trunk: nn.Module) -> None:
        self.trunk = trunk
        self._known: dict[Frame, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def takes(self, frame: Frame) -> bool:
        """Whether there is a recording for this frame, or room for one more."""
        return frame in self._known or len(self._known) < MOST

    def states(self, tokens: Tensor, framed: Framed) -> Tensor:
        """The states of ``framed.before``, with gradient. Shapes: [B, T] → [M, D]."""
        recording = self._known.get(framed.frame)
        if recording is None:
            recording = _Recording(self.trunk, framed, tokens=tokens, pool=self._pool)
            self._known[framed.frame] = recording
        states = recording.play(tokens, framed)
        return states[framed.before.to(tokens.device, non_blocking=True)]


def recordings_for(*modules: Any) -> tuple[Recordings, ...]:
    """Recordings for the trunk of each module that has one of its own."""
    trunks = [
        module.get_decoder() if hasattr(module, "get_decoder") else getattr(module, "trunk", None)
        for module in modules
    ]
    return tuple(Recordings(trunk) for trunk in trunks if trunk is not None)


class _Recording:
    """A forward and a backward pass of one frame; its inputs stand at fixed addresses."""

    def __init__(self, trunk: nn.Module, framed: Framed, *, tokens: Tensor, pool: Any) -> None:
        device, frame = tokens.device, framed.frame
        self._offsets = [offsets_of(lengths).to(device) for lengths in _lengths(framed)]
        heads = Flash.at(self._offsets[0], self._offsets[0], longest=(frame.longest_head,) * 2)
        rest = given = None
        if frame.rest:
            rest = Flash.at(self._offsets[1], self._offsets[1], longest=(frame.longest_rest,) * 2)
            longest = (frame.longest_group, frame.longest_prompt)
            given = Flash.at(*self._offsets[2:], longest=longest, causal=False)
        blocks = Blocks(heads, rest, given, completions_begin=frame.heads, prompts_end=frame.heads)
        attention = FramedAttention(blocks, grouped=True)
        sample = (tokens.flatten()[framed.source.to(device)], framed.positions.to(device))
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")
        # Casts of weights belong into the recording: they must be done anew for every pass.
        with torch.autocast("cuda", dtype=dtype, enabled=autocast, cache_enabled=False):
            self._pass: Any = torch.cuda.make_graphed_callables(
                _Pass(trunk, attention), sample, num_warmup_iters=2, pool=pool
            )

    def play(self, tokens: Tensor, framed: Framed) -> Tensor:
        """Bring the inputs to their places, and play. Shapes: [B, T] → [N, D]."""
        device = tokens.device
        for offsets, lengths in zip(self._offsets, _lengths(framed), strict=True):
            offsets.copy_(offsets_of(lengths), non_blocking=True)
        row = tokens.flatten()[framed.source.to(device, non_blocking=True)]
        states: Tensor = self._pass(row, framed.positions.to(device, non_blocking=True))
        return states


def _lengths(framed: Framed) -> list[list[int]]:
    if not framed.frame.rest:
        return [framed.heads]
    return [framed.heads, framed.rest, framed.groups, framed.prompts]
