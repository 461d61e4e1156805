"""What the families compute in: the reason for every tolerance of tests that compare two ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_arithmetic import float64_throughout
from models.families import FAMILIES, UNUSUAL, batch, build, naive
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of a float64 model these compute in float64 alone; all others have parts in float32.
FLOAT64_ALONE = {"gpt2"}


class _Types(TorchDispatchMode):
    """The floating types of everything that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self.seen |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return given


def types_of(name: str) -> set[torch.dtype]:
    """What a forward and a backward pass of a float64 model compute in."""
    model = build(name)
    with _Types() as types:
        logprobs, entropies = naive(model, batch())
        (logprobs.sum() + entropies.sum()).backward()
    return types.seen


@pytest.mark.parametrize("name", [*FAMILIES, *UNUSUAL])
def test_float64_throughout_leaves_no_float32(name: str) -> None:
    with float64_throughout():
        assert types_of(name) == {torch.float64}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", [*FAMILIES, *UNUSUAL])
def test_a_float64_model_has_parts_in_float32(name: str) -> None:
    """Not a wish: the day a family no longer rounds, it can be compared without the widening."""
    wanted = {torch.float64} if name in FLOAT64_ALONE else {torch.float32, torch.float64}
    assert types_of(name) == wanted
