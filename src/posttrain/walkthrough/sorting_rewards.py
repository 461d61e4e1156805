"""Three rewards for sorting numbers, of tensors of responses at once.

After the lecture's sorting task (Stanford CS336, 2025, lecture 17). With prompt x, response y and
``s = sorted(x)``, all of length n:

=======================  ============================================  ========
reward                   equation                                      range
=======================  ============================================  ========
``inclusion_ordering``   ``Σ_i [x_i ∈ y] + Σ_{i<n} [y_i ≤ y_{i+1}]``   0 … 2n−1
``position_matches``     ``Σ_i [y_i = s_i]``                           0 … n
``exactly_sorted``       ``[y = s]``                                   0 or 1
=======================  ============================================  ========
"""

from __future__ import annotations

from torch import Tensor


def position_matches(prompts: Tensor, responses: Tensor) -> Tensor:
    """``Σ_i [y_i = sorted(x)_i]``. Shapes: [P, N], [..., P, G, N] → [..., P, G].

    >>> import torch
    >>> position_matches(torch.tensor([[1, 0, 2]]), torch.tensor([[[0, 1, 2], [0, 2, 1]]]))
    tensor([[3., 1.]])
    """
    return _matches(prompts, responses).sum(-1).float()


def inclusion_ordering(prompts: Tensor, responses: Tensor) -> Tensor:
    """``Σ_i [x_i ∈ y] + Σ_{i<n} [y_i ≤ y_{i+1}]``. Shapes: [P, N], [..., P, G, N] → [..., P, G].

    >>> import torch
    >>> prompts, responses = torch.tensor([[1, 0, 2]]), torch.tensor([[[0, 1, 2], [2, 2, 2]]])
    >>> inclusion_ordering(prompts, responses)
    tensor([[5., 3.]])
    """
    _check_shapes(prompts, responses)
    included = (prompts[:, None, :, None] == responses[..., None, :]).any(-1).sum(-1)
    ordered = (responses[..., :-1] <= responses[..., 1:]).sum(-1)
    return (included + ordered).float()


def exactly_sorted(prompts: Tensor, responses: Tensor) -> Tensor:
    """``[y = sorted(x)]``. Shapes: [P, N], [..., P, G, N] → [..., P, G].

    >>> import torch
    >>> exactly_sorted(torch.tensor([[1, 0, 2]]), torch.tensor([[[0, 1, 2], [0, 2, 1]]]))
    tensor([[1., 0.]])
    """
    return _matches(prompts, responses).all(-1).float()


def _matches(prompts: Tensor, responses: Tensor) -> Tensor:
    """Where a response agrees with its sorted prompt. Shapes: [P, N], [..., P, G, N] → the same."""
    _check_shapes(prompts, responses)
    return responses == prompts.sort(-1).values[:, None, :]


def _check_shapes(prompts: Tensor, responses: Tensor) -> None:
    shape = responses.shape
    if responses.ndim < 3 or (shape[-3], shape[-1]) != tuple(prompts.shape):
        raise ValueError(
            f"responses: expected shape [..., P, G, N] with P, N = {list(prompts.shape)} as in "
            f"prompts, got {list(shape)}"
        )
