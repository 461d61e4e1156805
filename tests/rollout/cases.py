"""Small requests for engines, and what a model really says about the tokens they drew."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.models.sampling import filter_logits
from posttrain.types import Prompt, Rollout, Sampling

END = 3


def spell(tokens: Sequence[int]) -> str:
    """A text that shows each token."""
    return " ".join(map(str, tokens))


def ragged(*lengths: int, vocabulary: int = 23) -> list[Prompt]:
    """Prompts of these lengths; their tokens look random, and END is among them."""
    return [
        Prompt(
            id=f"prompt-{row}",
            text="",
            tokens=tuple((7 * row + 5 * t * t + 3) % vocabulary for t in range(length)),
        )
        for row, length in enumerate(lengths)
    ]


def whole_logits(model: Any, prompt: Prompt, completion: Rollout) -> Tensor:
    """The logits of each token of the completion, from one pass without cache or padding."""
    sequence = torch.tensor([[*prompt.tokens, *completion.tokens]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=sequence, use_cache=False).logits[0].double()
    return logits[len(prompt.tokens) - 1 : -1]


def naive_logprobs(
    model: Any, prompt: Prompt, *, completion: Rollout, sampling: Sampling
) -> Tensor:
    """Log-probs of the completion under the distribution that ``sampling`` draws from."""
    logits = whole_logits(model, prompt, completion)
    if sampling.temperature:
        logits = logits / sampling.temperature
        logits = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p)
    drawn = torch.tensor(completion.tokens, device=logits.device)
    return logits.log_softmax(-1).gather(-1, drawn[:, None]).squeeze(-1).cpu()


def largest_error(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    answers: Sequence[Sequence[Rollout]],
    sampling: Sampling,
) -> float:
    """How far the log-probs of any completion are from the naive ones."""
    return max(
        float(
            (
                naive_logprobs(model, prompt, completion=completion, sampling=sampling)
                - torch.tensor(completion.logprobs, dtype=torch.float64)
            )
            .abs()
            .max()
        )
        for prompt, completions in zip(prompts, answers, strict=True)
        for completion in completions
    )


def drawn(answers: Sequence[Sequence[Rollout]]) -> list[list[tuple[int, ...]]]:
    """The tokens alone."""
    return [[completion.tokens for completion in completions] for completions in answers]
