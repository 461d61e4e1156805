"""A config that asks for too much is refused before memory is taken, with its file's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from posttrain.models.files import size
from posttrain.models.files.size import check_size, fewest_weights
from posttrain.models.load import load_policy
from posttrain.models.reward import load_reward, reward_from_policy, save_reward
from posttrain.models.save import save_policy

SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
# What transformers calls it, and what is asked for: none of it could ever be built here.
ABSURD = [
    ({"num_hidden_layers": 10_000}, r"num_hidden_layers = 10,000, and at most 2,000 are built"),
    ({"num_hidden_layers": 10**12}, r"num_hidden_layers = 1,000,000,000,000, and at most 2,000"),
    ({"hidden_size": 10**9}, r"1 layers of hidden_size 1,000,000,000 .* GiB as float32, and this"),
    (
        {"vocab_size": 10**13},
        r"a vocab_size of 10,000,000,000,000: at least .* GiB of memory; fix",
    ),
    ({"intermediate_size": 10**12}, r"at least 32,000,\d+,\d+,\d+ weights"),
    ({"head_dim": 10**12}, r"at least 32,000,\d+,\d+,\d+ weights"),
]


def change(folder: Path, values: dict[str, Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(("values", "says"), ABSURD)
def test_an_absurd_config_is_refused_with_its_file(
    tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    save_policy(load_policy("tiny", options=SMALL), tmp_path / "model")
    change(tmp_path / "model", values)
    with pytest.raises(ValueError, match=says) as raised:
        load_policy(str(tmp_path / "model"))
    assert str(tmp_path / "model" / "config.json") in str(raised.value)


def test_so_is_that_of_a_reward_model(tmp_path: Path) -> None:
    save_reward(reward_from_policy(load_policy("tiny", options=SMALL), seed=0), tmp_path / "model")
    change(tmp_path / "model", {"num_hidden_layers": 10_000})
    with pytest.raises(ValueError, match=r"config\.json asks for num_hidden_layers = 10,000"):
        load_reward(str(tmp_path / "model"))


@pytest.mark.parametrize(
    "options", [{"num_layers": 10_000}, {"hidden_size": 2**30}, {"intermediate_size": 10**13}]
)
def test_so_are_sizes_of_tiny(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"model: model\.options asks for"):
        load_policy("tiny", options=options)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50),
        Qwen2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50),
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=50, n_positions=16),
        OPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128),
        MixtralConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50),
        Qwen3MoeConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_experts=4, head_dim=16
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_no_model_is_counted_higher_than_it_is(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert 0.2 < fewest_weights(config) / model.num_parameters() <= 1.0


def test_what_just_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=50)
    needed = fewest_weights(config) * 2
    monkeypatch.setattr(size, "machine_memory", lambda: needed)
    check_size(config, where="here", dtype=torch.bfloat16)
    monkeypatch.setattr(size, "machine_memory", lambda: needed - 1)
    with pytest.raises(ValueError, match="as bfloat16"):
        check_size(config, where="here", dtype=torch.bfloat16)
