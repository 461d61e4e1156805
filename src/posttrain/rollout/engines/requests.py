"""What an engine is asked: checks with an answer, parts that fit, ragged prompts padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from posttrain.types import Prompt, Sampling


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


def in_parts(lengths: Sequence[int], *, num_samples: int, size: int) -> Iterator[list[int]]:
    """Sequence numbers p·G + g in parts of at most ``size``, short prompts first.

    So prompts of similar length share a part, and little is padded.

    >>> list(in_parts([7, 2], num_samples=2, size=3))
    [[2, 3, 0], [1]]
    """
    order = sorted(range(len(lengths)), key=lambda prompt: lengths[prompt])
    numbers = [prompt * num_samples + sample for prompt in order for sample in range(num_samples)]
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


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
