"""Products by oneDNN: the numbers and gradients of PyTorch's own, wherever a layer goes."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import linear as plain

from posttrain.fast import linear_products
from posttrain.fast.fused_linear import fuse_linears
from posttrain.fast.linear_products import QuickAdapted, QuickLinear, linear, quicken_linears
from posttrain.models.adapters import AdapterSettings, adapted_layers, add_adapters
from posttrain.models.head import is_plain
from posttrain.models.tiny import build_tiny

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch comes without oneDNN"
)


@pytest.fixture
def counted(monkeypatch):
    """Has every CPU take oneDNN, for any size; the shapes of its products."""
    shapes, multiply = [], linear_products._multiply

    def noted(rows, columns, *, bias=None):
        shapes.append((tuple(rows.shape), tuple(columns.shape)))
        return multiply(rows, columns, bias=bias)

    monkeypatch.setattr(linear_products, "_multiply", noted)
    monkeypatch.setattr(linear_products, "WORTHWHILE", 0)
    monkeypatch.setattr(linear_products, "pays_off", lambda: True)
    return shapes


def gradients(product, *given, gradient):
    leaves = [None if each is None else each.clone().requires_grad_() for each in given]
    found = product(*leaves[:2], bias=leaves[2])
    found.backward(gradient)
    return [found.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inside", "outside"), [(24, 40), (40, 24), (32, 32)])
def test_numbers_and_gradients_are_those_of_pytorch(counted, bias, inside, outside):
    torch.manual_seed(0)
    given = torch.randn(2, 5, inside), torch.randn(outside, inside)
    offset = torch.randn(outside) if bias else None
    gradient = torch.randn(2, 5, outside)
    found = gradients(linear, *given, offset, gradient=gradient)
    expected = gradients(plain, *given, offset, gradient=gradient)
    assert len(counted) == 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_views_or_expanded(counted):
    torch.manual_seed(0)
    states, weight = torch.randn(6, 8).t(), torch.randn(10, 6)
    for gradient in (
        torch.randn(10, 8).t(),
        torch.ones(1).expand(8, 10),
        torch.randn(8, 20)[:, ::2],
    ):
        found = gradients(linear, states, weight, None, gradient=gradient)
        expected = gradients(plain, states, weight, None, gradient=gradient)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert counted


def test_only_gradients_that_are_wanted_are_computed(counted):
    states, weight = torch.randn(4, 8), torch.randn(6, 8)
    linear(states.requires_grad_(), weight).sum().backward()
    assert len(counted) == 2
    assert weight.grad is None


def test_other_types_autocast_and_small_products_are_pytorchs_own(counted, monkeypatch):
    states, weight = torch.randn(4, 8), torch.randn(6, 8)
    assert linear(states.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(states, weight).dtype == torch.bfloat16
    monkeypatch.setattr(linear_products, "WORTHWHILE", 4 * 8 * 6 + 1)
    assert torch.equal(linear(states, weight), plain(states, weight))
    assert not counted


def test_a_model_computes_the_same_and_stays_what_it_is(counted):
    model, _ = build_tiny(hidden_size=16, num_layers=2, num_heads=2)
    tokens = torch.arange(24).view(2, 12) % 90
    expected = model(tokens).logits
    names = list(model.state_dict())
    quicken_linears(model)
    quicken_linears(model)
    quick = [layer for layer in model.modules() if type(layer) is QuickLinear]
    assert len(quick) == 2 * 7 + 1
    assert all(map(is_plain, quick))
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert counted
    assert list(model.state_dict()) == names
    assert type(copy.deepcopy(model).lm_head) is QuickLinear
    fuse_linears(model)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_adapters_fit_before_and_after(counted):
    settings = AdapterSettings(rank=2)
    tokens = torch.arange(24).view(2, 12) % 90
    found = []
    for quicken_first in (True, False):
        model, _ = build_tiny(hidden_size=16, num_layers=2, num_heads=2)
        if quicken_first:
            quicken_linears(model)
            expected = model(tokens).logits
        add_adapters(model, settings, seed=0)
        quicken_linears(model)
        assert {type(layer) for layer in adapted_layers(model).values()} == {QuickAdapted}
        found.append(model(tokens).logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], expected)  # new adapters are 0: bit for bit


def test_what_it_cannot_multiply_is_left_alone(counted, monkeypatch):
    wide = nn.Linear(4, 4).double()
    elsewhere = nn.Linear(4, 4, device="meta")
    quicken_linears(nn.Sequential(wide, elsewhere))
    assert type(wide) is type(elsewhere) is nn.Linear
    monkeypatch.setattr(linear_products, "pays_off", lambda: False)
    quicken_linears(layer := nn.Linear(4, 4))
    assert type(layer) is nn.Linear


def test_row_counts_that_seldom_come_again_are_not_prepared_for(counted):
    """In sampling; a learner's passes, of many rows or with a gradient, are."""
    weight = torch.randn(4, 8)
    with torch.no_grad():
        for rows in (16, 17, 1031):
            states = torch.randn(rows, 8)
            torch.testing.assert_close(linear(states, weight), plain(states, weight))
    linear(torch.randn(17, 8), weight.requires_grad_())
    assert [rows for (rows, _), _ in counted] == [16, 1031, 17]


