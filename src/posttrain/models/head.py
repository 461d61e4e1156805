"""From hidden states to logits, as a step of its own: logits need never exist all at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.algorithms import ops
from posttrain.models.sampling import at_least_float32
from posttrain.types.batch import chosen_indices
from posttrain.types.ways import Support, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.types import Batch

_VERDICT = "_posttrain_logits_are_head_of_states"
HALF = (torch.bfloat16, torch.float16)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def trunk_states(trunk: nn.Module, tokens: Tensor) -> Tensor:
    """The last hidden state of every position, of a decoder without a head. [B, T] → [B, T, D].

    Every position counts as real: attention is causal and batches are padded on the right, so no
    real token sees padding. To say so keeps models from guessing what is padding by token ids.
    """
    states: Tensor = trunk(**_inputs(tokens)).last_hidden_state
    return states


def states_before(trunk: nn.Module, batch: Batch) -> Tensor:
    """The last hidden state before each chosen token, in the order of ``batch.tokens[batch.mask]``.

    ``trunk`` is a decoder without a head. Shapes: tokens [B, T] → [M, D], M tokens are chosen.
    """
    return ops.shift(trunk_states(trunk, batch.tokens))[batch.mask]


def state_values(states: Tensor, batch: Batch, *, head: nn.Linear) -> Tensor:
    """The head on the state before each chosen token, in float32 at least.

    Shapes: [M, D], in the order of ``batch.tokens[batch.mask]`` → [B, T]; 0 where none was chosen.
    """
    before = at_least_float32(states)
    with torch.autocast(before.device.type, enabled=False):
        values = head(before.to(head.weight.dtype))[:, 0]
    zeros = values.new_zeros(batch.tokens.numel())
    return zeros.index_copy(0, chosen_indices(batch), values).view(batch.tokens.shape)


def full_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The model's own logits at every position. Shapes: [B, T] → [B, T, V]."""
    return model(**_inputs(tokens)).logits


def _inputs(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}


def project(model: PreTrainedModel, states: Tensor) -> Tensor:
    """The logits of hidden states, in float32 (float64 for a float64 model). [N, D] → [N, V].

    A model that computes in half precision keeps its fast product, but the result is not rounded
    to half precision: a bfloat16 logit of 20 is off by up to 0.06, and so is its log-prob.
    """
    head, finish, compute = model.get_output_embeddings(), finish_of(model), compute_type(states)
    if not (is_plain(head) and compute in HALF):
        return finish(at_least_float32(head(states)))
    logits = _Float32Product.apply(states.to(compute), head.weight.to(compute))
    return finish(logits if head.bias is None else logits + head.bias.float())


def is_plain(head: nn.Module) -> bool:
    """Whether a head is its weight and bias and nothing else, so that it need not be called.

    Another forward (an adapter, a quantised layer), a hook (a sharded layer) or a weight of another
    kind (a piece of it) must be called. A layer that only multiplies faster says ``is_plain``.
    """
    return (
        (type(head).forward is nn.Linear.forward or getattr(head, "is_plain", False) is True)
        and not any(getattr(head, name) for name in HOOKS)
        and type(head.weight) in (nn.Parameter, Tensor)
    )


def compute_type(states: Tensor) -> torch.dtype:
    """The type that a product with these states is computed in: autocast's, or their own."""
    kind = states.device.type
    if torch.is_autocast_enabled(kind) and states.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return states.dtype


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradient, autocast or TF32 inside: what is to be decided must not drown in rounding."""
    products = torch.backends.cuda.matmul  # of a GPU alone: a CPU's would choose other kernels
    before, products.fp32_precision = products.fp32_precision, "ieee"
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        products.fp32_precision = before


def computing_in(compute: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, passes compute in this type; in float32 each weight is computed in its own."""
    if compute == torch.float32:
        return nullcontext()
    # Without autocast's cache: no pass casts a weight twice, CUDA graphs must not read what was
    # cached outside of them, and compiled layers want one setting throughout.
    return torch.autocast(device.type, dtype=compute, cache_enabled=False)


