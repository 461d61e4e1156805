"""Adapters: their mathematics in float64, and the files of ``peft`` in both directions."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_model import OPTIONS, small_model
from torch import Tensor, nn

from posttrain.models.adapters import (
    AdapterSettings,
    adapted_layers,
    add_adapters,
    copy_of_trained,
    merge_adapters,
    round_base,
)
from posttrain.models.frozen import EarlierAdapter
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import merge_folder, save_policy

PEFT = Path(__file__).parent / "peft_adapter"  # written by peft 0.21.2
BASE = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}
TOKENS = torch.arange(40).view(2, 20) % 90
SETTINGS = AdapterSettings(rank=3, alpha=6.0)


def adapted(settings: AdapterSettings = SETTINGS, *, moved: bool = True) -> Any:
    """A float64 model with adapters, whose B is no longer 0 where they are ``moved``."""
    model = small_model()
    add_adapters(model, settings, seed=7)
    if moved:
        move(model)
    return model


def move(model: nn.Module) -> None:
    drawn = torch.Generator().manual_seed(1)
    for layer in adapted_layers(model).values():
        weight = layer.adapter.B
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=drawn, dtype=torch.float64) / 10)


def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, rslora=True)])
def test_an_adapters_gradient_is_the_projection_of_the_full_gradient(
    settings: AdapterSettings,
) -> None:
    """``∂L/∂B = s·G Aᵀ`` and ``∂L/∂A = s·Bᵀ G``, with G the gradient of ``W + s·B A``."""
    model = adapted(settings)
    merged = copy_of_trained(model)
    merge_adapters(merged)
    merged.requires_grad_(True)
    for one in (model, merged):
        logits(one).log_softmax(-1)[..., 5].sum().backward()
    full = dict(merged.named_modules())
    scale = 6.0 / (math.sqrt(3) if settings.rslora else 3)
    for name, layer in adapted_layers(model).items():
        A, B = layer.adapter.A, layer.adapter.B
        gradient: Any = full[name].weight.grad
        torch.testing.assert_close(B.grad, scale * gradient @ A.T, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(A.grad, scale * B.T @ gradient, rtol=1e-9, atol=1e-12)
        assert layer.weight.grad is None


def test_new_adapters_leave_the_model_as_it_is_bit_for_bit() -> None:
    before = logits(small_model())
    model = adapted(moved=False)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(adapted()), before)


def test_the_seed_decides_a_and_b_is_zero() -> None:
    first, second = adapted(moved=False), adapted(moved=False)
    other = small_model()
    add_adapters(other, SETTINGS, seed=8)
    layers = [adapted_layers(model) for model in (first, second, other)]
    assert len(layers[0]) == 14  # 7 of each of two layers; neither the head nor the embedding
    for name, layer in layers[0].items():
        adapter = layer.adapter
        assert torch.equal(adapter.A, layers[1][name].adapter.A)
        assert not torch.equal(adapter.A, layers[2][name].adapter.A)
        assert not adapter.B.any()
        bound = 1 / math.sqrt(layer.in_features)
        assert 0.8 * bound < float(adapter.A.detach().abs().max()) <= bound
    trained = {name for name, w in first.named_parameters() if w.requires_grad}
    assert trained == {f"{name}.adapter.{part}" for name in layers[0] for part in "AB"}


def test_targets_choose_layers_by_the_ends_of_their_names() -> None:
    chosen = adapted_layers(adapted(replace(SETTINGS, targets=("q_proj", "layers.1.mlp.up_proj"))))
    assert [name.removeprefix("model.layers.") for name in chosen] == [
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "1.mlp.up_proj",
    ]
    with pytest.raises(ValueError, match=r"adapter\.targets: .*'q_pro'; it has down_proj, gate_"):
        adapted(replace(SETTINGS, targets=("q_pro",)))


def test_merging_gives_a_plain_model_of_the_same_probabilities() -> None:
    model = adapted()
    before = logits(model)
    merge_adapters(model)
    assert not adapted_layers(model)
    assert {type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    torch.testing.assert_close(logits(model), before, rtol=1e-9, atol=1e-12)


def test_the_earlier_adapter_is_the_model_as_it_was() -> None:
    model = adapted()
    before = logits(model)
    earlier = EarlierAdapter(model)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.adapter.B.mul_(2)
    now = logits(model)
    with earlier.on_device() as same:
        assert same is model
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), now)
    held = sum(weight.numel() for weight in earlier.weights().values())
    assert held == sum(w.numel() for w in model.parameters() if w.requires_grad)


def test_a_copy_shares_the_base_and_not_the_adapters() -> None:
    model = adapted()
    copied = copy_of_trained(model)
    own = dict(model.named_parameters())
    shared = {name for name, w in copied.named_parameters() if w is own[name]}
    assert shared == {name for name in own if ".adapter." not in name}


def test_a_rounded_base_computes_what_autocast_does_and_can_be_asked_without() -> None:
    model = adapted().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits(model)
    round_base(model, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), expected)
    assert logits(model).dtype == torch.float32


# ----------------------------------------------------------------------------- files of peft


def base_policy() -> Policy:
    return load_policy("tiny", seed=3, options=BASE)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """An adapter that peft has written, and its base beside it."""
    save_policy(base_policy(), tmp_path / "base")
    shutil.copytree(PEFT, tmp_path / "adapter")
    change(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    return tmp_path / "adapter"


def change(folder: Path, **keys: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_an_adapter_of_peft_is_its_product_added_to_the_base(recorded: Path) -> None:
    held = load_file(recorded / "adapter_model.safetensors")
    expected: Any = base_policy().model
    with torch.no_grad():
        for name in {name.rpartition(".lora_")[0] for name in held}:
            change = held[f"{name}.lora_B.weight"] @ held[f"{name}.lora_A.weight"]
            layer = expected.get_submodule(name.removeprefix("base_model.model."))
            layer.weight += 3 / math.sqrt(2) * change  # alpha 3, rank 2, rsLoRA
    loaded = load_policy(str(recorded))
    assert loaded.adapter is not None
    assert (loaded.adapter.rank, loaded.adapter.alpha, loaded.adapter.rslora) == (2, 3.0, True)
    assert loaded.adapter.targets == ("down_proj", "q_proj")
    torch.testing.assert_close(logits(loaded.model), logits(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(loaded.model), logits(base_policy().model), atol=1e-2)


def test_what_is_written_says_what_peft_said(recorded: Path, tmp_path: Path) -> None:
    loaded = load_policy(str(recorded))
    save_policy(loaded, tmp_path / "again")
    first, second = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (recorded, tmp_path / "again")
    )
    ours = {**second, "lora_dropout": 0.1, "init_lora_weights": False}  # neither is used again
    assert ours == {key: first[key] for key in second}
    one, other = (
        load_file(folder / "adapter_model.safetensors") for folder in (recorded, tmp_path / "again")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    again = load_policy(str(tmp_path / "again"))
    assert torch.equal(logits(again.model), logits(loaded.model))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora = true"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save = \["lm_head"\]'),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, 'bias = "all"'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
        ({"of_a_newer_version": 1}, "of_a_newer_version = 1"),
        ({"base_model_name_or_path": "/nowhere/base"}, "adapter of '/nowhere/base', which is not"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        *(({"r": wrong}, "says r = ") for wrong in (None, 0, 3, "x", True, 10**7)),
        *(({"lora_alpha": wrong}, "says lora_alpha = ") for wrong in (None, 0, "x", math.nan)),
        ({"modules_to_save": 5}, "modules_to_save = 5"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    recorded: Path, keys: dict[str, Any], said: str
) -> None:
    change(recorded, **keys)
    with pytest.raises(ValueError, match=said):
        load_policy(str(recorded))


def test_an_adapter_of_another_model_is_refused(recorded: Path, tmp_path: Path) -> None:
    save_policy(load_policy("tiny", options={**BASE, "hidden_size": 32}), tmp_path / "wide")
    change(recorded, base_model_name_or_path=str(tmp_path / "wide"))
    with pytest.raises(ValueError, match=r"does not fit its base, model\.layers\.0"):
        load_policy(str(recorded))


def test_merge_writes_a_plain_folder(recorded: Path, tmp_path: Path) -> None:
    merge_folder(recorded, tmp_path / "merged")
    merged = load_policy(str(tmp_path / "merged"))
    assert merged.adapter is None
    expected = logits(load_policy(str(recorded)).model)
    torch.testing.assert_close(logits(merged.model), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(FileExistsError):
        merge_folder(recorded, tmp_path / "merged")
    with pytest.raises(ValueError, match="holds no adapter"):
        merge_folder(tmp_path / "merged", tmp_path / "twice")


def test_peft_itself_reads_what_is_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    policy = load_policy("tiny", options=OPTIONS)
    save_policy(policy, tmp_path / "base")
    add_adapters(policy.model, SETTINGS, seed=0)
    move(policy.model)
    written = replace(policy, adapter=SETTINGS, base=str(tmp_path / "base"))
    save_policy(written, tmp_path / "adapter")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(policy.model), rtol=1e-5, atol=1e-6)
