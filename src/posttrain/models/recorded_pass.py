"""Forward and backward passes of a trunk played from recordings: no launch is waited for.

A decoder of thirty layers launches thousands of kernels for a micro-batch; for small models the
host takes longer to launch them than the GPU to run them. Here each pass is a CUDA graph, recorded
for a few sizes (:mod:`posttrain.models.frames`) and played for every micro-batch that fits one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posttrain.models.attention import attending
from posttrain.models.block_attention import Flash, offsets_of
from posttrain.models.frames import Frame, Framed, Frames, fit
from posttrain.models.gathered_attention import Gathered, GatheredPrompts
from posttrain.models.half import matrices
from posttrain.models.head import HALF
from posttrain.models.packing import Packing
from posttrain.types.devices import send

_active = threading.local()


class _Pass:
    """One row through a trunk, with attention of ours, and with ``weights`` in place of its own."""

    def __init__(
        self, trunk: nn.Module, attention: GatheredPrompts, *, weights: dict[str, Tensor]
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


@contextmanager
def pausing(*recordings: Recordings) -> Iterator[None]:
    """Inside, passes are computed as recordings would be, without any: for what comes but once."""
    for one in recordings:
        one.paused = True
    try:
        yield
    finally:
        for one in recordings:
            one.paused = False


def recordings_of(trunk: nn.Module) -> Recordings | None:
    """What this trunk may be played from at the moment."""
    found: Recordings | None = getattr(_active, "recordings", {}).get(id(trunk))
    return found


class Recordings:
    """The recordings of a trunk, one for each frame that has come up.

    What is differentiated are ``aliases`` of the weights: a weight that some graph of another
    stream still holds could not be recorded. Matrices that autocast would round to ``compute`` in
    every pass are kept rounded (:meth:`refresh`); the others are the same memory under another
    name. The backward pass adds to ``.grad`` where that stands: each weight has one place for it.
    """

    def __init__(self, trunk: nn.Module, compute: torch.dtype = torch.float32) -> None:
        self.trunk = trunk
        learning = {name: w for name, w in trunk.named_parameters() if w.requires_grad}
        self.weights = list(learning.values())
        rounded = matrices(trunk) if compute in HALF else {}
        self.aliases: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach().to(compute if name in rounded else weight.dtype))
            for name, weight in learning.items()
        }
        self.slopes = [torch.zeros_like(weight) for weight in self.weights]
        for alias, slope in zip(self.aliases.values(), self.slopes, strict=True):
            alias.register_post_accumulate_grad_hook(partial(_add_to, slope))
        self.pool = torch.cuda.graph_pool_handle()
        self.frames = Frames()
        self.paused = False
        self._known: dict[Frame, _Recording] = {}

    def states(self, tokens: Tensor, packing: Packing) -> Tensor:
        """The states of ``packing.before``; with gradient where enabled. [B, T] → [M, D]."""
        learns = torch.is_grad_enabled()  # what is only looked at is not worth a recording
        if learns:
            self._bring_slopes()
        frame = None if self.paused else self.frames.choose(packing, new=learns)
        if frame is None:
            states = self._compute(tokens, packing)
        else:
            framed = fit(packing, frame)
            if frame not in self._known:
                self._known[frame] = _Recording(self, framed, tokens=tokens)
            states = self._known[frame].play(tokens, framed)
        return states[send(packing.before, tokens.device)]

    def _compute(self, tokens: Tensor, packing: Packing) -> Tensor:
        """The states of all of a packing, without a recording. Shapes: [B, T] → [N, D]."""
        attention = GatheredPrompts(Gathered.of(packing, like=tokens))
        row = tokens.flatten()[send(packing.source, tokens.device)]
        one_pass = _Pass(self.trunk, attention, weights=self.aliases)
        return one_pass(row, send(packing.positions, tokens.device))

    def refresh(self) -> None:
        """Round the weights again: they may have changed."""
        pairs = zip(self.aliases.values(), self.weights, strict=True)
        rounded = [(alias, weight) for alias, weight in pairs if alias.dtype != weight.dtype]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([alias for alias, _ in rounded], [w for _, w in rounded])

    def _bring_slopes(self) -> None:
        """Have every gradient where the recordings add to it."""
        pairs = list(zip(self.weights, self.slopes, strict=True))
        missing = [slope for weight, slope in pairs if weight.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        for weight, slope in pairs:
            if weight.grad is not None and weight.grad is not slope:
                slope.copy_(weight.grad)
            weight.grad = slope


def _add_to(slope: Tensor, alias: Tensor) -> None:
    """Move a gradient to its place as soon as it is there."""
    assert alias.grad is not None
    slope.add_(alias.grad)
    alias.grad = None


class _Recording:
    """A forward and a backward pass of one frame; all that they read stands at fixed addresses."""

    @torch.enable_grad()
    def __init__(self, owner: Recordings, framed: Framed, *, tokens: Tensor) -> None:
        device = tokens.device
        self._offsets = [offsets_of(n).to(device) for n in (framed.queries, framed.keys)]
        self._row = tokens.flatten()[framed.source.to(device)]
        self._positions = framed.positions.to(device)
        self._keys_at, self._slopes_at = (part.to(device) for part in _places(framed))
        gathered = Gathered(
            kernel=Flash.at(*self._offsets, longest=framed.frame.longest),
            keys_at=self._keys_at,
            slopes_at=self._slopes_at,
        )
        one_pass = _Pass(owner.trunk, GatheredPrompts(gathered), weights=owner.aliases)
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
            states.backward(self._slope, inputs=aliases)
        self._states = states.detach()
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def play(self, tokens: Tensor, framed: Framed) -> Tensor:
        """Bring the inputs to their places, and play. Shapes: [B, T] → [N, D]."""
        device = tokens.device
        for offsets, lengths in zip(self._offsets, (framed.queries, framed.keys), strict=True):
            offsets.copy_(send(offsets_of(lengths), device))
        for kept, places in zip((self._keys_at, self._slopes_at), _places(framed), strict=True):
            kept.copy_(send(places, device))
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


def recordings_for(*modules: Any, compute: torch.dtype) -> tuple[Recordings, ...]:
    """Recordings for the trunk of each module that has one of its own."""
    trunks = [
        module.get_decoder() if hasattr(module, "get_decoder") else getattr(module, "trunk", None)
        for module in modules
    ]
    return tuple(Recordings(trunk, compute) for trunk in trunks if trunk is not None)


def _places(framed: Framed) -> tuple[Tensor, Tensor]:
    """Where keys come from, and where their gradients go: those that nobody sees, anywhere."""
    return framed.keys_at % framed.frame.tokens, framed.keys_at
