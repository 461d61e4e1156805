"""What was drawn for each sequence: the randomness that goes in, the turns that come out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.fast.decode import sample
from posttrain.models.stops import Decode, cut_at_stop, may_have_stopped, tail_length
from posttrain.types import Sampling, StopReason, Turn


def uniforms(seed: int, *, sequences: Sequence[int], num_steps: int, turn: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), one for each sequence and step: float64 [N, steps].

    The number for step t of sequence s is a function of (seed, turn, s, t) alone: a stream of the
    counter-based Philox generator belongs to each turn of a sequence. So neither the other
    sequences, nor the order they are decoded in, nor the length limit can change what one draws.

    >>> a, b = uniforms(1, sequences=[0, 7], num_steps=3)
    >>> bool((uniforms(1, sequences=[7], num_steps=2)[0] == b[:2]).all())
    True
    """
    streams = (
        np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[0, 0, sequence, turn]))
        for sequence in sequences
    )
    return torch.from_numpy(np.stack([stream.random(num_steps) for stream in streams]))


class Draws:
    """The tokens drawn so far for N sequences, step by step, and how likely each one was."""

    def __init__(
        self, sampling: Sampling, randomness: Tensor, *, end_tokens: Sequence[int]
    ) -> None:
        self.sampling = sampling
        self.step = 0  # how many tokens each running sequence has
        self.ended = torch.zeros(len(randomness), dtype=torch.bool, device=randomness.device)
        self._uniforms = randomness
        self._end_tokens = torch.tensor(end_tokens, dtype=torch.long, device=randomness.device)
        self._tokens = torch.full_like(randomness, -1, dtype=torch.long)
        self._logprobs = torch.zeros_like(randomness)

    @property
    def full(self) -> bool:
        """Whether every running sequence has all the tokens it may have."""
        return self.step == self.sampling.max_new_tokens

    def draw(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Draw, and record, the next token of the sequences ``rows``: [n, V], [n] → [n]."""
        tokens, logprobs = sample(logits, self._uniforms[rows, self.step], sampling=self.sampling)
        self._tokens[rows, self.step] = tokens
        self._logprobs[rows, self.step] = logprobs.to(self._logprobs.dtype)
        self.ended[rows] |= (tokens[:, None] == self._end_tokens).any(1)
        self.step += 1
        return tokens

    def end_stopped(self, decode: Decode, *, new: int) -> None:
        """End the sequences whose last ``new`` tokens complete a stop string, where there are any.

        Others may go on: what is drawn behind such a string is cut off in the end.
        """
        stop = self.sampling.stop
        if not stop:
            return
        first = max(0, self.step - tail_length(stop, new=new))
        running = (~self.ended).nonzero()[:, 0]
        tails = self._tokens[running, first : self.step].tolist()
        for row, tail in zip(running.tolist(), tails, strict=True):
            if may_have_stopped(tail, decode, stop=stop):
                whole = self._tokens[row, : self.step].tolist()
                self.ended[row] = cut_at_stop(whole, decode, stop=stop) is not None

    def turns(self, decode: Decode, *, version: int) -> list[Turn]:
        """One turn for each sequence: up to its first end token, which it keeps."""
        ends = torch.isin(self._tokens, self._end_tokens)
        drawn = (self._tokens >= 0).sum(1)  # of one that a stop string has ended, not every step
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, drawn)
        return sampled_turns(
            self._tokens,
            self._logprobs,
            lengths=lengths.tolist(),
            end_tokens=self._end_tokens.tolist(),
            decode=decode,
            version=version,
            stop=self.sampling.stop,
        )


def sampled_turns(
    tokens: Tensor,
    logprobs: Tensor,
    *,
    lengths: Sequence[int],
    end_tokens: Sequence[int],
    decode: Decode,
    version: int,
    stop: Sequence[str] = (),
) -> list[Turn]:
    """The first ``lengths`` tokens of each row as a turn, fewer where one of ``stop`` comes.

    Shapes: [N, T] × 2, N lengths.
    """
    if not bool(torch.isfinite(logprobs).all()):
        raise ValueError(
            "logprobs: the model gave NaN or infinity for a token that was sampled. If its "
            "weights have diverged, lower the learning rate and resume from an earlier "
            "checkpoint; if its arithmetic overflows, compute in bfloat16, not float16"
        )
    found = []
    for row, likely, length in zip(tokens.tolist(), logprobs.tolist(), lengths, strict=True):
        ended = row[length - 1] in end_tokens
        said = row[: length - 1] if ended else row[:length]
        reason: StopReason = "stop" if ended else "length"
        cut = cut_at_stop(said, decode, stop=stop) if stop else None
        count, text = cut or (length, decode(said))
        found.append(
            Turn(
                tokens=tuple(row[:count]),
                logprobs=tuple(likely[:count]),
                text=text,
                stop_reason=reason if cut is None else "stop_string",
                version=version,
            )
        )
    return found
