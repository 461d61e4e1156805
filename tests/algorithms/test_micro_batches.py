"""How a mini-batch is cut into micro-batches changes neither the update nor a metric.

Through a small real model, so gradients are those of parameters that all sequences share.
"""

import pytest
import torch
from algorithms.batches import VOCABULARY, close, ready
from algorithms.recipes import WEIGHT_VARIANTS, policy_terms, prepared
from torch import Tensor, nn

from posttrain.algorithms import ops, weights
from posttrain.algorithms.diagnostics import Tally, tally
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES, nll
from posttrain.types import Batch, Terms

SIZES = (1, 3, 5)
WHOLE = 12


class Model(nn.Module):
    """Logits and a value from the token before and the mean of all so far: causal, and small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.policy = nn.Linear(12, VOCABULARY, dtype=torch.float64)
        self.value = nn.Linear(12, 1, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(tokens)
        places = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64)[None, :, None]
        hidden = torch.cat([embedded, embedded.cumsum(1) / places], dim=-1)
        return self.policy(hidden), self.value(hidden)[..., 0]


MODEL = Model()


def mini_batch(weighting: str) -> Batch:
    """A batch whose old policy is near the model, so that some ratios are clipped."""
    batch = ready()
    with torch.no_grad():
        logprobs = ops.token_logprobs(MODEL(batch.tokens)[0], batch.tokens)
    drift = 0.2 * batch.need("values")
    batch = batch.replace(
        old_logprobs=logprobs + drift,
        sampler_logprobs=logprobs + drift.flip(0),
        ref_logprobs=logprobs + drift.flip(1),
    )
    return prepared(batch, weighting)


def terms_of(name: str, batch: Batch, *, whole: Batch) -> Terms:
    logits, values = MODEL(batch.tokens)
    if name.startswith("value "):
        return VALUE_LOSSES[name.removeprefix("value ")](ops.shift(values), batch)
    logprobs = ops.token_logprobs(logits, batch.tokens)
    if name == "nll":
        return nll(logprobs, batch)
    entropy = ops.entropy(ops.shift(logits))
    return policy_terms(name, logprobs, entropy=entropy, batch=batch, whole=whole)


def step(name: str, batch: Batch, size: int) -> tuple[list[Tensor], float, dict[str, float]]:
    """Gradients, loss and metrics of ``Σ weights · loss``, accumulated over micro-batches."""
    MODEL.zero_grad()
    loss, metrics = 0.0, Tally()
    for rows in torch.arange(len(batch.tokens)).split(size):
        part = batch.select(rows)
        terms = terms_of(name, part, whole=batch)
        partial = weights.total(terms.loss, part)
        partial.backward()
        loss, metrics = loss + partial.item(), metrics + tally(terms, part.active)
    gradients = [p.grad.clone() for p in MODEL.parameters() if p.grad is not None]
    return gradients, loss, metrics.summary()


def same_step(
    name: str, batch: Batch, size: int, wanted: tuple[list[Tensor], float, dict[str, float]]
) -> None:
    gradients, loss, metrics = step(name, batch, size)
    assert loss == pytest.approx(wanted[1], rel=1e-12, abs=1e-13)
    for found, expected in zip(gradients, wanted[0], strict=True):
        close(found, expected, rtol=1e-12, atol=1e-12)
    assert set(metrics) == set(wanted[2])
    for key, value in wanted[2].items():
        assert metrics[key] == pytest.approx(value, rel=1e-12, abs=1e-13)


NAMES = (*POLICY_LOSSES, *(f"value {name}" for name in VALUE_LOSSES), "nll")


@pytest.mark.parametrize("weighting", WEIGHT_VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_change_neither_update_nor_metrics(name: str, weighting: str) -> None:
    batch = mini_batch(weighting)
    whole = step(name, batch, WHOLE)
    assert max(float(gradient.abs().max()) for gradient in whole[0]) > 1e-3
    for size in SIZES:
        same_step(name, batch, size, whole)
    same_step(name, batch.select(torch.arange(11, -1, -1)), 4, whole)


def test_the_batch_clips_on_both_sides_and_spreads_the_correction() -> None:
    """What the test above splits is not the trivial case."""
    batch = mini_batch("token_mean")
    _, _, metrics = step("clipped", batch, WHOLE)
    assert metrics["clip_low"] > 0.02
    assert metrics["clip_high"] > 0.02
    assert metrics["kl"] > 0.01
    assert metrics["entropy"] > 1.0
    assert batch.need("correction")[batch.active].std() > 0.05


def test_weights_of_the_micro_batch_would_change_the_update() -> None:
    """The mistake this design prevents: averaging inside each forward pass."""
    batch = mini_batch("token_mean")
    wanted = step("clipped", batch, WHOLE)[0]
    MODEL.zero_grad()
    for rows in torch.arange(WHOLE).split(3):
        part = weights.token_mean(batch.select(rows))
        (weights.total(terms_of("clipped", part, whole=batch).loss, part) / 4).backward()
    found = [p.grad for p in MODEL.parameters() if p.grad is not None]
    gap = sum(float((a - b).norm()) for a, b in zip(found, wanted, strict=True))
    assert gap > 0.05 * sum(float(gradient.norm()) for gradient in wanted)


def trimmed(batch: Batch, row: int) -> Batch:
    """One sequence, without the columns of padding after it."""
    one = batch.select(torch.tensor([row]))
    width = int(one.need("attention").sum())
    fields = {name: value for name, value in vars(one).items() if value is not None}
    return one.replace(
        **{name: value[:, :width] for name, value in fields.items() if value.ndim == 2}
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_columns_of_padding_change_no_update(name: str) -> None:
    """A micro-batch may be padded to its own longest sequence only: the model is causal."""
    batch = mini_batch("sequence_mean")
    wanted = step(name, batch, WHOLE)[0]
    MODEL.zero_grad()
    for row in range(WHOLE):
        part = trimmed(batch, row)
        weights.total(terms_of(name, part, whole=batch).loss, part).backward()
    found = [p.grad for p in MODEL.parameters() if p.grad is not None]
    for gradient, expected in zip(found, wanted, strict=True):
        close(gradient, expected, rtol=1e-12, atol=1e-12)
