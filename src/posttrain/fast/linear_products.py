"""Products of linear layers by oneDNN, on CPUs whose AVX-512 units MKL leaves idle.

PyTorch multiplies float32 matrices with MKL, which has AVX-512 kernels for Intel's CPUs alone; on
AMD's it computes with vectors of half that size. oneDNN, which PyTorch brings for other layers, has
them for both: on a Zen 5 core the products of a small model are 2.2 times as fast. The plain twin
is :func:`torch.nn.functional.linear`; sums are rounded in another order.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posttrain.models.adapters import AdaptedLinear

# Multiplications from which on it is faster (Zen 5); below, a call costs more than the product.
WORTHWHILE = 2**20
# Rows of a sampling step that come again and again; preparing for others costs what they gain.
STEP, MANY = 16, 1024


class PlainInPickles:
    """Mixed into the class that a layer is given in place: a copy has it, a pickle the plain one.

    So a model that was trained is loaded where there is no posttrain.
    """

    plain: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The way of protocol 0, which any protocol may take: it alone lets the class be another.
        make, (_, *given), *state = cast(Any, super().__reduce_ex__(0))
        return make, (self.plain, *given), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainInPickles:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


class QuickLinear(PlainInPickles, nn.Linear):
    """A linear layer, and nothing more, whose product is :func:`linear`."""

    plain, is_plain = nn.Linear, True

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return linear(input, self.weight, bias=self.bias)


class QuickAdapted(PlainInPickles, AdaptedLinear):
    """A linear layer with an adapter; the product of what is kept as it is is :func:`linear`."""

    plain = AdaptedLinear

    def product(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] → [..., out]."""
        return linear(states, self.weight.to(states.dtype), bias=bias)


QUICK: dict[type, type] = {nn.Linear: QuickLinear, AdaptedLinear: QuickAdapted}


def quicken_linears(model: nn.Module) -> None:
    """Have the linear layers of a model multiply faster, in place, where this CPU gains by it.

    A copy of the model does as the model does. A layer on another device, or of another type than
    float32, is left alone; one that comes there later computes as if it had been.
    """
    if not pays_off():
        return
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if type(layer) in QUICK and _takes(layer.weight):
            layer.__class__ = QUICK[type(layer)]


@functools.cache
def pays_off() -> bool:
    """Whether MKL leaves AVX-512 idle on this CPU, and oneDNN does not."""
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    tell: Any = getattr(torch.cpu, "get_capabilities", dict)  # not every release of PyTorch has it
    found: dict[str, Any] = tell()
    idle = found.get("avx512_f", False) and "AMD" in found.get("cpu_name", "")
    return bool(libraries and idle) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(states: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """``states · weightᵀ + bias`` by oneDNN; small products and other types are PyTorch's own.

    Shapes: [..., in], [out, in], [out] → [..., out].
    """
    if (
        torch.compiler.is_compiling()  # asked first: what is asked of shapes would be compiled in
        or states.numel() * len(weight) < WORTHWHILE
        or not (_takes(states) and _takes(weight) and (bias is None or _takes(bias)))
        or states.shape[-1] != weight.shape[1]  # PyTorch says what is wrong with that
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()  # vmap, jacrev …: they know PyTorch's own
    ):
        return nn.functional.linear(states, weight, bias)
    if torch.is_grad_enabled():
        found: Tensor = _Linear.apply(states, weight, bias)
        return found
    rows = states.numel() // states.shape[-1]
    if rows < MANY and rows % STEP:
        return nn.functional.linear(states, weight, bias)
    return _multiply(states, weight, bias=bias)


def _takes(values: Tensor) -> bool:
    """Whether this is a float32 tensor of a CPU, and all of it: not a piece, on several ranks."""
    plain = type(values) in (nn.Parameter, Tensor)
    return plain and values.dtype == torch.float32 and values.device.type == "cpu"


class _Linear(torch.autograd.Function):
    """states, weight, bias → :func:`linear` of them, whose gradients are such products too."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        states, weight, bias = given
        ctx.shape = states.shape
        ctx.save_for_backward(states if ctx.needs_input_grad[1] else None, weight)
        return _multiply(states, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, len(weight))
        of_states = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_states = _multiply(rows, weight.t()).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = _summed(rows, states.reshape(-1, states.shape[-1]))
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_states, of_weight, of_bias


def _summed(rows: Tensor, states: Tensor) -> Tensor:
    """``rowsᵀ · states``: [m, n], [m, k] → [n, k]; the narrower one is transposed by a copy."""
    if rows.shape[1] <= states.shape[1]:
        return _multiply(rows.t(), states.t())
    return _multiply(states.t(), rows.t()).t()


def _multiply(rows: Tensor, columns: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """``rows · columnsᵀ + bias``: [..., k], [n, k], [n] → [..., n]."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, columns, bias, "none", [], "")
    return found