def test_frozen_weights_keep_no_states_for_backward(counted):
    states, weight = torch.randn(6, 8, requires_grad=True), torch.randn(4, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        linear(states, weight).sum().backward()
    assert kept == [(4, 8)]
    torch.testing.assert_close(states.grad, weight.sum(0).expand(6, 8))


def test_a_wrong_shape_is_told_as_pytorch_tells_it(counted):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.randn(6, 7), torch.randn(4, 8))


@pytest.mark.parametrize("adapted", [False, True])
def test_what_is_pickled_is_the_plain_layer(counted, tmp_path, adapted):
    """So a model that was trained can be loaded where there is no posttrain; a copy stays quick."""
    model, _ = build_tiny(hidden_size=16, num_layers=2, num_heads=2)
    if adapted:
        add_adapters(model, AdapterSettings(rank=2), seed=0)
    plain_types = [type(layer) for layer in model.modules()]
    quicken_linears(model)
    quick_types = [type(layer) for layer in model.modules()]
    copied = copy.deepcopy(model)
    assert quick_types != plain_types
    assert [type(layer) for layer in copied.modules()] == quick_types
    torch.save(copied, tmp_path / "model.pt")
    assert b"Quick" not in (tmp_path / "model.pt").read_bytes()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(layer) for layer in loaded.modules()] == plain_types
    assert [type(layer) for layer in model.modules()] == quick_types
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
        assert torch.equal(copied.state_dict()[name], value)
    assert copied.lm_head.weight is not model.lm_head.weight
    assert all(
        one.requires_grad == other.requires_grad
        for one, other in zip(loaded.parameters(), model.parameters(), strict=True)
    )


def test_transforms_of_torch_func_go_through_it(counted):
    """Gradients of each sample, Jacobians, what is mapped: PyTorch's own product computes them."""
    torch.manual_seed(0)
    layer, expected = nn.Linear(4, 3), nn.Linear(4, 3)
    expected.load_state_dict(layer.state_dict())
    quicken_linears(layer)
    states = torch.randn(5, 4)

    def found_of(module):
        weights = dict(module.named_parameters())

        def loss(weights, state):
            return torch.func.functional_call(module, weights, (state,)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, states)
        jacobian = torch.func.jacrev(module)(states[0])
        with torch.no_grad():
            mapped = torch.func.vmap(module)(states.repeat(16, 1, 1))
        return {**each, "jacobian": jacobian, "mapped": mapped}

    torch.testing.assert_close(found_of(layer), found_of(expected))
    assert not counted
    layer(states)
    assert counted


def test_small_and_large_products_are_compiled_once(counted) -> None:
    """What :func:`linear` asks of a shape must not become a condition of the compiled code."""
    layer = nn.Linear(64, 64)
    layer.__class__ = QuickLinear
    compilations = CompileCounter()
    compiled = torch.compile(layer, backend=compilations, dynamic=True)
    with torch.no_grad():
        for rows in (3, 40, 500, 5000):
            compiled(torch.randn(rows, 64))
    assert compilations.frame_count == 1
