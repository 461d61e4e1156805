"""Three rewards for sorting numbers, from dense partial credit to all or nothing.

After the lecture's sorting task (Stanford CS336, 2025, lecture 17). With prompt x, response y and
``s = sorted(x)``, all of length n:

=======================  ============================================  ========
reward                   equation                                      range
=======================  ============================================  ========
``inclusion_ordering``   ``Σ_i [x_i ∈ y] + Σ_{i<n} [y_i ≤ y_{i+1}]``   0 … 2n−1
``position_matches``     ``Σ_i [y_i = s_i]``                           0 … n
``exactly_sorted``       ``[y = s]``                                   0 or 1
=======================  ============================================  ========

Each has a ``batched_`` twin that scores tensors of responses at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def position_matches(prompt: Sequence[int], response: Sequence[int]) -> float:
    """One point for each position that is right: ``Σ_i [y_i = sorted(x)_i]``.

    >>> position_matches([3, 1, 0, 2], [0, 1, 2, 3]), position_matches([3, 1, 0, 2], [0, 3, 1, 2])
    (4.0, 1.0)
    """
    _check_lengths(prompt, response)
    return float(sum(x == y for x, y in zip(sorted(prompt), response, strict=True)))


def inclusion_ordering(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Partial credit: ``Σ_i [x_i ∈ y] + Σ_{i<n} [y_i ≤ y_{i+1}]``.

    One point for each token of the prompt that occurs in the response (a token that occurs twice
    in the prompt earns twice), and one for each adjacent pair of the response that is in order.

    >>> inclusion_ordering([3, 1, 0, 2], [0, 1, 2, 3])  # all four are there, all three pairs rise
    7.0
    >>> inclusion_ordering([3, 1, 0, 2], [7, 2, 2, 5])  # the 2 is there, two pairs do not fall
    3.0
    >>> inclusion_ordering([3, 1, 0, 2], [0, 3, 1, 2])
    6.0
    """
    _check_lengths(prompt, response)
    included = sum(token in response for token in prompt)
    ordered = sum(x <= y for x, y in itertools.pairwise(response))
    return float(included + ordered)


def exactly_sorted(prompt: Sequence[int], response: Sequence[int]) -> float:
    """All or nothing: ``[y = sorted(x)]``.

    >>> exactly_sorted([1, 0, 2], [0, 1, 2]), exactly_sorted([1, 0, 2], [0, 2, 1])
    (1.0, 0.0)
    """
    _check_lengths(prompt, response)
    return float(list(response) == sorted(prompt))


def batched_position_matches(prompts: Tensor, responses: Tensor) -> Tensor:
    """:func:`position_matches` of every response. Shapes: [P, N], [..., P, G, N] → [..., P, G].

    >>> import torch
    >>> batched_position_matches(torch.tensor([[1, 0, 2]]), torch.tensor([[[0, 1, 2], [0, 2, 1]]]))
    tensor([[3., 1.]])
    """
    return _matches(prompts, responses).sum(-1).float()


def batched_inclusion_ordering(prompts: Tensor, responses: Tensor) -> Tensor:
    """:func:`inclusion_ordering` of every response. Shapes: [P, N], [..., P, G, N] → [..., P, G].

    >>> import torch
    >>> prompts, responses = torch.tensor([[1, 0, 2]]), torch.tensor([[[0, 1, 2], [2, 2, 2]]])
    >>> batched_inclusion_ordering(prompts, responses)
    tensor([[5., 3.]])
    """
    _check_shapes(prompts, responses)
    included = (prompts[:, None, :, None] == responses[..., None, :]).any(-1).sum(-1)
    ordered = (responses[..., :-1] <= responses[..., 1:]).sum(-1)
    return (included + ordered).float()


def batched_exactly_sorted(prompts: Tensor, responses: Tensor) -> Tensor:
    """:func:`exactly_sorted` of every response. Shapes: [P, N], [..., P, G, N] → [..., P, G].

    >>> import torch
    >>> batched_exactly_sorted(torch.tensor([[1, 0, 2]]), torch.tensor([[[0, 1, 2], [0, 2, 1]]]))
    tensor([[1., 0.]])
    """
    return _matches(prompts, responses).all(-1).float()


def _matches(prompts: Tensor, responses: Tensor) -> Tensor:
    """Where a response agrees with its sorted prompt. Shapes: [P, N], [..., P, G, N] → the same."""
    _check_shapes(prompts, responses)
    return responses == prompts.sort(-1).values[:, None, :]


def _check_lengths(prompt: Sequence[int], response: Sequence[int]) -> None:
    if len(prompt) != len(response):
        raise ValueError(
            f"response: {len(response)} tokens for a prompt of {len(prompt)}; a sorting reward "
            "compares lists of equal length, so cut or pad the response first"
        )


def _check_shapes(prompts: Tensor, responses: Tensor) -> None:
    shape = responses.shape
    if responses.ndim < 3 or (shape[-3], shape[-1]) != tuple(prompts.shape):
        raise ValueError(
            f"responses: expected shape [..., P, G, N] with P, N = {list(prompts.shape)} as in "
            f"prompts, got {list(shape)}"
        )
