"""Reward models: plain transformers reads the same scores, padded or not, and errors say why."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from models.families import build
from small_model import small_model
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from posttrain.models.load import Policy, load_policy
from posttrain.models.reward import (
    PAD,
    RewardModel,
    load_reward,
    reward_from_policy,
    save_reward,
    score_sequences,
    with_normalisation,
)
from posttrain.models.reward_scorer import pad_rows
from posttrain.models.save import save_policy
from posttrain.models.tiny import build_tokenizer

SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}
NAMES = ("llama", "llama tied", "gpt2", "qwen2", "mistral", "gemma", "gemma3", "gpt_neox", "opt")
TEXTS = ("2+3=5<|end|>", "no<|end|>", "cut-off", "a-longer-one<think>7</think>12<|end|>", "x")


def opt() -> transformers.PreTrainedModel:
    """Unlike the others its decoder is only a part of its base model."""
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    others = {"vocab_size": 23, "num_attention_heads": 2, "init_std": 0.5, "dropout": 0.0}
    config = transformers.OPTConfig(max_position_embeddings=64, **sizes, **others)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def one_special_token() -> PreTrainedTokenizerFast:
    """As GPT-2's: the end token is the only special one, and nothing is left to pad with."""
    words = ("<|end|>", "<think>", "</think>", *map(chr, range(32, 127)))
    tokenizer = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|end|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<|end|>", pad_token="<|end|>"
    )


def policy(name: str, *, tokenizer: PreTrainedTokenizerFast | None = None) -> Policy:
    """A small model of a family that pads with its end token, on the left as chat models do."""
    if tokenizer is None:
        tokenizer = build_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token
    # As one read from a folder that says so.
    tokenizer.init_kwargs["padding_side"] = tokenizer.padding_side = "left"
    model = opt() if name == "opt" else build(name, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    end = tokenizer.eos_token_id
    return Policy(model=model, tokenizer=tokenizer, source=name, end_tokens=(end,), pad_token=end)


def naive(owner: Policy, head: nn.Linear, rows: Sequence[Sequence[int]]) -> Tensor:
    """Row by row, without padding: the head's weights on the policy's last hidden state."""
    with torch.no_grad():
        states = [
            owner.model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1]
            for row in rows
        ]
        return torch.stack(states) @ head.weight[0]


def raw(reward: RewardModel, rows: Sequence[Sequence[int]]) -> Tensor:
    with torch.no_grad():
        return score_sequences(reward.model, pad_rows(rows, reward.pad_token))


@pytest.mark.parametrize("special", ["several", "one"])
@pytest.mark.parametrize("name", NAMES)
def test_plain_transformers_reads_the_same_scores(tmp_path: Path, name: str, special: str) -> None:
    """One by one and in batches that the saved tokenizer pads, though pad was the end token."""
    owner = policy(name, tokenizer=one_special_token() if special == "one" else None)
    reward = reward_from_policy(owner, seed=3)
    save_reward(reward, tmp_path / "out")
    rows = [reward.tokenizer(text).input_ids for text in TEXTS]
    expected = naive(owner, reward.head, rows)
    early = naive(owner, reward.head, [row[:-1] for row in rows[:4]])
    assert float((early - expected[:4]).abs().min()) > 1e-3, "one token early would not be seen"

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert owner.tokenizer.pad_token_id == owner.end_tokens[0], "the policy's own was changed"
    assert tokenizer.pad_token_id not in owner.end_tokens
    assert (tokenizer.pad_token == PAD) is (special == "one")
    with torch.no_grad():
        alone = [model(**tokenizer([text], return_tensors="pt")).logits[0, 0] for text in TEXTS]
        padded = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
        together = model(**padded).logits[:, 0]
    again = load_reward(str(tmp_path / "out"))
    assert (padded.attention_mask == 0).any()
    assert tokenizer(list(TEXTS)).input_ids == rows
    for found in (torch.stack(alone), together, raw(reward, rows), raw(again, rows)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert again.pad_token == reward.pad_token == tokenizer.pad_token_id


def test_a_pad_token_that_ends_nothing_is_kept() -> None:
    owner = load_policy("tiny", options=SMALL)
    assert reward_from_policy(owner, seed=0).pad_token == owner.pad_token


@pytest.mark.usefixtures("float64_throughout")
def test_scores_and_gradients_are_those_of_unpadded_rows() -> None:
    """In float64, with the pad token inside a row and at its end: only positions count."""
    owner = replace(load_policy("tiny", options=SMALL), model=small_model())
    reward = reward_from_policy(owner, seed=2)
    rows = [(5, 6, 0, 7, 8, 9), (11, 0), (12, 13, 14, 0)]
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def gradient(scores: Tensor) -> Tensor:
        (scores * weights).sum().backward()
        found = [weight.grad.clone() for weight in reward.model.parameters()]
        reward.model.zero_grad()
        return torch.cat([part.flatten() for part in found])

    one_by_one = [
        reward.head(reward.model.base_model(torch.tensor([row])).last_hidden_state[0, -1])
        for row in rows
    ]
    expected = torch.cat(one_by_one)
    found = score_sequences(reward.model, pad_rows(rows, 0))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    got, wanted = gradient(found), gradient(expected)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)
    pad = got[: reward.model.get_input_embeddings().weight.numel()].view(-1, 16)[0]
    assert float(pad.abs().sum()) > 0, "the pad token is a real token here, and must learn"


