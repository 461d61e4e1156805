"""Log-probs and entropies of tokens from hidden states and a linear head, a chunk at a time.

Forward keeps three numbers a token, backward computes each chunk of logits again and turns it into
its gradient by the closed form, and the gradient of the head grows in place. The peak is one chunk,
whatever the length and vocabulary. Logits that take a small share of a GPU's memory are kept for
backward; their gradient never exists as a whole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.fast.kernels import form_for
from posttrain.fast.kernels.plain import Statistics
from posttrain.models.gpu_memory import whole_bytes
from posttrain.models.head import HALF, Finish
from posttrain.models.logprobs import Entropy
from posttrain.models.sampling import at_least_float32, filter_logits

# Logits computed at once. On a CPU 2**23 … 2**25 are equally fast; a GPU wants products large
# enough to fill it, and few additions to the gradient of a large head: one for each chunk.
CPU_ELEMENTS = 2**25
GPU_ELEMENTS, GPU_SHARE = 2**26, 1 / 128  # at least the first; of the bytes of its memory
KEPT_SHARE = 1 / 12  # of the bytes of a GPU's memory, for logits that are kept for backward


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What a model's head output stands for: what follows the head, then the sampling options."""

    finish: Finish = field(default_factory=Finish)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is asked, and how many rows at a time.

    Top-k and top-p look at logits that are divided by the temperature already; where there is
    neither, the division is left to the kernels (``divisor``), which read the logits anyway.
    """

    distribution: Distribution
    entropy: Entropy
    rows: int
    keep: bool  # all chunks, so that backward need not compute them again

    @property
    def filters(self) -> bool:
        """Whether some tokens may be left out."""
        return self.distribution.top_k > 0 or self.distribution.top_p < 1.0

    @property
    def divisor(self) -> float:
        """What the kernels still have to divide the logits by."""
        return 1.0 if self.filters else self.distribution.temperature

    @property
    def cap(self) -> float | None:
        """The soft cap, in the unit of the logits that the kernels are given."""
        cap = self.distribution.finish.cap
        return cap if cap is None else cap * self.divisor / self.distribution.temperature

    @property
    def outer_derivative(self) -> float:
        """The derivative of what happens to logits outside the kernels, but for the soft cap."""
        return self.distribution.finish.derivative * self.divisor / self.distribution.temperature


def chunk_elements_for(device: torch.device, *, memory: float | None = None) -> int:
    """The logits to compute at once on a device, by default; of one with so many bytes if given."""
    if device.type != "cuda":
        return CPU_ELEMENTS
    found = whole_bytes(device) if memory is None else memory
    return max(GPU_ELEMENTS, int(GPU_SHARE * found) // 4)


def kept_elements_for(device: torch.device, *, memory: float | None = None) -> int:
    """The logits to keep for backward on a device, by default: what one chunk holds, or more."""
    chunk = chunk_elements_for(device, memory=memory)
    if device.type != "cuda":
        return chunk
    return max(chunk, int(KEPT_SHARE * (whole_bytes(device) if memory is None else memory)) // 4)


def token_scores(
    states: Tensor,
    tokens: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    distribution: Distribution | None = None,
    entropy: Entropy = "value",
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``log p(token)`` and the entropy of ``p = softmax(finish(states · weightᵀ + bias) / T)``.

    Top-k and top-p restrict the softmax to the tokens kept, of which the chosen one always is; the
    set is a constant for the gradient. The product is computed in the type of ``states``; of half
    precision factors it is float32. ``entropy`` "none" gives zeros, "value" no gradient.
    Shapes: states [N, D], tokens [N], weight [V, D], bias [V] → [N], [N]; float32 or float64.

    >>> logprobs, entropies = token_scores(
    ...     torch.zeros(1, 2), torch.tensor([3]), weight=torch.ones(4, 2)
    ... )
    >>> logprobs.exp(), entropies.exp().round(decimals=3)
    (tensor([0.2500]), tensor([4.]))
    """
    given = distribution or Distribution()
    # Greedy decoding (0) speaks of the model's own distribution, see sampling.scale_logits.
    given = replace(given, temperature=given.temperature or 1.0)
    elements = chunk_elements or chunk_elements_for(states.device)
    rows = max(1, elements // len(weight))
    learns = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    keep = learns and len(tokens) * len(weight) <= (
        chunk_elements or kept_elements_for(states.device)
    )
    plan = _Plan(distribution=given, entropy=entropy, rows=rows, keep=keep)
    return _TokenScores.apply(states, weight, bias, tokens, plan)


class _TokenScores(torch.autograd.Function):
    """states, weight, bias, tokens, plan → log-probs and entropies; see :func:`token_scores`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        states, weight, bias, tokens, plan = inputs
        parts, ctx.kept = [], []
        with torch.autocast(states.device.type, enabled=False):
            head = _Head(states, weight, bias=bias, plan=plan)
            for rows in _chunks(len(tokens), plan.rows):
                logits = head.logits(states[rows], tokens[rows])
                parts.append(_score(logits, tokens[rows], plan=plan))
                if plan.keep:
                    ctx.kept.append(logits)
                del logits  # free this chunk before the next one
        found = Statistics(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if plan.entropy != "gradient":
            ctx.mark_non_differentiable(found.entropies)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.types = plan, (weight.dtype, None if bias is None else bias.dtype)
        numbers = (found.log_sums, found.entropies)
        ctx.save_for_backward(states, head.weight, head.bias, tokens, *numbers)
        return found.logprobs, found.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, bias, tokens, log_sums, entropies = ctx.saved_tensors
        sums = _Sums.zeros(states, weight, wanted=ctx.needs_input_grad)
        given = {"log_sums": log_sums, "of_logprobs": gradients[0]}
        if given["of_logprobs"] is None:
            given["of_logprobs"] = torch.zeros_like(log_sums)
        if gradients[1] is not None:
            given |= {"entropies": entropies, "of_entropies": gradients[1]}
        with torch.autocast(states.device.type, enabled=False):
            head = _Head(states, weight, bias=bias, plan=ctx.plan)
            for rows in _chunks(len(tokens), ctx.plan.rows):
                # Kept logits are overwritten below; a second backward computes them again.
                kept = ctx.kept.pop(0) if ctx.kept else None
                logits = head.logits(states[rows], tokens[rows]) if kept is None else kept
                numbers = {name: column[rows] for name, column in given.items()}
                change = _change(logits, tokens[rows], head=head, numbers=numbers)
                sums.add(change, rows, states=states[rows], weight=head.weight)
                del kept, logits, change  # free this chunk before the next one
        return *sums.as_types(states.dtype, *ctx.types), None, None


class _Head:
    """The head as the product wants it, cast once for all chunks.

    On a GPU half precision factors have a float32 product; elsewhere there is no such product, and
    the factors are widened to float32.
    """

    def __init__(self, states: Tensor, weight: Tensor, *, bias: Tensor | None, plan: _Plan) -> None:
        self.weight = _factor(weight.to(states.dtype))
        self.bias = bias if bias is None else bias.to(at_least_float32(states[:0]).dtype)
        self.plan = plan
        self._buffer: Tensor | None = None  # reused by all chunks: fresh memory is slow on a CPU

    def logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Logits of the distribution, but for the division by ``plan.divisor``. [n, D] → [n, V]."""
        given, logits = self.plan.distribution, self._product(_factor(states))
        if self.bias is not None:
            logits.add_(self.bias)
        logits = given.finish.apply_(logits)
        if not self.plan.filters:
            return logits
        if given.temperature != 1.0:
            logits.div_(given.temperature)
        kept = filter_logits(logits, top_k=given.top_k, top_p=given.top_p)
        index = tokens[:, None]
        return kept if kept is logits else kept.scatter_(-1, index, logits.gather(-1, index))

    def _product(self, factor: Tensor) -> Tensor:
        if self.weight.dtype in HALF:
            return torch.mm(factor, self.weight.t(), out_dtype=torch.float32)
        if self._buffer is None or self.plan.keep:
            self._buffer = factor.new_empty(len(factor), len(self.weight))
        return torch.mm(factor, self.weight.t(), out=self._buffer[: len(factor)])


def _factor(values: Tensor) -> Tensor:
    return values if values.is_cuda else at_least_float32(values)


def _chunks(count: int, rows: int) -> list[slice]:
    """Slices of at most ``rows`` rows; for no rows, one empty slice."""
    return [slice(start, start + rows) for start in range(0, max(count, 1), rows)]


def _score(logits: Tensor, tokens: Tensor, *, plan: _Plan) -> Statistics:
    return form_for(logits).statistics(
        logits, tokens, temperature=plan.divisor, entropy=plan.entropy != "none", keep=plan.keep
    )


def _change(logits: Tensor, tokens: Tensor, *, head: _Head, numbers: dict[str, Tensor]) -> Tensor:
    """The gradient of one chunk at the head's own output, before what follows it. Shape: [n, V].

    It is linear in the gradients from above, so constant factors are multiplied into those [n].
    """
    for name in ("of_logprobs", "of_entropies"):
        if name in numbers:
            numbers[name] = numbers[name].to(logits.dtype) * head.plan.outer_derivative
    return form_for(logits).gradient(
        logits,
        tokens,
        **numbers,
        temperature=head.plan.divisor,
        cap=head.plan.cap,
        dtype=head.weight.dtype,
    )


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """The gradients of states, weight and bias while chunks are added; None where not wanted."""

    states: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, states: Tensor, weight: Tensor, *, wanted: tuple[bool, ...]) -> _Sums:
        wide = at_least_float32(weight[:0]).dtype
        return cls(
            states=torch.empty_like(states, dtype=weight.dtype) if wanted[0] else None,
            weight=torch.zeros_like(weight, dtype=wide) if wanted[1] else None,
            bias=weight.new_zeros(len(weight), dtype=wide) if wanted[2] else None,
        )

    def add(self, change: Tensor, rows: slice, *, states: Tensor, weight: Tensor) -> None:
        """Add one chunk. Shapes: change [n, V], states [n, D], weight [V, D]."""
        if self.states is not None:
            torch.mm(change, weight, out=self.states[rows])
        if self.weight is not None:
            _add_product(self.weight, change.t(), factor=_factor(states))
        if self.bias is not None:
            self.bias.add_(change.sum(0, dtype=self.bias.dtype))

    def as_types(self, *dtypes: torch.dtype | None) -> tuple[Tensor | None, ...]:
        """The sums in the types of states, weight and bias."""
        sums = (self.states, self.weight, self.bias)
        return tuple(
            None if total is None else total.to(dtype)
            for total, dtype in zip(sums, dtypes, strict=True)
        )


def _add_product(total: Tensor, changes: Tensor, *, factor: Tensor) -> None:
    """``total += changes · factor`` without rounding the product. [V, D], [V, n], [n, D]."""
    if total.dtype == changes.dtype:
        total.addmm_(changes, factor)
    elif _adds_in_float32(total.device):
        torch.addmm(total, changes, factor, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(changes, factor, out_dtype=torch.float32))


@functools.cache
def _adds_in_float32(device: torch.device) -> bool:
    """Whether this PyTorch adds half precision products to a float32 sum in place."""
    half = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # some releases want all three tensors of one type
        return False
    return bool((total == 17).all())
