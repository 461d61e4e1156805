"""Several layers in one product: the numbers of each of them, and no memory held."""

import copy

import pytest
import torch
from models.families import build
from torch import nn

from posttrain.fast.cast_copy import CastCopy, frozen_bytes
from posttrain.fast.decode import fuses_frozen
from posttrain.fast.fused_linear import FusedLinear, fuse_linears
from posttrain.models.adapters import AdapterSettings, adapted_layers, add_adapters, round_base


class Special(nn.Linear):
    """A linear layer that does more, as adapters do."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(states)


class Block(nn.Module):
    """Three layers of the names that are looked for."""

    def __init__(self, *, bias: bool = False, last: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 8, bias=bias)
        self.k_proj = nn.Linear(6, 4, bias=bias)
        self.v_proj = last(6, 2, bias=bias)

    def forward(self, states: torch.Tensor, others: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(states), self.k_proj(others), self.v_proj(states)]


def products(model: nn.Module) -> list[FusedLinear]:
    return [module for module in model.modules() if isinstance(module, FusedLinear)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mistral"])
def test_a_model_says_the_same_and_follows_its_weights(family: str) -> None:
    model = build(family)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.normal_(layer.bias)
    fused = copy.deepcopy(model)
    weights = dict(fused.named_parameters())
    fuse_linears(fused)
    assert len(products(fused)) == 2 * len(model.get_decoder().layers)
    tokens = torch.arange(18).reshape(2, 9)
    for _ in range(2):
        expected = model(input_ids=tokens, use_cache=False).logits
        found = fused(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(1.25)
                weights[name].copy_(weight)  # in place, as it was known before
    assert all(not product._parts and product._states is None for product in products(fused))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_are_fused_with_their_layers_and_followed(family: str) -> None:
    """In float64, to rounding: q, k, v and their A in one product, all B in a second one."""
    model = build(family)
    add_adapters(model, AdapterSettings(rank=3), seed=0)
    fused = copy.deepcopy(model)
    weights = dict(fused.named_parameters())
    fuse_linears(fused)
    assert len(products(fused)) == 4 * len(model.get_decoder().layers)
    tokens = torch.arange(18).reshape(2, 9)
    drawn, seen = torch.Generator().manual_seed(0), []
    for _ in range(3):
        seen.append(expected := model(input_ids=tokens, use_cache=False).logits.detach())
        found = fused(input_ids=tokens, use_cache=False).logits.detach()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn(weight.shape, generator=drawn, dtype=weight.dtype) / 9)
                    weights[name].copy_(weight)  # in place, as it was known before
    assert float((seen[2] - seen[0]).abs().max()) > 1e-3  # they do count


def test_other_states_are_not_taken_for_the_first() -> None:
    block, states = Block(), torch.randn(3, 6)
    expected = block(states, others := torch.randn(3, 6))
    fuse_linears(block)
    assert products(block)
    for found, wanted in zip(block(states, others), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(block(others, states)[::2], block(others, others)[::2], strict=True):
        torch.testing.assert_close(found, wanted)


def hooked() -> Block:
    block = Block()
    block.k_proj.register_forward_hook(lambda module, given, found: 2 * found)
    return block


def wrapped() -> Block:
    block = Block()
    own = block.v_proj.forward
    block.v_proj.forward = lambda states: 2 * own(states)  # as accelerate does
    return block


def tied() -> Block:
    block = Block()
    block.other = nn.Linear(6, 8, bias=False)
    block.other.weight = block.q_proj.weight
    return block


def one_bias() -> Block:
    block = Block()
    block.q_proj.bias = nn.Parameter(torch.randn(8))
    return block


APART = {
    "one bias": one_bias,
    "special": lambda: Block(last=Special),
    "hooked": hooked,
    "wrapped": wrapped,
    "tied": tied,
}


@pytest.mark.parametrize("name", APART)
def test_what_is_more_than_a_product_stays_apart(name: str) -> None:
    block, states = APART[name](), torch.randn(3, 6)
    expected = block(states, states)
    fuse_linears(block)
    assert not products(block)
    for found, wanted in zip(block(states, states), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("fuse", [True, False])
def test_the_frozen_base_of_adapters_is_shared_unless_it_is_fused(fuse: bool) -> None:
    """Either way the copy says what the model says, and takes new adapters over."""
    torch.manual_seed(0)
    model = build("llama").float()
    add_adapters(model, AdapterSettings(rank=2), seed=0)
    round_base(model, torch.bfloat16)
    copied = CastCopy(model, torch.bfloat16, fuse_frozen=fuse)
    base = {layer.weight.data_ptr() for layer in adapted_layers(model).values()}
    own = {weight.data_ptr() for weight in copied.model.parameters()}
    assert bool(products(copied.model)) is fuse
    assert base.isdisjoint(own) if fuse else base <= own
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.adapter.B, std=0.1)
    copied.refresh()
    tokens = torch.arange(18).reshape(2, 9)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=tokens, use_cache=False).logits
        found = copied.model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_frozen_base_is_fused_where_a_quarter_of_the_free_memory_holds_it() -> None:
    model = build("llama").float()
    add_adapters(model, AdapterSettings(rank=2), seed=0)
    round_base(model, torch.bfloat16)
    size = frozen_bytes(model, torch.bfloat16)
    assert size == sum(2 * layer.weight.numel() for layer in adapted_layers(model).values())
    assert fuses_frozen(model, torch.bfloat16, free=4 * size)
    assert not fuses_frozen(model, torch.bfloat16, free=4 * size - 1)
    assert fuses_frozen(model, torch.bfloat16, free=None)
