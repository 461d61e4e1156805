"""Forward and backward passes of a trunk (a decoder without its head) as replayed CUDA graphs.

A decoder of thirty layers launches thousands of kernels for a micro-batch; for small models the
host takes longer to launch them than the GPU to run them. Here each pass is one CUDA graph,
captured for a few sizes (:mod:`posttrain.fast.buckets`) and replayed for every micro-batch that
fits one.
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

from posttrain.fast.attention.blockwise import Flash, offsets_of
from posttrain.fast.attention.gathered import (
    Gathered,
    GatheredPrompts,
    packed_attention,
    sequences_of,
)
from posttrain.fast.attention.interface import Attention, attending
from posttrain.fast.buckets import Bucket, Bucketed, Buckets, fit
from posttrain.fast.cast_copy import Aliases
from posttrain.fast.graphs import CaptureError, Pool, capturing
from posttrain.fast.packing import Packing
from posttrain.models.gpu_memory import capture_lock
from posttrain.types.batch import send

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
def replaying(*captured: CapturedPasses) -> Iterator[None]:
    """Inside, passes of these trunks are replayed from CUDA graphs."""
    before = getattr(_active, "captured", {})
    _active.captured = {id(one.trunk): one for one in captured}
    try:
        yield
    finally:
        _active.captured = before


@contextmanager
def pausing(*captured: CapturedPasses) -> Iterator[None]:
    """Inside, passes are computed the same way but not captured: for batches that come once."""
    before = [one.paused for one in captured]
    for one in captured:
        one.paused = True
    try:
        yield
    finally:
        for one, paused in zip(captured, before, strict=True):
            one.paused = paused


def passes_of(trunk: nn.Module) -> CapturedPasses | None:
    """The captured passes of this trunk, inside :func:`replaying`."""
    found: CapturedPasses | None = getattr(_active, "captured", {}).get(id(trunk))
    return found


class CapturedPasses:
    """The captured passes of a trunk, one for each bucket that has come up."""

    def __init__(self, trunk: nn.Module, compute: torch.dtype = torch.float32) -> None:
        self.trunk = trunk
        self.paused = False
        self._compute_in = compute
        self._aliases: Aliases | None = None  # made when they are first needed: they take memory
        self.forget()

    @property
    def aliases(self) -> Aliases:
        """The weights that passes are computed with."""
        if self._aliases is None:
            self._aliases = Aliases(self.trunk, self._compute_in)
        return self._aliases

    def forget(self) -> None:
        """Free all captured passes and their memory."""
        self._known: dict[Bucket, _CapturedPass] = {}
        self._buckets = Buckets()
        self.pool = Pool()

    def refresh(self) -> None:
        """Bring the cast weights up to date."""
        if self._aliases is not None:
            self._aliases.refresh()

    def states(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden state just before each token the policy chose. Shapes: [B, T] → [M, D].

        M such tokens, D hidden size; with gradient where gradients are enabled.
        """
        found = sequences_of(packing)
        learns = torch.is_grad_enabled()  # inference alone is not worth a capture
        if learns:
            self.aliases.attach_gradients()
        bucket = None
        if found.gather_pays_off and not self.paused:
            bucket = self._buckets.choose(found, new=learns)
        if bucket is not None:
            bucketed = fit(packing, bucket, found=found)
            if bucket in self._known or self._capture(bucketed, tokens):
                states = self._known[bucket].replay(tokens, bucketed)
                return states[send(packing.before, tokens.device)]
        return self._compute(tokens, packing)

    def _capture(self, bucketed: Bucketed, tokens: Tensor) -> bool:
        """Capture a pass of this size; False: the trunk cannot be captured."""
        try:
            self._known[bucketed.bucket] = _CapturedPass(self, bucketed, tokens=tokens)
        except CaptureError as error:
            self.paused = True  # never try again
            warnings.warn(str(error), stacklevel=2)
            return False
        self._buckets.known.append(bucketed.bucket)
        return True

    def _compute(self, tokens: Tensor, packing: Packing) -> Tensor:
        """The same pass, launched kernel by kernel. Shapes: [B, T] → [M, D]."""
        source, positions, before = (
            send(indices, tokens.device)
            for indices in (packing.source, packing.positions, packing.before)
        )
        attention = packed_attention(packing, like=tokens)
        one_pass = _Pass(self.trunk, attention, weights=self.aliases.named)
        with capture_lock:  # the first pass compiles, which breaks a capture of another thread
            return one_pass(tokens.flatten()[source], positions)[before]


class _CapturedPass:
    """A forward and a backward pass of one bucket, which read their inputs at fixed addresses."""

    @torch.enable_grad()
    def __init__(self, owner: CapturedPasses, bucketed: Bucketed, *, tokens: Tensor) -> None:
        device = tokens.device
        self._offsets = [offsets_of(n).to(device) for n in (bucketed.queries, bucketed.keys)]
        self._row = tokens.flatten()[bucketed.source.to(device)]
        self._positions = bucketed.positions.to(device)
        self._layout = bucketed.layout.to(device)
        self._kernel = Flash.at(*self._offsets, longest=bucketed.bucket.longest)
        gathered = Gathered(kernel=self._kernel, layout=self._layout)
        one_pass = _Pass(owner.trunk, GatheredPrompts(gathered), weights=owner.aliases.named)
        aliases = list(owner.aliases.named.values())
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with capture_lock, torch.cuda.stream(stream), _autocast_without_cache():
            # An ordinary pass first: it compiles kernels and sizes workspaces.
            states = one_pass(self._row, self._positions)
            states.backward(torch.zeros_like(states), inputs=aliases)
            del states
        torch.cuda.current_stream(device).wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capturing(self._forward, owner.pool), _autocast_without_cache():
            states = one_pass(self._row, self._positions)
        self._gradient = torch.zeros_like(states)
        with capturing(self._backward, owner.pool):
            states.backward(self._gradient, inputs=aliases)
        self._states = states.detach()
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def replay(self, tokens: Tensor, bucketed: Bucketed) -> Tensor:
        """Copy the inputs to the captured addresses, and replay. Shapes: [B, T] → [N, D]."""
        device = tokens.device
        for offsets, lengths in zip(self._offsets, (bucketed.queries, bucketed.keys), strict=True):
            offsets.copy_(send(offsets_of(lengths), device))
        self._layout.copy_(bucketed.layout)
        torch.take(tokens, send(bucketed.source, device), out=self._row)
        self._positions.copy_(send(bucketed.positions, device))
        states: Tensor = _Replayed.apply(self._anchor, self)
        return states

    def forward(self) -> Tensor:
        """Replay the forward pass."""
        self._forward.replay()
        return self._states

    def backward(self, gradient: Tensor) -> None:
        """Replay the backward pass, which adds to the gradients of the weights."""
        self._gradient.copy_(gradient)
        self._backward.replay()


class _Replayed(torch.autograd.Function):
    """A replay as one operation of autograd.

    The anchor is an input that needs a gradient, so that autograd calls ``backward``.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.captured = given[1]
        states: Tensor = given[1].forward()
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        ctx.captured.backward(gradients[0])
        return None, None


@contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Autocast as it is, without its cache: every replay must cast the weights again."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def captured_passes(*modules: Any, compute: torch.dtype) -> tuple[CapturedPasses, ...]:
    """Captured passes of each module with its own decoder (a shared value head has none)."""
    trunks = [
        module.get_decoder() if hasattr(module, "get_decoder") else getattr(module, "trunk", None)
        for module in modules
    ]
    return tuple(CapturedPasses(trunk, compute) for trunk in trunks if trunk is not None)
