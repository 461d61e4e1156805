"""An engine with weights of its own, as one in another process has: they come through its sync."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.models.load import Policy
from posttrain.protocols import Learner, Sync
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Prompt, Rollout, Sampling

MADE: list["Elsewhere"] = []


class Elsewhere:
    def __init__(
        self, policy: Policy, decode: Callable[[Sequence[int]], str], *, fresh: bool
    ) -> None:
        self.model = copy.deepcopy(policy.model)
        self.inner = NativeEngine(self.model, end_tokens=policy.end_tokens, decode=decode)
        self.fresh, self.version, self.closed = fresh, 0, False
        MADE.append(self)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, **options: Any
    ) -> list[list[Rollout]]:
        self.inner.version = self.version
        return self.inner.generate(prompts, sampling, **options)

    def sync(self, learner: Learner) -> Sync:
        def send(version: int) -> None:
            if self.fresh:
                copies = {
                    name: weight.detach().clone() for name, weight in learner.weights().items()
                }
                self.model.load_state_dict(copies, strict=False)
            self.version = version

        return send

    def close(self) -> None:
        self.closed = True


def make(
    policy: Policy, decode: Callable[[Sequence[int]], str], *, fresh: bool = True
) -> Elsewhere:
    return Elsewhere(policy, decode, fresh=fresh)


@torch.no_grad()
def logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """What a model says of tokens, each given those before it."""
    row = torch.tensor([list(tokens)])
    return model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
