"""Forward and backward passes of a trunk played from recordings: no launch is waited for.

A decoder of thirty layers launches thousands of kernels for a micro-batch; for small models the
host takes longer to launch them than the GPU to run them. Here each pass is a CUDA graph, recorded
for a few sizes (:mod:`posttrain.fast.buckets`) and played for every micro-batch that fits one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posttrain.fast.aliases import Aliases
from posttrain.fast.attention.blocks import Flash, offsets_of
from posttrain.fast.attention.gathered import (
    Gathered,
    GatheredPrompts,
    packed_attention,
    sequences_of,
)
from posttrain.fast.attention.interface import Attention, attending
from posttrain.fast.buckets import Frame, Framed, Frames, fit
from posttrain.fast.graphs import Pool, RecordingError, recording
from posttrain.fast.packing import Packing
from posttrain.models.gpu_memory import alone
from posttrain.types.devices import send

_active = threading.local()


class _Pass:
    """One row through a trunk, with attention of ours, and with ``weights`` in place of its own."""

    def __init__(
        self, trunk: nn.Module, attention: Attention, *, weights: dict[str, Tensor]
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
        return states.squeeze(0)


@contextmanager
def playing(*recordings: Recordings) -> Iterator[None]:
    """Inside, passes of the trunks that have recordings are played from them."""
    before = getattr(_active, "recordings", {})
    _active.recordings = {id(one.trunk): one for one in recordings}
    try:
        yield
    finally:
        _active.recordings = before


@contextmanager
def pausing(*recordings: Recordings) -> Iterator[None]:
    """Inside, passes are computed as recordings would be, without any: for what comes but once."""
    before = [one.paused for one in recordings]
    for one in recordings:
        one.paused = True
    try:
        yield
    finally:
        for one, paused in zip(recordings, before, strict=True):
            one.paused = paused


def recordings_of(trunk: nn.Module) -> Recordings | None:
    """What this trunk may be played from at the moment."""
    found: Recordings | None = getattr(_active, "recordings", {}).get(id(trunk))
    return found


class Recordings:
    """The recordings of a trunk, one for each frame that has come up."""

    def __init__(self, trunk: nn.Module, compute: torch.dtype = torch.float32) -> None:
        self.trunk = trunk
        self.paused = False
        self._compute_in = compute
        self._aliases: Aliases | None = None  # memory that is taken when it is needed
        self.forget()

    @property
    def aliases(self) -> Aliases:
        """What passes are computed with."""
        if self._aliases is None:
            self._aliases = Aliases(self.trunk, self._compute_in)
        return self._aliases

    def forget(self) -> None:
        """Let all recordings go, and their memory with them."""
        self._known: dict[Frame, _Recording] = {}
        self._frames = Frames()
        self.pool = Pool()

    def refresh(self) -> None:
        """Take the weights as they are now."""
        if self._aliases is not None:
            self._aliases.refresh()

    def states(self, tokens: Tensor, packing: Packing) -> Tensor:
        """The states of ``packing.before``; with gradient where enabled. [B, T] → [M, D]."""
        found = sequences_of(packing)
        learns = torch.is_grad_enabled()  # what is only looked at is not worth a recording
        if learns:
            self.aliases.bring_slopes()
        frame = None
        if found.few_keys and not self.paused:
            frame = self._frames.choose(found, new=learns)
        if frame is not None:
            framed = fit(packing, frame, found=found)
            if frame in self._known or self._record(framed, tokens):
                states = self._known[frame].play(tokens, framed)
                return states[send(packing.before, tokens.device)]
        return self._compute(tokens, packing)

    def _record(self, framed: Framed, tokens: Tensor) -> bool:
        """Record a frame; False: this trunk cannot be recorded, and passes will be computed."""
        try:
            self._known[framed.frame] = _Recording(self, framed, tokens=tokens)
        except RecordingError as error:
            self.paused = True
            warnings.warn(str(error), stacklevel=2)
            return False
        self._frames.known.append(framed.frame)
        return True

    def _compute(self, tokens: Tensor, packing: Packing) -> Tensor:
        """The same without a recording. Shapes: [B, T] → [M, D]."""
        source, positions, before = (
            send(places, tokens.device)
            for places in (packing.source, packing.positions, packing.before)
        )
        attention = packed_attention(packing, like=tokens)
        one_pass = _Pass(self.trunk, attention, weights=self.aliases.named)
        with alone:  # it may be compiled now
            return one_pass(tokens.flatten()[source], positions)[before]


class _Recording:
    """A forward and a backward pass of one frame; all that they read stands at fixed addresses."""

    @torch.enable_grad()
    def __init__(self, owner: Recordings, framed: Framed, *, tokens: Tensor) -> None:
        device = tokens.device
        self._offsets = [offsets_of(n).to(device) for n in (framed.queries, framed.keys)]
        self._row = tokens.flatten()[framed.source.to(device)]
        self._positions = framed.positions.to(device)
        self._layout = framed.layout.to(device)
        self._kernel = Flash.at(*self._offsets, longest=framed.frame.longest)
        gathered = Gathered(kernel=self._kernel, layout=self._layout)
        one_pass = _Pass(owner.trunk, GatheredPrompts(gathered), weights=owner.aliases.named)
        aliases = list(owner.aliases.named.values())
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with alone, torch.cuda.stream(stream), _casts_inside():
            # An ordinary pass first: it compiles kernels and sizes workspaces.
            states = one_pass(self._row, self._positions)
            states.backward(torch.zeros_like(states), inputs=aliases)
            del states
        torch.cuda.current_stream(device).wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recording(self._forward, owner.pool), _casts_inside():
            states = one_pass(self._row, self._positions)
        self._slope = torch.zeros_like(states)
        with recording(self._backward, owner.pool):
            states.backward(self._slope, inputs=aliases)
        self._states = states.detach()
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def play(self, tokens: Tensor, framed: Framed) -> Tensor:
        """Bring the inputs to their places, and play. Shapes: [B, T] → [N, D]."""
        device = tokens.device
        for offsets, lengths in zip(self._offsets, (framed.queries, framed.keys), strict=True):
            offsets.copy_(send(offsets_of(lengths), device))
        self._layout.copy_(framed.layout)
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
    """Autocast as it is, without its memory: what it rounds must be rounded anew in every pass."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def recordings_for(*modules: Any, compute: torch.dtype) -> tuple[Recordings, ...]:
    """Recordings for the trunk of each module that has one of its own."""
    trunks = [
        module.get_decoder() if hasattr(module, "get_decoder") else getattr(module, "trunk", None)
        for module in modules
    ]
    return tuple(Recordings(trunk, compute) for trunk in trunks if trunk is not None)
