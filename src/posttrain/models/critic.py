"""The critic: a value for every state, by a trunk of its own or on the policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.adapters import copy_of_trained
from posttrain.models.head import state_values, states_before, trunk_states
from posttrain.models.load import Policy
from posttrain.models.reward import check_same_tokens, load_reward
from posttrain.types import Batch

States = Callable[[nn.Module, Batch], Tensor]


class Critic(nn.Module):
    """``V(s)`` of the state in which each token is chosen: a linear head on hidden states.

    A separate critic trains its whole trunk, or adapters of its own beside the policy's weights; a
    shared one owns the head alone, and asked by itself it reads the policy's trunk without
    gradient. In an ordinary step a shared head is given to
    :func:`posttrain.fast.score.score_tokens`, so that the trunk runs once and learns from both.
    """

    def __init__(self, trunk: nn.Module, head: nn.Linear, *, shared: bool = False) -> None:
        super().__init__()
        self.head = head
        self.shared = shared
        self.trunk = None if shared else trunk
        self._borrowed = [trunk] if shared else []  # in a list: the policy's weights stay its own

    def forward(self, batch: Batch, *, states: States = states_before) -> Tensor:
        """Values [B, T], indexed by the token about to be chosen; 0 where the mask is False.

        ``states`` computes the hidden states before those tokens, with a trunk.
        """
        if self.trunk is not None:
            return state_values(states(self.trunk, batch), batch, head=self.head)
        with torch.no_grad():
            found = states(self._borrowed[0], batch)
        return state_values(found, batch, head=self.head)


def shared_critic(policy: Policy) -> Critic:
    """A value head on the policy's own trunk; it starts at V = 0."""
    trunk: Any = policy.model.get_decoder()
    return Critic(trunk, _zero_head(policy), shared=True)


def separate_critic(policy: Policy, source: str = "policy") -> Critic:
    """A critic with a trunk of its own: a copy of the policy's, or from a reward model's folder.

    From the policy it starts at V = 0; from a reward model, at that model's normalised score of
    the text so far. A reward model must know the same tokens as the policy.
    """
    if source == "policy":
        return Critic(copy_of_trained(policy.model.get_decoder()), _zero_head(policy))
    weight = next(policy.model.parameters())
    reward = load_reward(source, device=str(weight.device))
    check_same_tokens(reward, policy, kind="rl.critic.source")
    head = nn.Linear(reward.head.in_features, 1, device=weight.device)
    with torch.no_grad():
        head.weight.copy_(reward.head.weight / reward.deviation)
        offset = 0.0 if reward.head.bias is None else reward.head.bias.item()
        head.bias.fill_((offset - reward.mean) / reward.deviation)
    return Critic(reward.model.base_model, head)


def _zero_head(policy: Policy) -> nn.Linear:
    weight = next(policy.model.parameters())
    with torch.no_grad():  # some models project their states: the config does not say to what
        token = torch.tensor([[policy.pad_token]], device=weight.device)
        width = trunk_states(policy.model.get_decoder(), token).shape[-1]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    head = nn.Linear(width, 1, device=weight.device, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
