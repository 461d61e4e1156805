"""What is measured of a policy: its exact expected reward, and how noisy its gradient is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms import ops
from posttrain.algorithms.diagnostics import share_without_signal
from posttrain.algorithms.weights import total
from posttrain.types import Batch
from posttrain.walkthrough.settings import VOCABULARY, Configuration, Schedule, prompts
from posttrain.walkthrough.sorting_policy import Policies, sample
from posttrain.walkthrough.training import make_batch, token_logprobs


def every_response() -> Tensor:
    """All V^N responses there are, [125, 3].

    >>> every_response().shape
    torch.Size([125, 3])
    """
    return torch.cartesian_prod(*[torch.arange(VOCABULARY)] * prompts().shape[1])


@torch.no_grad()
def expected(policies: Policies, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The exact expected score of each lane: ``1/P Σ_x Σ_y π(y|x) R(x, y)`` over all 125 y.

    Nothing is sampled, so two policies differ by what they learned alone. Shapes: → [L].
    """
    responses = every_response().expand(len(prompts()), -1, -1)  # [P, 125, N]
    each_lane = responses.expand(len(policies.embedding), -1, -1, -1)
    probabilities = policies.logprobs(prompts(), each_lane).sum(-1).exp()
    return (probabilities * score(prompts(), responses)).sum(-1).mean(-1)


@torch.no_grad()
def entropy(policies: Policies) -> Tensor:
    """Entropy of a token's distribution, in nats, the mean over prompts and positions: → [L]."""
    return ops.entropy(policies.logits(prompts())).mean((1, 2))


@torch.no_grad()
def likeliest(policies: Policies) -> Tensor:
    """The response that each lane favours for each prompt. Shapes: → [L, P, 1, N]."""
    return policies.logits(prompts()).argmax(-1).unsqueeze(2)


def one_token_changes(responses: Tensor) -> Tensor:
    """Every response that differs in one token at most. Shapes: [L, P, 1, N] → [L, P, N·V, N].

    >>> one_token_changes(torch.tensor([[[[0, 0, 0]]]]))[0, 0, :6].tolist()
    [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0], [0, 0, 0]]
    """
    changed = [
        responses.index_fill(-1, torch.tensor([position]), token)
        for position in range(responses.shape[-1])
        for token in range(VOCABULARY)
    ]
    return torch.cat(changed, dim=2)


def silent_groups(rewards: Tensor) -> float:
    """Share of groups whose rewards are all equal. Shapes: [..., G] → a number in [0, 1].

    >>> silent_groups(torch.tensor([[3.0, 3.0], [3.0, 2.0]]))
    0.5
    """
    size = rewards.shape[-1]
    groups = torch.arange(rewards.numel()) // size
    batch = Batch.from_rewards(rewards.flatten()).replace(groups=groups)
    return share_without_signal(batch)


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """The two parts of a gradient's noise-to-signal ratio, for each lane. Shapes: [L], [L]."""

    noise: Tensor
    signal: Tensor

    def ratio(self) -> float | None:
        """``Σ noise / Σ signal`` over the lanes; None where there is no signal to compare with."""
        signal = float(self.signal.double().sum())
        return float(self.noise.double().sum()) / signal if signal > 0 else None


def gradient_noise(
    policies: Policies,
    configuration: Configuration,
    *,
    seeds: Sequence[int],
    num_batches: int,
    schedule: Schedule | None = None,
) -> GradientNoise:
    """How much the policy gradient varies from batch to batch, at policies that stand still.

    K batches are sampled from the same policy, and g_k is the gradient of the loss on batch k at
    the first inner step, where π = π_old (there the three losses have the same gradient, and the
    KL penalty is left out). With ``ḡ = 1/K Σ_k g_k`` over all parameters of the lane:

    * noise ``= tr Cov(g) = 1/(K − 1) Σ_k ‖g_k − ḡ‖²``
    * signal ``= ‖E g‖²``, estimated without bias by ``‖ḡ‖² − noise / K`` (0 where negative)

    A ratio of r says that about r batches have to be averaged until signal equals noise.
    """
    schedule, num_lanes = schedule or Schedule(), len(seeds)
    # A separate generator, so that measuring does not change the random numbers of training.
    generators = [torch.Generator().manual_seed(1_000_003 + seed) for seed in seeds]
    size = num_batches * schedule.num_responses
    responses = sample(policies, prompts(), generators=generators, num_responses=size)
    responses = responses.unflatten(2, (num_batches, -1)).transpose(1, 2).flatten(0, 1)
    copies = policies.repeated(num_batches)  # [L·K, …]: a copy of the lane for each batch
    batch = make_batch(copies, responses.contiguous(), configurations=[configuration])
    terms = configuration.policy_loss()(token_logprobs(copies, responses), batch)
    gradients = torch.autograd.grad(total(terms.loss, batch), copies.parameters())
    flat = torch.cat([each.flatten(1) for each in gradients], dim=1)
    flat = flat.view(num_lanes, num_batches, -1)
    mean = flat.mean(1)
    noise = (flat - mean[:, None]).square().sum((1, 2)) / (num_batches - 1)
    signal = (mean.square().sum(1) - noise / num_batches).clamp_min(0)
    return GradientNoise(noise=noise, signal=signal)
