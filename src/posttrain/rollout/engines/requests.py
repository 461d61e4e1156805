"""What an engine is asked: checks with an answer, parts that fit, ragged prompts padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.types import Prompt, Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence to be sampled: its number, and the tokens that it goes on from."""

    number: int
    prompt: tuple[int, ...]


def check_num_samples(num_samples: int) -> None:
    """Raise unless at least one completion is asked for."""
    if num_samples < 1:
        raise ValueError(f"num_samples: must be at least 1, got {num_samples}")


def check_prompts(prompts: Sequence[Prompt], sampling: Sampling, *, limit: int | None) -> None:
    """Raise for a prompt without tokens, or without room for its completion."""
    for prompt in prompts:
        length = len(prompt.tokens)
        if not length:
            raise ValueError(
                f"prompt {prompt.id!r}: it has no tokens, and a model needs one to begin from; "
                "render prompts with posttrain.data.template"
            )
        if limit is not None and length + sampling.max_new_tokens > limit:
            room = limit - length
            fix = f"lower max_new_tokens to {room} or " if room > 0 else ""
            raise ValueError(
                f"prompt {prompt.id!r}: its {length} tokens and max_new_tokens="
                f"{sampling.max_new_tokens} exceed the model's context length of {limit}; "
                f"{fix}leave the prompt out"
            )


def in_parts(requests: Sequence[Request], *, size: int) -> Iterator[Sequence[Request]]:
    """The requests in parts of at most ``size``, short prompts first.

    So prompts of similar length share a part, and little is padded.

    >>> prompts = [(5, 6, 7), (5, 6, 7), (8,), (8,)]
    >>> requests = [Request(number=n, prompt=prompt) for n, prompt in enumerate(prompts)]
    >>> [[request.number for request in part] for part in in_parts(requests, size=3)]
    [[2, 3, 0], [1]]
    """
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def left_pad(
    prompts: Sequence[Sequence[int]], *, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Token ids and attention, both [P, T]: every prompt ends in the last column.

    >>> left_pad([[5, 6], [7]])
    (tensor([[5, 6],
            [0, 7]]), tensor([[ True,  True],
            [False,  True]]))
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    attention = torch.arange(width) >= width - lengths[:, None]
    return tokens.to(device), attention.to(device)
