"""Activation checkpointing: the same bits, less memory, and neither sampling nor copies suffer."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from models.allocations import peak_bytes
from models.families import batch, build

from posttrain.fast.activations import checkpoint_activations
from posttrain.fast.score import score_tokens
from posttrain.models.cache import new_cache, next_logits
from posttrain.types import Batch


def gradients(model: torch.nn.Module, given: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logprobs = score_tokens(model, given).logprobs
    logprobs.sum().backward()
    return logprobs, [weight.grad.clone() for weight in model.parameters()]


def group(*, size: int = 6, length: int = 24) -> Batch:
    """Sequences that share a prompt: these are packed, so attention is ours."""
    tokens = torch.randint(0, 23, (size, length), generator=torch.Generator().manual_seed(2))
    tokens[:, :16] = tokens[0, :16]
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, 16:] = True
    return Batch(
        tokens=tokens,
        mask=mask,
        attention=torch.ones_like(mask),
        groups=torch.zeros(size, dtype=torch.long),
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("given", [batch(), group()], ids=["rows", "group"])
def test_the_same_to_the_last_bit(name: str, given: Batch) -> None:
    model = build(name)
    before = gradients(model, given)
    checkpoint_activations(model)
    after = gradients(model, given)
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(*pair) for pair in zip(after[1], before[1], strict=True))


def test_less_is_kept_and_it_can_be_switched_off() -> None:
    model, given = build("llama"), batch(lengths=(40, 40, 40), width=40)
    gradients(model, given)  # whatever is found out once

    def peak() -> int:
        model.zero_grad()
        return peak_bytes(lambda: score_tokens(model, given).logprobs.sum().backward())

    kind, whole = type(model.model.layers[0]), peak()
    checkpoint_activations(model)
    checkpoint_activations(model)
    assert peak() < 0.8 * whole  # of two layers one is there again while its gradient is computed
    checkpoint_activations(model, enabled=False)
    assert type(model.model.layers[0]) is kind
    assert peak() == pytest.approx(whole, rel=0.01)


def test_sampling_with_a_cache_is_as_before() -> None:
    model, tokens = build("llama"), torch.tensor([[4, 5, 6], [7, 8, 9]])
    positions = torch.arange(3).expand(2, 3)

    def twice() -> torch.Tensor:
        cache = new_cache(model)
        options = {"cache": cache, "attention": None}
        next_logits(model, tokens, positions=positions, **options)
        return next_logits(model, tokens[:, :1], positions=positions[:, :1] + 3, **options)

    wanted = twice()  # with gradients enabled: a cache is never computed again
    checkpoint_activations(model)
    assert torch.equal(twice(), wanted)
    with torch.no_grad():
        assert torch.equal(twice(), wanted)


def test_a_copy_recomputes_too_and_is_freed_at_once() -> None:
    model, given = build("llama"), batch()
    checkpoint_activations(model)
    other = copy.deepcopy(model)
    assert torch.equal(gradients(other, given)[0], gradients(model, given)[0])
    assert other.model.layers[0]._posttrain_owner is not model.model.layers[0]._posttrain_owner
    layer = weakref.ref(other.model.layers[0])
    gc.disable()
    try:
        del other
        assert layer() is None, "a cycle keeps the weights until the garbage collector comes"
    finally:
        gc.enable()


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no layers that transformers knows"):
        checkpoint_activations(torch.nn.Linear(2, 2))
    checkpoint_activations(torch.nn.Linear(2, 2), enabled=False)


def test_a_pickle_holds_the_layers_of_transformers(tmp_path: Path) -> None:
    """They load where there is no posttrain; a copy of the model computes again as it does."""
    model = build("llama")
    kind = type(model.model.layers[0])
    checkpoint_activations(model)
    copied = copy.deepcopy(model)
    assert type(copied.model.layers[0]) is type(model.model.layers[0]) is not kind
    torch.save(copied, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded.model.layers[0]) is kind
    tokens = batch().tokens
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