def test_half_precision_scores_are_not_rounded_again() -> None:
    """The head's product of bfloat16 states is made in float32."""
    owner = load_policy("tiny", options=SMALL, dtype="bfloat16")
    reward = reward_from_policy(owner, seed=2)
    assert {weight.dtype for weight in reward.model.parameters()} == {torch.bfloat16}
    found = raw(reward, [(5, 6, 7)])
    state = owner.model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
    exact = (state.double() * reward.head.weight[0].double()).sum()
    assert float(found[0]) == pytest.approx(exact.item(), rel=1e-5)
    assert float(found[0]) != float(found[0].bfloat16())


def test_the_seed_decides_every_bit() -> None:
    """And moves no random number of the caller's; a row added for padding is decided too."""
    made = []
    for seed in (1, 1, 2):
        state = torch.random.get_rng_state()
        owner = policy("gpt2", tokenizer=one_special_token())
        model = reward_from_policy(owner, seed=seed).model
        assert torch.equal(torch.random.get_rng_state(), state)
        torch.rand(1)
        made.append((model.score.weight, model.get_input_embeddings().weight))
    (head, table), (same_head, same_table), (other, _) = made
    assert torch.equal(head, same_head)
    assert torch.equal(table, same_table)
    assert not torch.equal(head, other)
    assert float(head.detach().std()) == pytest.approx(17**-0.5, rel=0.5)


def test_the_policy_keeps_its_weights_and_the_reward_model_its_own() -> None:
    owner = load_policy("tiny", options=SMALL)
    reward = reward_from_policy(owner, seed=1)
    before = naive(owner, reward.head, [(5, 6)])
    with torch.no_grad():
        for weight in reward.model.base_model.parameters():
            weight.add_(1.0)
    assert torch.equal(naive(owner, reward.head, [(5, 6)]), before)


def test_normalisation_survives_the_round_trip(tmp_path: Path) -> None:
    reward = reward_from_policy(policy("llama"), seed=4)
    rows = [reward.tokenizer(text).input_ids for text in TEXTS]
    scores = raw(reward, rows)
    made = with_normalisation(replace(reward, chat=True), scores)
    mean = sum(scores.tolist()) / 5
    assert made.mean == pytest.approx(mean, rel=1e-12)
    variance = sum((score - mean) ** 2 for score in scores.tolist()) / 5
    assert made.deviation == pytest.approx(variance**0.5, rel=1e-12)
    save_reward(made, tmp_path / "out")
    again = load_reward(str(tmp_path / "out"))
    assert (again.mean, again.deviation, again.chat) == (made.mean, made.deviation, True)
    normal = (raw(again, rows).double() - again.mean) / again.deviation
    assert abs(float(normal.mean())) < 1e-6
    assert float(normal.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("scores", [[0.1, 0.1, 0.1], [2.0], [1.0, float("nan")]])
def test_scores_without_spread_cannot_be_normalised(scores: list[float]) -> None:
    reward = reward_from_policy(load_policy("tiny", options=SMALL), seed=0)
    with pytest.raises(ValueError, match=r"cannot be normalised.*has learned nothing"):
        with_normalisation(reward, torch.tensor(scores))


@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_an_encoder_is_asked_by_its_own_forward_pass(tmp_path: Path, kind: str) -> None:
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), initializer_range=0.5, num_labels=1, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = load_reward(str(tmp_path))
    rows = [(5, 6, 7, 8), (9, 10), (11,)]
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(raw(reward, rows), expected, rtol=1e-5, atol=1e-5)
    assert float(expected.std()) > 1e-2
    with pytest.raises(ValueError, match=f"{kind}ForSequenceClassification.*not trained here"):
        _ = reward.head


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards") / "reward"
    save_reward(reward_from_policy(load_policy("tiny", options=SMALL), seed=0), folder)
    return folder


def swap_tokens(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    assert '"a": 76' in text
    swapped = text.replace('"a": 76', '"a": 77').replace('"b": 77', '"b": 76')
    (folder / "tokenizer.json").write_text(swapped)


def more_tokens(folder: Path) -> None:
    """For a folder that says nothing about its tokenizer, as those made elsewhere."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "posttrain": None}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)


def causal(folder: Path) -> None:
    save_policy(load_policy("tiny", options=SMALL), folder)


def headless(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    causal(folder)
    (folder / "config.json").write_text(config)


def two_labels(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (two_labels, "has 2 labels; a reward is one number.*num_labels = 1"),
        (swap_tokens, "is not the one it was trained with.*copy its own tokenizer files back"),
        (more_tokens, r"ids up to 106, and the model knows 106\); copy its own"),
        (causal, "is a language model without a score head; train one with the reward stage"),
        (headless, r"lacks the weights score\.weight.*train one with the reward stage"),
        (lambda folder: (folder / "model.safetensors").unlink(), "^reward model:.*no .safetensors"),
        (
            shutil.rmtree,
            "there is none at.*give the folder of a sequence classifier with one label",
        ),
    ],
)
def test_what_is_no_reward_model_is_refused(
    saved: Path, tmp_path: Path, spoil: object, message: str
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "reward"))
    load_reward(str(folder))
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_reward(str(folder))
