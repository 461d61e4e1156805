"""save_policy: what plain transformers reads back, and that a folder is whole or not there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.families import FAMILIES, VOCABULARY, build
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy
from posttrain.models.tiny import build_tokenizer

SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}
TOKENS = torch.tensor([[7, 1, 8, 22, 3]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_transformers_reads_back_the_same_logits(tmp_path: Path, dtype: str) -> None:
    policy = load_policy("tiny", dtype=dtype, seed=3, options={"chat": True})
    save_policy(policy, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype)
    assert torch.equal(model(TOKENS).logits, policy.model(TOKENS).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<think>2 + 3</think>\n<answer>5</answer>"
    assert tokenizer(text).input_ids == policy.tokenizer(text).input_ids
    assert tokenizer.chat_template == policy.tokenizer.chat_template is not None
    assert model.generation_config.eos_token_id == policy.end_tokens[0]
    assert model.generation_config.pad_token_id == policy.pad_token
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {
        ".json",
        ".jinja",
        ".safetensors",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    tokenizer = build_tokenizer()
    model = build(name, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    policy = Policy(model=model, tokenizer=tokenizer, source="", end_tokens=(1, 5), pad_token=1)
    save_policy(policy, tmp_path / "out")
    again = load_policy(str(tmp_path / "out"))
    assert again.end_tokens == (1, 5)
    assert TOKENS.max() < VOCABULARY
    if hasattr(model.config, "num_experts_per_tok"):
        again.model.set_experts_implementation("eager")  # as that of the other: to the bit
    assert torch.equal(again.model(TOKENS).logits, model(TOKENS).logits)


def test_given_weights_stand_in_for_the_models_own(tmp_path: Path) -> None:
    policy = load_policy("tiny", options=SMALL)
    other = load_policy("tiny", options=SMALL, seed=9)
    save_policy(policy, tmp_path / "out", weights=other.model.state_dict())
    again = load_policy(str(tmp_path / "out"))
    assert torch.equal(again.model(TOKENS).logits, other.model(TOKENS).logits)


def test_a_contradictory_generation_config_keeps_its_tokens(tmp_path: Path) -> None:
    policy = load_policy("tiny", options=SMALL)
    policy.model.generation_config = GenerationConfig(temperature=0.6, do_sample=False)
    save_policy(replace(policy, end_tokens=(1, 4)), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == ([1, 4], 0)
    assert "temperature" not in written


def test_a_sound_generation_config_is_kept(tmp_path: Path) -> None:
    policy = load_policy("tiny", options=SMALL)
    policy.model.generation_config = GenerationConfig(temperature=0.6, do_sample=True)
    save_policy(policy, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["temperature"], written["eos_token_id"]) == (0.6, 1)


def test_an_older_model_is_replaced_and_nothing_else_left(tmp_path: Path) -> None:
    first = load_policy("tiny", options=SMALL, seed=1)
    second = load_policy("tiny", options=SMALL, seed=2)
    save_policy(first, tmp_path / "deep" / "out")
    (tmp_path / "deep" / "out" / "stale.safetensors").touch()
    save_policy(second, tmp_path / "deep" / "out")
    again = load_policy(str(tmp_path / "deep" / "out"))
    assert torch.equal(again.model(TOKENS).logits, second.model(TOKENS).logits)
    assert not (tmp_path / "deep" / "out" / "stale.safetensors").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_save_that_fails_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy("tiny", options=SMALL)
    save_policy(policy, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save_policy(policy, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not a model folder, so it is not replaced"):
        save_policy(load_policy("tiny", options=SMALL), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
