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
from torch.func import functional_call

from posttrain.models.attention import attending
from posttrain.models.block_attention import Flash, offsets_of
from posttrain.models.frames import Frame, Framed, Frames
from posttrain.models.shared_prompt import Blocks, SharedAttention
from posttrain.types.devices import send

_active = threading.local()


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


class _Pass:
    """One row through a trunk, with attention of ours, and with ``weights`` in place of its own."""

    def __init__(
        self, trunk: nn.Module, attention: FramedAttention, *, weights: dict[str, Tensor]
    ) -> None:
        self._trunk = trunk
        self._attention = attention
        self._weights = weights

    def __call__(self, row: Tensor, positions: Tensor) -> Tensor:
        """The last hidden state of each token. Shapes: [N], [N] → [N, D]."""
        model: Any = self._trunk
        inputs = {
            "input_ids": row[None],
            "position_ids": positions[None],
            "attention_mask": torch.ones_like(row[None]),
            "use_cache": False,
        }
        with attending(model, self._attention):
            states: Tensor = functional_call(model, self._weights, (), inputs).last_hidden_state
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


def recordings_of(trunk: nn.Module) -> Recordings | None:
    """What this trunk may be played from at the moment."""
    found: Recordings | None = getattr(_active, "recordings", {}).get(id(trunk))
    return found


class Recordings:
    """The recordings of a trunk, one for each frame that has come up.

    The backward pass adds to ``.grad`` where that stands: each weight has one place for it. What is
    differentiated are ``aliases`` of the weights, the same memory under another name: a weight that
    some graph of another stream still holds could not be recorded.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self.trunk = trunk
        learning = {name: w for name, w in trunk.named_parameters() if w.requires_grad}
        self.weights = list(learning.values())
        self.aliases: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach()) for name, weight in learning.items()
        }
        self.slopes = [torch.zeros_like(weight) for weight in self.weights]
        for alias, slope in zip(self.aliases.values(), self.slopes, strict=True):
            alias.grad = slope
        self.pool = torch.cuda.graph_pool_handle()
        self.frames = Frames()
        self._known: dict[Frame, _Recording] = {}

    def states(self, tokens: Tensor, framed: Framed) -> Tensor:
        """The states of ``framed.before``; with gradient where enabled. Shapes: [B, T] → [M, D]."""
        if framed.frame not in self._known:
            self._known[framed.frame] = _Recording(self, framed, tokens=tokens)
        if torch.is_grad_enabled():
            self._bring_slopes()
        states = self._known[framed.frame].play(tokens, framed)
        return states[send(framed.before, tokens.device)]

    def _bring_slopes(self) -> None:
        """Have every gradient where the recordings add to it."""
        for weight, slope in zip(self.weights, self.slopes, strict=True):
            if weight.grad is None:
                slope.zero_()
            elif weight.grad is not slope:
                slope.copy_(weight.grad)
            weight.grad = slope


class _Recording:
    """A forward and a backward pass of one frame; all that they read stands at fixed addresses."""

    @torch.enable_grad()
    def __init__(self, owner: Recordings, framed: Framed, *, tokens: Tensor) -> None:
        device = tokens.device
        self._offsets = [offsets_of(lengths).to(device) for lengths in _lengths(framed)]
        self._row = tokens.flatten()[framed.source.to(device)]
        self._positions = framed.positions.to(device)
        attention = FramedAttention(self._blocks(framed.frame), grouped=True)
        one_pass = _Pass(owner.trunk, attention, weights=owner.aliases)
        aliases = list(owner.aliases.values())
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), _casts_inside():
            # An ordinary pass first: it compiles kernels and sizes workspaces.
            states = one_pass(self._row, self._positions)
            torch.autograd.grad(states, aliases, torch.zeros_like(states))
            del states
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.empty_cache()  # recordings cannot have the memory of that pass
        options: dict[str, Any] = {"pool": owner.pool, "capture_error_mode": "thread_local"}
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, **options), _casts_inside():
            states = one_pass(self._row, self._positions)
        self._slope = torch.zeros_like(states)
        with torch.cuda.graph(self._backward, **options):
            states.backward(self._slope, inputs=aliases)  # each is added as it comes, in place
        self._states = states.detach()
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def _blocks(self, frame: Frame) -> Blocks:
        heads, *others = self._offsets
        kernels: list[Flash | None] = [
            Flash.at(heads, heads, longest=(frame.longest_head,) * 2),
            None,
            None,
        ]
        if others:
            rest, groups, prompts = others
            kernels[1] = Flash.at(rest, rest, longest=(frame.longest_rest,) * 2)
            longest = (frame.longest_group, frame.longest_prompt)
            kernels[2] = Flash.at(groups, prompts, longest=longest, causal=False)
        head, own, given = kernels
        assert head is not None
        return Blocks(head, own, given, completions_begin=frame.heads, prompts_end=frame.heads)

    def play(self, tokens: Tensor, framed: Framed) -> Tensor:
        """Bring the inputs to their places, and play. Shapes: [B, T] → [N, D]."""
        device = tokens.device
        for offsets, lengths in zip(self._offsets, _lengths(framed), strict=True):
            offsets.copy_(send(offsets_of(lengths), device))
        torch.take(tokens, send(framed.source, device), out=self._row)
        self._positions.copy_(send(framed.positions, device))
        states: Tensor = _Played.apply(self._anchor, self)
        return states

    def forward(self) -> Tensor:
        """Play the forward pass."""
        self._forward.replay()
        return self._states

    def backward(self, slope: Tensor) -> None:
        """Play the backward pass: the gradients of the weights grow by theirs."""
        self._slope.copy_(slope)
        self._backward.replay()


class _Played(torch.autograd.Function):
    """A recording as one operation; the anchor is there so that autograd asks for the gradient."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.recording = given[1]
        states: Tensor = given[1].forward()
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, None]:
        ctx.recording.backward(slopes[0])
        return None, None


@contextmanager
def _casts_inside() -> Iterator[None]:
    """Autocast as it is, without its memory: weights must be cast anew in every pass."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def recordings_for(*modules: Any) -> tuple[Recordings, ...]:
    """Recordings for the trunk of each module that has one of its own."""
    trunks = [
        module.get_decoder() if hasattr(module, "get_decoder") else getattr(module, "trunk", None)
        for module in modules
    ]
    return tuple(Recordings(trunk) for trunk in trunks if trunk is not None)


def _lengths(framed: Framed) -> list[list[int]]:
    if not framed.frame.rest:
        return [framed.heads]
    return [framed.heads, framed.rest, framed.groups, framed.prompts]
