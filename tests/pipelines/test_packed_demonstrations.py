"""Demonstrations packed into one sequence do not see each other: the gradient is exact."""

from typing import Any

import pytest
import torch
from small_model import naive_logprobs, small_model
from torch import Tensor

from posttrain.algorithms.weights import token_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.fast import packed_states as states
from posttrain.learn.learner import LocalLearner
from posttrain.pipelines.likelihood import likelihood
from posttrain.types import Batch

# Lengths that pack badly, chats with several learned spans, a text that is learned whole, and two
# rows with a common beginning.
LENGTHS = (3, 17, 9, 2, 30, 5, 5, 12)


def demonstrations() -> Batch:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(1, 40, (length,), generator=generator).tolist()
        mask = [place > 0 and (number == 2 or place % 5 > 1) for place in range(length)]
        rows.append((tokens, [*mask[:-1], True]))
    rows[6] = ([*rows[5][0][:-2], 7, 8], rows[5][1])
    return token_mean(collate_demonstrations(rows, pad_token=0))


def gradient(batch: Batch, monkeypatch: pytest.MonkeyPatch, *, tokens: int, packed: bool) -> Tensor:
    """What the optimiser is given in one step of the stage's own objective."""
    calls: list[int] = []
    real = states.packed_states

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    model = small_model()
    learner = LocalLearner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        save=lambda folder: None,
        max_gradient_norm=1e9,
        micro_batch_tokens=tokens,
    )
    with monkeypatch.context() as patch:
        patch.setattr(states, "packed_states", counted)
        patch.setattr(states, "_WORTHWHILE", 100.0)  # also where it saves nothing
        if not packed:
            patch.setattr(states, "kernel_for", lambda trunk, batch: None)
        learner.way(batch.tokens.shape[1])  # it tries to pack, to see whether it can
        calls.clear()
        learner.step(batch, likelihood)
    assert bool(calls) == packed
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.usefixtures("float64_throughout")
def test_packed_is_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-12 of its length: packed whole, in parts, padded, alone, and by plain arithmetic."""
    batch, model = demonstrations(), small_model()
    weights = batch.need("weights").double()
    batch = batch.replace(weights=weights)
    alone = []
    for row in range(len(LENGTHS)):  # each row by itself, without padding
        one = batch.select(torch.tensor([row]))
        (-(naive_logprobs(model, one) * one.need("weights")).sum()).backward()
        alone.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        model.zero_grad()
    expected = torch.stack(alone).sum(0)
    for tokens, packed in ((10_000, True), (40, True), (10_000, False), (1, False)):
        found = gradient(batch, monkeypatch, tokens=tokens, packed=packed)
        assert float((found - expected).norm() / expected.norm()) < 1e-12, (tokens, packed)


def test_other_rows_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that saw the one before it would have another gradient: the test can fail."""
    batch = demonstrations()
    first, second = (
        [token for token, real in zip(*pair, strict=True) if real]
        for pair in zip(batch.tokens[:2].tolist(), batch.attention[:2].tolist(), strict=True)
    )
    mask = [False] * len(first) + batch.mask[1, : len(second)].tolist()
    seen = token_mean(collate_demonstrations([((*first, *second), mask)], pad_token=0))
    apart = token_mean(batch.select(torch.tensor([1])))
    options: dict[str, Any] = {"tokens": 10_000, "packed": False}
    assert not torch.allclose(
        gradient(seen, monkeypatch, **options), gradient(apart, monkeypatch, **options), rtol=1e-3
    )
