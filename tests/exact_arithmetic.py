"""Models that compute in float64 throughout, for tests to more digits than float32 has.

Most families compute some parts in float32 whatever the type of their weights: norms, the angles of
rotary positions, the routers of experts, and Gemma 2 the softmax of its attention. What such a part
gives depends in its last digits on the CPU and on how a batch is laid out, so that two right ways
to compute the same agree to 1e-15 on one machine and to 1e-7 on another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _Widened(TorchFunctionMode):
    """Who asks for float32 gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(_wide, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _wide(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, a float64 model computes nothing in float32, forward or backward."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
