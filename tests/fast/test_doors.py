"""Each door of fast/ gives what its plain twin gives: log-probs and gradients, sampled tokens."""

import itertools
from typing import Any

import pytest
import torch
from models.families import batch as ragged_batch
from models.families import build
from rollout.cases import END, drawn, ragged, spell

from posttrain.fast import score
from posttrain.models import logprobs
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Batch, Sampling


def group() -> Batch:
    """Three completions of one prompt, of 7, 3 and 1 tokens: packed, the prompt stands once."""
    tokens = (torch.arange(3 * 12).reshape(3, 12) * 5) % 11
    tokens[:, :5] = tokens[0, :5]
    ends = torch.tensor([[12], [8], [6]])
    place = torch.arange(12)
    return Batch(tokens=tokens, mask=(place >= 5) & (place < ends), attention=place < ends)


def gradients(model: torch.nn.Module, outputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 2, outputs.logprobs.numel(), dtype=torch.float64)
    answer = outputs.logprobs + 0.1 * outputs.entropy + 0.3 * outputs.values
    (weights.view(answer.shape) * answer).sum().backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("given", [group(), ragged_batch()], ids=["group", "ragged"])
@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2"])
def test_score_tokens_is_its_plain_twin(family: str, options: Any, given: Batch) -> None:
    model = build(family)
    head = torch.nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    answers = [
        way(model, given, entropy="gradient", value_head=head, **options)
        for way in (score.score_tokens, logprobs.score_tokens)
    ]
    fast, plain = (
        {"logprobs": a.logprobs, "entropy": a.entropy, "values": a.values} | gradients(model, a)
        for a in answers
    )
    assert fast.keys() == plain.keys()
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)
    assert bool((fast["logprobs"][given.mask] < 0).all())


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=12), Sampling(max_new_tokens=7, top_p=0.8)], ids=str
)
def test_decode_is_its_plain_twin(family: str, sampling: Sampling) -> None:
    model, prompts = build(family), ragged(4, 9, 1)
    fast, plain = (
        NativeEngine(model, end_tokens=(END, 7, 11), decode=spell, slots=slots)
        for slots in (True, False)
    )
    answers = [one.generate(prompts, sampling, num_samples=4, seed=3) for one in (fast, plain)]
    assert [one._decoder.slots is not None for one in (fast, plain)] == [True, False]
    assert drawn(answers[0]) == drawn(answers[1])
    for one, two in zip(*(itertools.chain(*answer) for answer in answers), strict=True):
        torch.testing.assert_close(one.logprobs, two.logprobs, rtol=1e-9, atol=1e-10)
