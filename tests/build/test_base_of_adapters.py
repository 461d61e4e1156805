"""The base of adapters is rounded or quantised before the device has to hold it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TINY, recipe

from posttrain.build import setup
from posttrain.config import Resolved, recipe_from_dict, resolve
from posttrain.models.load import Policy, load_policy


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where weights were read to."""
    found: list[str] = []

    def loaded(source: str, **given: Any) -> Policy:
        policy = load_policy(source, **given)
        found.append(policy.model.device.type)
        return policy

    monkeypatch.setattr(setup, "load_policy", loaded)
    return found


def given(folder: Path, **adapter: Any) -> Resolved:
    values = recipe(folder, sft=None, eval=None)
    values |= {"model": {"name": "tiny", "options": TINY, "compute": "bfloat16"}}
    return resolve(recipe_from_dict({**values, "adapter": adapter} if adapter else values))


def test_the_base_of_adapters_waits_in_main_memory(tmp_path: Path, places: list[str]) -> None:
    """Meta stands in for a GPU: what arrives there is rounded, and all of it arrives."""
    policy = setup.make_policy(given(tmp_path, rank=4), "tiny", device="meta")
    assert places == ["cpu"]
    weights = dict(policy.model.named_parameters())
    assert {weight.device.type for weight in weights.values()} == {"meta"}
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_weights_that_all_learn_are_read_where_they_are_used(
    tmp_path: Path, places: list[str]
) -> None:
    with pytest.raises(RuntimeError, match="meta"):  # whose numbers nobody can read
        setup.make_policy(given(tmp_path), "tiny", device="meta")


def test_four_bits_are_all_that_the_device_gets(tmp_path: Path, places: list[str]) -> None:
    pytest.importorskip("bitsandbytes")
    policy = setup.make_policy(given(tmp_path, rank=4, quantize="nf4"), "tiny", device="meta")
    assert places == ["cpu"]
    weights = dict(policy.model.named_parameters())
    assert weights["model.layers.0.mlp.up_proj.packed"].device.type == "meta"
    assert "model.layers.0.mlp.up_proj.weight" not in weights
