"""The lecture's sorting model, many independent copies of it in one set of tensors.

Shapes: L lane (one independent copy), P prompt, G response, N position, V vocabulary,
D dimension. A lane is one run: its parameters, its random numbers and its updates touch no other
lane, so what a run learns does not depend on which others run beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms.ops import log_softmax
from posttrain.walkthrough.settings import DIMENSION, PROMPTS, VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Policies:
    """L positional models, not autoregressive: every output position is chosen on its own.

    ``h = Σ_n E[x_n] A_n`` (one vector for the prompt), ``logits_n = h B_n Eᵀ``: a matrix for each
    input position, one for each output position, and one embedding for both ends.

    =============  =============  =======================================
    field          shape          meaning
    =============  =============  =======================================
    ``embedding``  [L, V, D]      E, shared by input and output
    ``encode``     [L, N, D, D]   A_n, one matrix for each input position
    ``decode``     [L, N, D, D]   B_n, one matrix for each output position
    =============  =============  =======================================
    """

    embedding: Tensor
    encode: Tensor
    decode: Tensor

    def parameters(self) -> list[Tensor]:
        """The three tensors, in the order in which they are drawn."""
        return [self.embedding, self.encode, self.decode]

    def logits(self, prompts: Tensor) -> Tensor:
        """Scores of every token at every output position. Shapes: [P, N] → [L, P, N, V]."""
        # One small product for each position: as one large product over all positions, the rounding
        # of a lane would depend on where it stands in memory, and so on the lanes beside it.
        embedded = self.embedding[:, prompts.T]  # [L, N, P, D]
        encoded = (embedded @ self.encode).sum(1, keepdim=True)  # [L, 1, P, D]
        decoded = encoded @ self.decode  # [L, N, P, D]
        return (decoded @ self.embedding[:, None].mT).transpose(1, 2)

    def logprobs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """``log π(y_n | x)`` of every token. Shapes: [P, N], [L, P, G, N] → [L, P, G, N]."""
        table = log_softmax(self.logits(prompts)).unsqueeze(2)
        return table.expand(-1, -1, responses.shape[2], -1, -1).gather(-1, responses.unsqueeze(-1))[
            ..., 0
        ]

    def detached(self) -> Policies:
        """A copy that later updates do not reach."""
        embedding, encode, decode = (tensor.detach().clone() for tensor in self.parameters())
        return Policies(embedding=embedding, encode=encode, decode=decode)

    def lanes(self, rows: slice) -> Policies:
        """Some of the lanes."""
        embedding, encode, decode = (tensor[rows] for tensor in self.parameters())
        return Policies(embedding=embedding, encode=encode, decode=decode)

    def repeated(self, times: int) -> Policies:
        """Every lane ``times`` over, its copies side by side, ready to be differentiated."""
        embedding, encode, decode = (
            tensor.detach().repeat_interleave(times, dim=0).requires_grad_()
            for tensor in self.parameters()
        )
        return Policies(embedding=embedding, encode=encode, decode=decode)


def initial_policies(generators: Sequence[torch.Generator]) -> Policies:
    """Fresh lanes, each drawn from its own generator: ``E ~ N(0, 1)``, ``A, B ~ N(0, 1/D)``.

    The order of the draws is the lecture's, so that its seed gives its model.
    """
    length, scale = len(PROMPTS[0]), math.sqrt(DIMENSION)
    drawn = [
        (
            torch.randn(VOCABULARY, DIMENSION, generator=generator),
            torch.randn(length, DIMENSION, DIMENSION, generator=generator) / scale,
            torch.randn(length, DIMENSION, DIMENSION, generator=generator) / scale,
        )
        for generator in generators
    ]
    embedding, encode, decode = (
        torch.stack(tensors).requires_grad_() for tensors in zip(*drawn, strict=True)
    )
    return Policies(embedding=embedding, encode=encode, decode=decode)


@torch.no_grad()
def sample(
    policies: Policies,
    prompts: Tensor,
    *,
    generators: Sequence[torch.Generator],
    num_responses: int,
) -> Tensor:
    """Independent responses, each lane with its own generator. Shapes: [P, N] → [L, P, G, N]."""
    probabilities = policies.logits(prompts).softmax(-1).flatten(1, 2)  # [L, P·N, V]
    drawn = torch.stack(
        [
            torch.multinomial(lane, num_responses, replacement=True, generator=generator)
            for lane, generator in zip(probabilities, generators, strict=True)
        ]
    )
    return drawn.unflatten(1, tuple(prompts.shape)).transpose(2, 3).contiguous()
