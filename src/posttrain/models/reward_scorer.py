"""A reward model as a reward: batches of rollouts in, one score each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from posttrain.models.cache import context_length
from posttrain.models.frozen import Frozen
from posttrain.models.reward import RewardModel, load_reward, score_sequences
from posttrain.types import Batch, Rollout, Score


class ModelScorer:
    """Scores rollouts with a reward model, longest first, ``micro_batch_tokens`` at a time.

    ``render`` gives the tokens of prompt and completion as the reward model reads them. The score
    is the normalised one unless told otherwise. ``offload`` keeps the model in main memory between
    batches. A sequence longer than the model's context is ``invalid``, never cut in silence.
    """

    name = "model"

    def __init__(
        self,
        load: Callable[[], RewardModel],
        *,
        render: Callable[[RewardModel, Rollout], Sequence[int]],
        normalise: bool = True,
        offload: bool = False,
        micro_batch_tokens: int = 8192,
    ) -> None:
        self._load = load
        self._loaded: tuple[RewardModel, Frozen] | None = None
        self._render = render
        self._normalise = normalise
        self._offload = offload
        self._micro_batch_tokens = micro_batch_tokens

    @property
    def reward(self) -> RewardModel:
        """The reward model, loaded when it is first needed."""
        return self._ready()[0]

    def _ready(self) -> tuple[RewardModel, Frozen]:
        if self._loaded is None:
            reward = self._load()
            self._loaded = reward, Frozen(reward.model, offload=self._offload)
        return self._loaded

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout, in order."""
        rows = [tuple(self._render(self.reward, rollout)) for rollout in rollouts]
        return [self._verdict(raw, row) for raw, row in zip(self.raw(rows), rows, strict=True)]

    def raw(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The model's own score of token rows, NaN where a row does not fit its context."""
        limit = context_length(self.reward.model) or math.inf
        scores = [math.nan] * len(rows)
        fitting = [index for index, row in enumerate(rows) if 0 < len(row) <= limit]
        fitting.sort(key=lambda index: -len(rows[index]))
        with self._ready()[1].on_device() as model:
            device = next(model.parameters()).device
            for chosen in self._parts(fitting, rows):
                batch = pad_rows([rows[index] for index in chosen], self.reward.pad_token)
                found = score_sequences(model, batch.to(device)).tolist()
                for index, score in zip(chosen, found, strict=True):
                    scores[index] = score
        return scores

    def _verdict(self, raw: float, row: Sequence[int]) -> Score:
        if math.isfinite(raw):
            reward = self.reward
            value = (raw - reward.mean) / reward.deviation if self._normalise else raw
            return Score(value=value)
        limit = context_length(self.reward.model)
        reason = f"gave {raw} for {len(row)} tokens (its context is {limit})"
        return Score(value=0.0, state="invalid", reason=reason)

    def _parts(self, order: list[int], rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of rows that go together, as many as ``micro_batch_tokens`` allows.

        Batch size 1 if neither pad_token_id nor a ``score`` head lets us find the last real token.
        """
        config = self.reward.model.config.get_text_config()
        alone = config.pad_token_id is None and not hasattr(self.reward.model, "score")
        start = 0
        while start < len(order):
            size = max(1, self._micro_batch_tokens // len(rows[order[start]]))
            yield order[start : start + (1 if alone else size)]
            start += 1 if alone else size


def reward_scorer(
    device: str,
    render: Callable[[RewardModel, Rollout], Sequence[int]],
    *,
    path: str = "reward",
    normalise: bool = True,
    dtype: Literal["float32", "bfloat16"] = "float32",
    offload: bool = False,
    micro_batch_tokens: int = 8192,
) -> ModelScorer:
    """The reward ``model`` of a recipe: its keyword options are those that a recipe may set."""
    return ModelScorer(
        functools.partial(load_reward, path, dtype=dtype, device=device),
        render=render,
        normalise=normalise,
        offload=offload,
        micro_batch_tokens=micro_batch_tokens,
    )


def pad_rows(rows: Sequence[Sequence[int]], pad_token: int) -> Batch:
    """Token rows as a right-padded batch; the mask is True at each row's last token."""
    width = max(len(row) for row in rows)
    tokens = torch.full((len(rows), width), pad_token)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(list(row))
        attention[index, : len(row)] = True
    last = attention & (attention.flip(1).cumsum(1).flip(1) == 1)
    return Batch(tokens=tokens, mask=last, attention=attention)