@remembered(_VERDICT)
def logits_are_head_of_states(model: PreTrainedModel, tokens: Tensor) -> Support:
    """Whether :func:`project` of the hidden states really gives this model's logits.

    Compared on a few tokens: some models do more after the head than scale or soft-cap, and a
    log-prob that is nearly right is worse than a slow one.
    """
    with full_precision(model.device):
        expected, found = _logits_both_ways(model, tokens[:1, :8])
    if found is not None and found.shape == expected.shape:
        # The same products, though perhaps of other kernels: they differ by rounding at most.
        allowed = max(64 * torch.finfo(torch.float32).eps, 4 * torch.finfo(found.dtype).eps)
        difference = float((found.double() - expected.double()).abs().max())
        if difference <= allowed * float(expected.abs().max()):
            return Support()
    why_not = "its logits are not its output head applied to its hidden states"
    warnings.warn(
        f"{type(model).__name__}: {why_not}, so whole logits are computed for every micro-batch; "
        "that is right, but takes more memory: use smaller micro-batches",
        stacklevel=2,
    )
    return Support(why_not)


def _logits_both_ways(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """The model's own logits, and those of its head; None for a model that has no such parts.

    Of states of our own in place of the decoder's: a trained model can have states so large that
    their rounding hides what is done to the logits.
    """
    head, drawn = model.get_output_embeddings(), torch.Generator().manual_seed(0)
    given: list[Tensor] = []

    def replace(*called: Any) -> Any:
        output = called[-1]  # after the module and its arguments
        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
            own = output.last_hidden_state
            given.append(torch.randn(own.shape, generator=drawn).to(own))
            output.last_hidden_state = given[0]
        return output

    hook = model.get_decoder().register_forward_hook(replace)
    try:
        expected = full_logits(model, tokens)
    finally:
        hook.remove()
    return expected, finish_of(model)(head(given[0])) if given and head is not None else None


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What some models do after the head: Cohere and Granite scale, Gemma soft-caps.

    ``x·multiplier / divisor``, then ``cap·tanh(x / cap)``.

    >>> Finish(multiplier=3.0, divisor=2.0)(torch.tensor([2.0])), Finish(multiplier=3.0).derivative
    (tensor([3.]), 3.0)
    """

    multiplier: float | None = None
    divisor: float | None = None
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits, of what its head gave. Shapes: [..., V] → [..., V]."""
        logits = logits if self.multiplier is None else logits * self.multiplier
        logits = logits if self.divisor is None else logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def apply_(self, logits: Tensor) -> Tensor:
        """The same in place, where there is no gradient to keep anything for."""
        if self.multiplier is not None:
            logits.mul_(self.multiplier)
        if self.divisor is not None:
            logits.div_(self.divisor)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    @property
    def derivative(self) -> float:
        """The derivative, but for the soft cap's."""
        return (self.multiplier or 1.0) / (self.divisor or 1.0)


def finish_of(model: PreTrainedModel) -> Finish:
    """What this model does after its head, as its configuration says."""
    config = model.config.get_text_config()
    return Finish(
        multiplier=getattr(config, "logit_scale", None),
        divisor=getattr(config, "logits_scaling", None),
        cap=getattr(config, "final_logit_softcapping", None),
    )


class _Float32Product(torch.autograd.Function):
    """``states · weightᵀ`` of half-precision factors, with a result that stays float32."""

    @staticmethod
    def forward(ctx: Any, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        states, weight = factors
        with torch.autocast(states.device.type, enabled=False):
            if states.is_cuda:  # the other devices have no product of this kind
                return torch.mm(states, weight.t(), out_dtype=torch.float32)
            return states.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        gradient = gradients[0].to(states.dtype)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.t() @ states if ctx.needs_input_grad[1] else None,
        )
