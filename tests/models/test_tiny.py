"""The model and tokenizer that are built in code."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.models.load import load_policy
from posttrain.models.tiny import CHARACTERS, TAGS, build_tiny, build_tokenizer

TOKENIZER = build_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*CHARACTERS, *TAGS])).map("".join))
def test_decoding_gives_back_what_was_encoded(text: str) -> None:
    tokens = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == text


def test_one_token_per_character_and_tag() -> None:
    text = "".join(CHARACTERS)
    assert len(TOKENIZER(text).input_ids) == len(text) == 96
    for tag in TAGS:
        assert len(TOKENIZER(tag).input_ids) == 1
    assert TOKENIZER.decode(TOKENIZER("a  b .\n don 't , x").input_ids) == "a  b .\n don 't , x"


def test_an_unknown_character_becomes_the_unknown_token() -> None:
    tokens = TOKENIZER("aé\t漢").input_ids
    assert tokens[1:] == [TOKENIZER.unk_token_id] * 3
    assert TOKENIZER.unk_token_id not in (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_chat_template_writes_turns_and_asks_for_one() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+3="},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>be brief<|end|><|user|>2+3=<|end|><|assistant|>"
    assert len(TOKENIZER(text).input_ids) == 5 + len("be brief") + len("2+3=")


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first, _ = build_tiny(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    again, _ = build_tiny(seed=1)
    other, _ = build_tiny(seed=2)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_default_has_about_a_million_weights() -> None:
    policy = load_policy("tiny")
    assert 0.8e6 < sum(weight.numel() for weight in policy.model.parameters()) < 1.3e6


def test_options_shape_the_model() -> None:
    options = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 64}
    policy = load_policy("tiny", options={**options, "tie_embeddings": True}, dtype="float64")
    config = policy.model.config
    assert (config.hidden_size, config.num_hidden_layers) == (32, 1)
    assert policy.tokenizer.model_max_length == config.max_position_embeddings == 64
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert policy.model.dtype == torch.float64
    wide = load_policy("tiny", options={**options, "initial_deviation": 0.2}).model
    assert wide.lm_head.weight.detach().std().item() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("chat", [True, False])
def test_it_has_a_chat_template_where_asked(chat: bool) -> None:
    policy = load_policy("tiny", options={"num_layers": 1, "chat": chat})
    assert bool(policy.tokenizer.chat_template) == chat


def test_bad_options_name_the_fix() -> None:
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        load_policy("tiny", options={"hiden_size": 3})
    with pytest.raises(ValueError, match="choose a multiple of 8"):
        load_policy("tiny", options={"hidden_size": 30})


def test_plain_transformers_loads_it(tmp_path: Path) -> None:
    model, tokenizer = build_tiny(hidden_size=32, num_layers=1, chat=True)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<think>a B</think>\n<answer>5</answer> é"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.chat_template == tokenizer.chat_template is not None
    tokens = torch.tensor([loaded(text).input_ids])
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden_size": 0}, "hidden_size: must be at least 1, got 0"),
        ({"hidden_size": -8}, "hidden_size: must be at least 1, got -8"),
        ({"hidden_size": 130}, "hidden_size: 130 does not divide into 4 heads of an even size"),
        ({"num_layers": 0}, "num_layers: must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads: must be at least 1, got 0"),
        ({"num_heads": -2}, "num_heads: must be at least 1, got -2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_heads, 4"),
        ({"num_key_value_heads": -1}, "num_key_value_heads: must be at least 1, got -1"),
        ({"intermediate_size": -4}, "intermediate_size: must be at least 1, got -4"),
        ({"max_positions": -1}, "max_positions: must be at least 1, got -1"),
    ],
)
def test_a_size_that_makes_no_model_is_named(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.options\.{says}"):
        build_tiny(**options)


def test_a_whole_number_is_a_deviation() -> None:
    model, _ = build_tiny(hidden_size=8, num_layers=1, num_heads=1, initial_deviation=1)
    assert model.config.initializer_range == 1.0
