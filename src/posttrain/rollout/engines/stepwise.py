"""Sampling that can be watched: the samples of one prompt, a token of each at a time.

The draws are those of the engine: its randomness, its distribution and its limits, so that a seed
means the same here. What is added is what a reader wants at once: text in whole characters, and
what else the model might have said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.fast.decode import sample, uncompiled
from posttrain.models.cache import UnknownMemoryError
from posttrain.models.head import full_logits
from posttrain.models.sampling import at_least_float32, scale_logits
from posttrain.rollout.engines.local import LocalEngine
from posttrain.rollout.engines.native import Running, prefill
from posttrain.rollout.engines.text_pieces import TextPieces
from posttrain.types import Prompt, Rollout, Sampling, StopReason, Turn


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """One token of a sample: the text that is certain with it, and how likely it was.

    ``logprob`` is of the distribution that was sampled; ``shown`` is of the one that was asked to
    be shown, and ``top`` are the likeliest tokens there, with their log-probs. ``stop_reason`` is
    there with the last token of a sample.
    """

    sample: int
    token: int
    piece: str
    logprob: float
    shown: float
    top: tuple[tuple[int, float], ...] = ()
    stop_reason: StopReason | None = None


class Stepwise:
    """``len(numbers)`` samples of one prompt; each call of :meth:`step` draws a token of each.

    ``numbers`` are those of the sequences, by which the seed decides their draws. The ``top``
    likeliest tokens are told with each, as the model has them at ``temperature``. Samples share
    their passes with each other and with no one else: company cannot change a rounding. A model
    whose memory the native engine does not know is read from its beginning at every token.
    """

    def __init__(
        self,
        engine: LocalEngine,
        prompt: Prompt,
        *,
        sampling: Sampling,
        seed: int,
        numbers: Sequence[int],
        top: int = 0,
        temperature: float = 1.0,
    ) -> None:
        engine.check([prompt], sampling, num_samples=len(numbers))
        self.prompt, self.sampling = prompt, sampling
        self._engine, self._top, self._temperature = engine, top, temperature
        steps = sampling.max_new_tokens
        self._uniforms = engine.uniforms(seed, sequences=numbers, num_steps=steps, turn=0)
        self._rows = list(range(len(numbers)))  # the samples that have not ended
        self._tokens: list[list[int]] = [[] for _ in numbers]
        self._logprobs: list[list[float]] = [[] for _ in numbers]
        self._pieces = [TextPieces(engine.decode, stop=sampling.stop) for _ in numbers]
        self._reasons: list[StopReason] = ["length" for _ in numbers]
        self._running: Running | None = None

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return not self._rows

    @property
    def num_tokens(self) -> int:
        """How many tokens have been drawn, of all samples."""
        return sum(map(len, self._tokens))

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        """Draw the next token of every sample that has not ended."""
        engine, step = self._engine, len(self._tokens[self._rows[0]])
        with engine.evaluating(), engine.precision(), uncompiled(engine.model):
            logits = at_least_float32(self._logits())
            uniforms = self._uniforms[self._rows, step].to(logits.device)
            tokens, logprobs = sample(logits, uniforms, sampling=self.sampling)
            shown = scale_logits(logits, self._temperature).log_softmax(-1)
            top = shown.topk(min(self._top, shown.shape[1])) if self._top else None
            chances = shown.gather(1, tokens[:, None])[:, 0].tolist()
        if not bool(torch.isfinite(logprobs).all()):
            raise ValueError("logprobs: the model gave NaN or infinity; its weights have diverged")
        found = []
        drawn = zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True)
        for place, (row, token, logprob) in enumerate(drawn):
            others = () if top is None else _pairs(top.indices[place], top.values[place])
            found.append(
                SampledToken(
                    sample=row,
                    token=token,
                    piece=self._add(row, token, logprob=logprob),
                    logprob=logprob,
                    shown=chances[place],
                    top=others,
                    stop_reason=self._ended(row, token),
                )
            )
        left = [place for place, each in enumerate(found) if each.stop_reason is None]
        if self._running is not None and 0 < len(left) < len(found):
            self._running.select(torch.tensor(left, device=logits.device))
        self._rows = [found[place].sample for place in left]
        if self.done:
            self._running = None  # its memory is free at once
        return found

    def rollouts(self) -> list[Rollout]:
        """The samples as rollouts, with the tokens drawn so far."""
        turns = [
            Turn(
                tokens=tuple(tokens),
                logprobs=tuple(logprobs),
                text=pieces.text,
                stop_reason=reason,
                version=self._engine.version,
            )
            for tokens, logprobs, pieces, reason in zip(
                self._tokens, self._logprobs, self._pieces, self._reasons, strict=True
            )
        ]
        return [Rollout(prompt=self.prompt, turns=(turn,), group=0) for turn in turns]

    def _logits(self) -> Tensor:
        """What may follow each sample that has not ended: [n, V]."""
        model: Any = self._engine.model
        if self._running is not None:
            last = [self._tokens[row][-1] for row in self._rows]
            return self._running.step(torch.tensor(last, device=model.device))
        if not any(self._tokens):
            with contextlib.suppress(UnknownMemoryError):
                return self._begin(model)
        rows = [[*self.prompt.tokens, *self._tokens[row]] for row in self._rows]
        return full_logits(model, torch.tensor(rows, device=model.device))[:, -1]

    def _begin(self, model: Any) -> Tensor:
        """Read the prompt once for all samples."""
        steps = self.sampling.max_new_tokens
        running, logits = prefill(model, [self.prompt.tokens], num_steps=steps)
        same = torch.zeros(len(self._rows), dtype=torch.long, device=model.device)
        running.select(same)
        self._running = running
        return logits[same]

    def _add(self, row: int, token: int, *, logprob: float) -> str:
        """Keep a token of a sample; the text that is certain with it."""
        self._tokens[row].append(token)
        self._logprobs[row].append(logprob)
        pieces = self._pieces[row]
        if token in self._engine.end_tokens:
            self._reasons[row] = "stop"
            return pieces.end()
        piece = pieces.add(token)
        if pieces.stopped:
            self._reasons[row] = "stop_string"
        elif len(self._tokens[row]) == self.sampling.max_new_tokens:
            piece += pieces.end()
        return piece

    def _ended(self, row: int, token: int) -> StopReason | None:
        full = len(self._tokens[row]) == self.sampling.max_new_tokens
        over = full or token in self._engine.end_tokens or self._pieces[row].stopped
        return self._reasons[row] if over else None


def _pairs(tokens: Tensor, values: Tensor) -> tuple[tuple[int, float], ...]:
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))
