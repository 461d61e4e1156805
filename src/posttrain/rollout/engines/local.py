"""What the engines in the learner's own process share: a module, and how it gets weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from posttrain.cpu_threads import computing_threads
from posttrain.fast.decode import uncompiled
from posttrain.models.cache import bytes_per_sequence, context_length
from posttrain.models.gpu_memory import memory_budget
from posttrain.models.stops import Decode
from posttrain.protocols import Learner, Reply, Sync
from posttrain.rollout.engines.conversation import converse
from posttrain.rollout.engines.draws import Draws, uniforms
from posttrain.rollout.engines.requests import Request, check_num_samples, check_prompts, in_parts
from posttrain.rollout.engines.weight_sync import CopiedWeights, SharedWeights, shares_all_storage
from posttrain.track.progress import advance
from posttrain.types import Part, Prompt, Rollout, Sampling, Turn

SHARED = 2**15  # weights of a matrix, on average, from which a CPU's threads share its product


class LocalEngine:
    """An engine that calls the learner's module; how it decodes is left to ``decode_part``.

    An optimiser step reaches it at once where that module is the learner's own; where it is a copy,
    a sync fills it. ``decode`` turns tokens into text. ``compute`` is the type that the learner
    autocasts to (None: it does not). At most ``max_sequences`` are decoded at once; by default as
    many as fit into half of the free memory. Neither that number nor the company of other sequences
    changes what a sequence draws, but for sums that a GPU rounds in another order.
    """

    def __init__(
        self,
        model: Any,
        *,
        end_tokens: Sequence[int],
        decode: Decode,
        compute: torch.dtype | None = None,
        max_sequences: int | None = None,
        version: int = 0,
    ) -> None:
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences: must be at least 1, got {max_sequences}")
        self.model = model
        self.version = version
        self.end_tokens = tuple(end_tokens)
        self.decode = decode
        self.compute = compute
        self.max_sequences = max_sequences
        self.check_model()

    @property
    def alone(self) -> bool:
        """Whether one thread samples fastest."""
        return samples_alone(self.model)

    def check_model(self) -> None:
        """Raise if this engine cannot decode the model."""

    def decode_part(self, prompts: Sequence[tuple[int, ...]], draws: Draws) -> None:
        """Draw until each sequence has ended or is full; ``prompts`` has one entry for each."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        reply: Reply | None = None,
        part: Part | None = None,
    ) -> list[list[Rollout]]:
        """``num_samples`` rollouts of each prompt, in order; the seed decides every token."""
        longest = self.check(prompts, sampling, num_samples=num_samples)

        def decode(requests: Sequence[Request], turn: int) -> dict[int, Turn]:
            with self.evaluating():
                return self.decode_all(requests, sampling, seed=seed, turn=turn)

        return converse(
            prompts, decode, num_samples=num_samples, reply=reply, longest=longest, part=part
        )

    def check(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int
    ) -> int | None:
        """Raise for what cannot be sampled; the most tokens that have room for another turn."""
        check_num_samples(num_samples)
        limit = context_length(self.model)
        check_prompts(prompts, sampling, limit=limit)
        return None if limit is None else limit - sampling.max_new_tokens

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model evaluates without gradient, in the threads that sample fastest."""
        with _evaluating(self.model), computing_threads(self.alone):
            yield

    def sync(self, learner: Learner) -> Sync:
        """Weights that are the learner's own need nothing; all others that learn are copied."""
        given = learner.weights()
        own = {name: w for name, w in self.model.named_parameters() if name in given}
        if own.keys() == given.keys() and shares_all_storage(own, given):
            return SharedWeights(self)
        return CopiedWeights(self, source=given, target=own)

    def close(self) -> None:
        """Nothing runs beside this process."""

    def decode_all(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, turn: int
    ) -> dict[int, Turn]:
        """The next turn of each request, by its number, in parts that fit."""
        lengths = [len(request.prompt) for request in requests]
        size = self.max_sequences or self._fitting(lengths, sampling.max_new_tokens)
        found: dict[int, Turn] = {}
        for part in in_parts(requests, size=size):
            numbers, steps = [request.number for request in part], sampling.max_new_tokens
            randomness = self.uniforms(seed, sequences=numbers, num_steps=steps, turn=turn)
            draws = Draws(sampling, randomness.to(self.model.device), end_tokens=self.end_tokens)
            with self.precision(), uncompiled(self.model):
                self.decode_part([self.read_by(r.number, r.prompt) for r in part], draws)
            turns = draws.turns(self.decode, version=self.version)
            found.update(zip(numbers, turns, strict=True))
            advance(len(numbers))
        return found

    def uniforms(self, seed: int, *, sequences: Sequence[int], num_steps: int, turn: int) -> Tensor:
        """The randomness of sequences, by their numbers: [n, steps]."""
        return uniforms(seed, sequences=sequences, num_steps=num_steps, turn=turn)

    def read_by(self, number: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that a sequence begins from; equal ones are read once."""
        return tokens

    def precision(self, *, keep_casts: bool = True) -> torch.autocast:
        """One scope for all steps: autocast keeps the weights it has cast until the scope ends.

        A CUDA graph outlives the scope, and must not read weights that autocast has cast in it.
        """
        return torch.autocast(
            self.model.device.type,
            dtype=self.compute,
            enabled=self.compute is not None,
            cache_enabled=keep_casts,
        )

    def _fitting(self, lengths: Sequence[int], new_tokens: int) -> int:
        each = bytes_per_sequence(
            self.model,
            prompt_tokens=max(lengths, default=0),
            new_tokens=new_tokens,
            dtype=self.compute or self.model.dtype,
        )
        return max(1, memory_budget(self.model.device) // each)


def samples_alone(model: torch.nn.Module) -> bool:
    """Whether one thread samples fastest: a second is not awake before such products are done.

    It depends on the weights alone. Another number of threads rounds differently, and the company
    of other sequences must not.
    """
    sizes = [weight.numel() for weight in model.parameters() if weight.ndim > 1]
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return on_cpu and sum(sizes) < SHARED * len(sizes)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No gradient and no dropout inside; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
