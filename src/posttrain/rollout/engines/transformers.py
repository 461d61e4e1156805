"""The fallback: transformers' own ``generate``, for models that the native engine does not take.

``generate`` runs the model, its memory and the stopping. Drawing stays ours: a logits processor
draws each token with the rules and the randomness of the native engine, and leaves that token alone
possible. So log-probs are of the distribution really sampled, no [N, T, V] scores are kept, no
default of the model's own generation_config has a say, and a seed means the same in both engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from posttrain.rollout.engines.draws import Draws
from posttrain.rollout.engines.local import LocalEngine
from posttrain.rollout.engines.requests import left_pad
from posttrain.types.ways import Support, Way


class TransformersEngine(LocalEngine):
    """Decodes with ``model.generate``: slower than the native engine, and takes any decoder.

    ``instead`` says why it does so in the place of the native engine, where that was asked for.
    """

    def __init__(self, model: Any, *, instead: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self._instead = instead

    def way(self) -> Way:
        """That of transformers."""
        cost = "a batch waits for its longest, and each step copies its whole cache"
        native = [("native engine", Support(self._instead), cost)] if self._instead else []
        return Way.of("transformers' generate", wanted=native)

    def decode_part(self, prompts: Sequence[tuple[int, ...]], draws: Draws) -> None:
        """Draw until each sequence has ended or is full."""
        tokens, attention = left_pad(prompts, device=self.model.device)
        settings = GenerationConfig(
            do_sample=False,  # one token is possible: ours
            max_new_tokens=draws.sampling.max_new_tokens,
            eos_token_id=list(self.end_tokens) or None,
            pad_token_id=self._pad_token({prompt[-1] for prompt in prompts}),
        )
        with _without_defaults(self.model):
            self.model.generate(
                input_ids=tokens,
                attention_mask=attention.long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_Draw(draws)]),
                stopping_criteria=StoppingCriteriaList([self._stopped(draws)]),
            )

    def _stopped(self, draws: Draws) -> Callable[..., Tensor]:
        """Whose text holds a stop string, asked after every token."""

        def ended(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            draws.end_stopped(self.decode, new=1)
            return draws.ended

        return ended

    def _pad_token(self, last_tokens: set[int]) -> int:
        """One that ends no prompt: such a prompt would be taken for padded on the right."""
        size = self.model.config.get_text_config().vocab_size
        return next((token for token in range(size) if token not in last_tokens), 0)


class _Draw(LogitsProcessor):
    """Draws the next token of every sequence, and makes it the only one possible."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.rows = torch.arange(len(draws.ended), device=draws.ended.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.draws.full:  # a GPU learns late that it is done, and asks once more
            return scores
        drawn = self.draws.draw(scores, self.rows)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn[:, None], 0.0)


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Whatever is not set, ``generate`` takes from the model: here it finds nothing to take."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
