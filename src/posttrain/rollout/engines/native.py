"""The engine of our own: one prefill for each distinct prompt, finished sequences leave the batch.

A part goes through three hands: ``prefill`` reads the prompts; ``Running`` is what the model
remembers of the sequences that have not ended, and shrinks as they do; ``Draws`` holds the
randomness and the results of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.models.cache import new_cache, next_logits, select_rows
from posttrain.rollout.engines.draws import Draws
from posttrain.rollout.engines.local import LocalEngine
from posttrain.rollout.engines.requests import left_pad

CHECK_EVERY = 4  # steps between two looks at who has ended (a look makes a GPU's queue run dry)
SHRINK_AT = 0.75  # ended sequences are dropped once only this share of the rows is still running


class NativeEngine(LocalEngine):
    """Decodes with a key-value cache, for every decoder whose memory is keys and values alone."""

    def check_model(self) -> None:
        """Raise if the model remembers something else."""
        new_cache(self.model)

    def decode_part(self, prompts: Sequence[tuple[int, ...]], draws: Draws) -> None:
        """Draw until each sequence has ended or is full; equal prompts are read once."""
        distinct = list(dict.fromkeys(prompts))
        running, logits = prefill(self.model, distinct, num_steps=draws.sampling.max_new_tokens)
        if len(distinct) < len(prompts):
            place = {prompt: row for row, prompt in enumerate(distinct)}
            shared = torch.tensor([place[prompt] for prompt in prompts], device=logits.device)
            running.select(shared)
            logits = logits[shared]
        rows = torch.arange(len(prompts), device=logits.device)  # whose turn it is
        while True:
            tokens = draws.draw(logits, rows)
            if draws.full:
                return
            if draws.step % CHECK_EVERY == 0:
                left = (~draws.ended[rows]).nonzero()[:, 0]
                if not len(left):
                    return
                if len(left) <= SHRINK_AT * len(rows):
                    running.select(left)
                    rows, tokens = rows[left], tokens[left]
            logits = running.step(tokens)


class Running:
    """What the model remembers of the sequences that have not ended, one row each.

    ``positions`` [n] is where a row's next token stands in its own sequence, ``width`` how many
    columns the padded batch has. ``attention`` [n, prompt + new] leaves out the padding; it is
    None where there is none, which spares the model a mask.
    """

    def __init__(
        self, model: Any, *, cache: Any, positions: Tensor, attention: Tensor | None
    ) -> None:
        self.model = model
        self.cache = cache
        self.positions = positions
        self.attention = attention
        self.width = int(cache.get_seq_length())

    def step(self, tokens: Tensor) -> Tensor:
        """Read the next token of each row; the logits of the one after it: [n] → [n, V]."""
        self.width += 1
        logits = next_logits(
            self.model,
            tokens[:, None],
            cache=self.cache,
            positions=self.positions[:, None],
            attention=None if self.attention is None else self.attention[:, : self.width],
        )
        self.positions = self.positions + 1
        return logits

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        select_rows(self.cache, rows)
        self.positions = self.positions[rows]
        if self.attention is not None:
            self.attention = self.attention[rows]


def prefill(
    model: Any, prompts: Sequence[Sequence[int]], *, num_steps: int
) -> tuple[Running, Tensor]:
    """Read prompts: their rows, with attention for ``num_steps`` more tokens, and logits [P, V]."""
    tokens, attention = left_pad(prompts, device=model.device)
    ragged = len({len(prompt) for prompt in prompts}) > 1
    cache = new_cache(model)
    logits = next_logits(
        model,
        tokens,
        cache=cache,
        positions=(attention.cumsum(1) - 1).clamp_min(0),
        attention=attention if ragged else None,
    )
    whole = torch.nn.functional.pad(attention, (0, num_steps), value=True) if ragged else None
    return Running(model, cache=cache, positions=attention.sum(1), attention=whole), logits
