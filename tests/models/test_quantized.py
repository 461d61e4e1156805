"""Adapters beside a base in four bits: all ways compute with the same dequantised weights."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learn.test_checkpoint import batch, objective
from small_model import OPTIONS, naive_logprobs, small_model
from torch import nn
from torch.nn.functional import linear

from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.adapters import adapted_layers, copy_of_trained, merge_adapters
from posttrain.models.frozen import Reference
from posttrain.models.load import Policy, load_policy
from posttrain.models.quantized import QuantizedLinear
from posttrain.models.save import merge_folder, save_policy, with_adapters, write_base
from posttrain.rollout.engines import NativeEngine
from posttrain.rollout.engines.vllm import VllmEngine
from posttrain.types import Prompt, Sampling

SETTINGS = {"rank": 4, "quantize": "nf4"}


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"adapter\.quantize: needs the package bitsandbytes"):
        policy(tmp_path)


def policy(folder: Path) -> Policy:
    plain = replace(load_policy("tiny", options=OPTIONS), model=small_model(dtype=torch.float32))
    made = with_adapters(plain, SETTINGS, seed=0, folder=folder)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if name.endswith(".adapter.B"):
                weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    return made


@pytest.fixture
def made(tmp_path: Path) -> Policy:
    pytest.importorskip("bitsandbytes")
    return policy(tmp_path)


def layers(model: nn.Module) -> list[QuantizedLinear]:
    found = list(adapted_layers(model).values())
    assert found
    assert all(isinstance(layer, QuantizedLinear) for layer in found)
    return found  # type: ignore[return-value]


def test_a_layer_is_its_dequantised_weight_and_its_adapter(made: Policy) -> None:
    """``(W + s·B A) x + b``, and the gradient of that; 4 bits and a scale for each 64 numbers."""
    layer = layers(made.model)[0]
    size = layer.in_features * layer.out_features
    assert (layer.packed.numel(), layer.packed.dtype) == (-(-size // 64) * 32, torch.uint8)
    assert layer.scales.numel() == -(-size // 64)
    states = torch.randn(3, 5, layer.in_features, requires_grad=True)
    whole = (layer.weight + layer.adapter.change()).detach()
    assert float((layer.weight - whole).abs().max()) > 1e-3
    expected = linear(states, whole, layer.bias)
    found = layer(states)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pushed = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad(y, states, pushed)[0] for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_quantising_again_changes_nothing_and_the_original_is_near(made: Policy) -> None:
    """What was dequantised is quantised to itself: a base that a run wrote is read as it is.

    Neighbours among the 16 numbers of NF4 are at most 0.304 apart, of a block's largest.
    """
    plain = small_model(dtype=torch.float32).state_dict()
    for name, layer in adapted_layers(made.model).items():
        original = plain[f"{name}.weight"]
        apart = (layer.weight - original).flatten().abs()
        limit = 0.1521 * layer.scales.repeat_interleave(64)[: len(apart)]  # type: ignore[operator]
        assert bool((apart <= limit).all())
        assert float(apart.max()) > 0
    before = [layer.weight.clone() for layer in layers(made.model)]
    merged = copy_of_trained(made.model)
    for layer in layers(merged):
        nn.init.zeros_(layer.adapter.B)
    merge_adapters(merged)
    again = with_adapters(replace(made, model=merged, adapter=None), SETTINGS, seed=0,
                          folder=Path("none"))  # fmt: skip
    after = [layer.weight for layer in layers(again.model)]
    assert all(map(torch.equal, before, after))


def test_learner_sampler_reference_and_merged_model_agree(made: Policy, tmp_path: Path) -> None:
    student = LocalLearner(
        made.model,
        adamw(made.model, learning_rate=5e-3),
        save=functools.partial(save_policy, made),
        reference=Reference(),
    )
    packed = [layer.packed.clone() for layer in layers(made.model)]
    first = student.infer(batch()).need("old_logprobs")
    for _ in range(3):
        student.step(student.infer(batch()), objective)
    seen = student.infer(batch())
    assert torch.equal(seen.need("ref_logprobs"), first)
    assert float((seen.need("old_logprobs") - first).abs().max()) > 1e-3
    assert all(map(torch.equal, packed, [layer.packed for layer in layers(made.model)]))

    prompts = [Prompt(id="p", text="", tokens=(5, 6, 7, 8))]
    for sampled in (made.model, copy_of_trained(made.model)):  # its own, and one that runs ahead
        engine = NativeEngine(sampled, end_tokens=[3], decode=str)
        engine.sync(student)(1)
        ((rollout, *_),) = engine.generate(
            prompts, Sampling(max_new_tokens=8), num_samples=2, seed=0
        )
        tokens = torch.tensor([[*prompts[0].tokens, *rollout.tokens]])
        own = made.model(tokens).logits.log_softmax(-1)[0, 3:-1]
        expected = own.gather(1, tokens[0, 4:, None])[:, 0]
        found = torch.tensor(rollout.turns[0].logprobs)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-4)

    write_base(made)
    student.save(tmp_path / "adapter")  # its folder knows how its base is kept
    merge_folder(tmp_path / "adapter", tmp_path / "merged")
    for folder in ("adapter", "merged"):
        again = load_policy(str(tmp_path / folder)).model
        assert bool(adapted_layers(again)) == (folder == "adapter")
        with torch.no_grad():
            found = naive_logprobs(again, batch())
        mask = batch().mask
        expected = seen.need("old_logprobs")[mask]
        torch.testing.assert_close(found[mask], expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="is quantised, and vLLM's is not"):
        VllmEngine(made, [], decode=str, folder=tmp_path)
    merge_adapters(made.model)
    with torch.no_grad():
        found = naive_logprobs(made.model, batch())
    mask = batch().mask
    torch.testing.assert_close(found[mask], seen.need("old_logprobs")[mask], rtol=0, atol=1e-4)
