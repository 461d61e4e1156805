"""The walk-through's sorting rewards of one list, in place of tensors of them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from posttrain.walkthrough import sorting_rewards


def _of_lists(
    reward: Callable[[Tensor, Tensor], Tensor], prompt: Sequence[int], response: Sequence[int]
) -> float:
    return float(reward(torch.tensor([prompt]), torch.tensor([[response]])))


position_matches = partial(_of_lists, sorting_rewards.position_matches)
inclusion_ordering = partial(_of_lists, sorting_rewards.inclusion_ordering)
exactly_sorted = partial(_of_lists, sorting_rewards.exactly_sorted)
