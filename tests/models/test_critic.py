"""The critic: V of the state before each token, from zero or from a reward model."""

from pathlib import Path

import pytest
import torch
from models.families import FAMILIES, VOCABULARY, batch, build
from torch import Tensor, nn

from posttrain.fast.score import score_tokens
from posttrain.models.critic import Critic, separate_critic, shared_critic
from posttrain.models.load import Policy, load_policy
from posttrain.models.reward import (
    RewardModel,
    load_reward,
    reward_from_policy,
    save_reward,
    with_normalisation,
)
from posttrain.models.reward_scorer import ModelScorer
from posttrain.models.tiny import build_tokenizer
from posttrain.types import Batch

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 64}


def policy(name: str = "llama") -> Policy:
    """A model of a family in float64; the batches hold its 23 tokens only."""
    tokenizer = build_tokenizer()
    return Policy(model=build(name), tokenizer=tokenizer, source=name, end_tokens=(1,), pad_token=0)


def with_random_head(critic: Critic) -> Critic:
    """The same critic, no longer at 0."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for weight in critic.head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return critic


def naive(trunk: nn.Module, head: nn.Linear, given: Batch) -> Tensor:
    """Token by token: the head on the last state of what stands before, nothing else shown."""
    values = torch.zeros(given.tokens.shape, dtype=torch.float64)
    for row, position in given.mask.nonzero().tolist():
        before = given.tokens[row, :position][None]
        state = trunk(input_ids=before, use_cache=False).last_hidden_state[0, -1]
        values[row, position] = (state * head.weight[0]).sum() + head.bias[0]
    return values


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("make", [separate_critic, shared_critic])
def test_a_new_critic_knows_nothing(name: str, make: object) -> None:
    """V = 0 everywhere, exactly, and the head's gradient is not."""
    critic = make(policy(name))
    values = critic(batch())
    assert torch.equal(values, torch.zeros(3, 9, dtype=torch.float64))
    values.sum().backward()
    assert float(critic.head.bias.grad) == int(batch().mask.sum())
    assert float(critic.head.weight.grad.abs().sum()) > 0


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_those_of_a_naive_loop(name: str) -> None:
    """Separate and shared, in whatever batch and however padded; 0 where nothing was chosen."""
    owner, given = policy(name), batch(width=14)
    trunk = owner.model.get_decoder()
    for make in (separate_critic, shared_critic):
        critic = with_random_head(make(owner))
        with torch.no_grad():
            expected, found = naive(trunk, critic.head, given), critic(given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert float(expected[given.mask].std()) > 0.1, "too flat to show a mistake"
        assert not bool(found[~given.mask].any())


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_value_depends_on_what_stands_before_its_token_only(name: str) -> None:
    """Another token at t leaves V up to t, bit for bit, and changes the next."""
    owner, given = policy(name), batch()
    critic = with_random_head(separate_critic(owner))
    with torch.no_grad():
        before = critic(given)
        for position in range(1, 8):
            tokens = given.tokens.clone()
            tokens[0, position] = (tokens[0, position] + 1) % VOCABULARY
            after = critic(given.replace(tokens=tokens))
            assert torch.equal(after[:, : position + 1], before[:, : position + 1])
            assert torch.equal(after[1:], before[1:])
            if given.mask[0, position + 1]:
                assert abs(float(after[0, position + 1] - before[0, position + 1])) > 1e-3


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shared_head_in_the_policys_pass_says_the_same(name: str) -> None:
    """score_tokens gives the critic's values, and the trunk learns from them too."""
    owner, given = policy(name), batch()
    critic = with_random_head(shared_critic(owner))
    outputs = score_tokens(owner.model, given, value_head=critic.head)
    torch.testing.assert_close(outputs.values, critic(given), rtol=1e-12, atol=1e-12)
    plain = score_tokens(owner.model, given)
    assert plain.values is None
    assert torch.equal(plain.logprobs, outputs.logprobs)

    weights = torch.linspace(-1, 2, given.tokens.numel(), dtype=torch.float64).view(3, 9)
    outputs.values.mul(weights).sum().backward()
    trunk = owner.model.get_decoder()
    got = [weight.grad.clone() for weight in trunk.parameters()]
    owner.model.zero_grad()
    for row, length in enumerate(given.attention.sum(1).tolist()):
        states = trunk(input_ids=given.tokens[row : row + 1, :length]).last_hidden_state[0]
        values = states[:-1] @ critic.head.weight[0]  # of what stands before tokens 1, 2, …
        wanted = weights[row, 1:length] * given.mask[row, 1:length]
        (values * wanted).sum().backward()
    for one, weight in zip(got, trunk.parameters(), strict=True):
        torch.testing.assert_close(one, weight.grad, rtol=1e-8, atol=1e-8)
    assert max(float(one.abs().max()) for one in got) > 1e-2


@pytest.mark.usefixtures("float64_throughout")
def test_a_model_with_logits_of_its_own_has_values_too() -> None:
    """Where whole logits are computed, the value head still reads hidden states."""
    owner, given = policy(), batch()
    critic = with_random_head(shared_critic(owner))
    owner.model._posttrain_logits_are_head_of_states = False
    outputs = score_tokens(owner.model, given, value_head=critic.head)
    torch.testing.assert_close(outputs.values, critic(given), rtol=1e-12, atol=1e-12)


def test_a_shared_critic_owns_its_head_alone() -> None:
    """Asked by itself it gives the trunk no gradient; a separate one trains a copy."""
    owner = policy()
    shared, separate = shared_critic(owner), separate_critic(owner)
    ours = {id(weight) for weight in owner.model.parameters()}
    assert [id(weight) for weight in shared.parameters()] == [
        id(p) for p in shared.head.parameters()
    ]
    assert not ours & {id(weight) for weight in shared.parameters()}
    assert not ours & {id(weight) for weight in separate.parameters()}
    size = sum(weight.numel() for weight in owner.model.get_decoder().parameters())
    assert sum(weight.numel() for weight in separate.parameters()) == size + 17
    for critic in (with_random_head(shared), with_random_head(separate)):
        critic(batch()).sum().backward()
        assert all(weight.grad is None for weight in owner.model.parameters())
        assert all(weight.grad is not None for weight in critic.parameters())


def test_a_shared_critic_follows_the_policy_and_a_separate_one_does_not() -> None:
    owner, given = policy(), batch()
    shared, separate = (with_random_head(make(owner)) for make in (shared_critic, separate_critic))
    with torch.no_grad():
        before = separate(given)
        torch.testing.assert_close(shared(given), before, rtol=1e-12, atol=1e-12)
        for weight in owner.model.parameters():
            weight.mul_(1.5)
        assert torch.equal(separate(given), before)
        assert float((shared(given) - before).abs().max()) > 1e-2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved reward model with a normalisation, made of another seed's policy."""
    made = reward_from_policy(load_policy("tiny", seed=6, options=SMALL), seed=1)
    save_reward(with_normalisation(made, torch.tensor([0.5, 3.0])), tmp_path / "reward")
    return tmp_path / "reward"


def read(reward: RewardModel, rollout: object) -> tuple[int, ...]:
    return ()


def test_from_a_reward_model_v_is_its_normalised_score_of_the_text_so_far(folder: Path) -> None:
    """At the token that follows a whole sequence: (raw − 1.75) / 1.25 of the sequence."""
    critic = separate_critic(load_policy("tiny", seed=0, options=SMALL), str(folder))
    rows = [(5, 6, 7, 8, 1), (9, 10, 1), (11, 12, 0, 1)]
    tokens = torch.zeros(3, 7, dtype=torch.long)
    mask = torch.zeros(3, 7, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        mask[index, len(row)] = True  # any token may follow
    with torch.no_grad():
        values = critic(Batch(tokens=tokens, mask=mask))[mask]
    scorer = ModelScorer(lambda: load_reward(str(folder)), render=read)
    expected = [(raw - 1.75) / 1.25 for raw in scorer.raw(rows)]
    assert values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert not critic.shared
    assert all(weight.requires_grad for weight in critic.parameters())


def test_a_critic_from_a_reward_model_learns_the_pad_token_too(folder: Path) -> None:
    """As the policy does: an embedding with a padding index would drop its gradient."""
    critic = separate_critic(load_policy("tiny", seed=0, options=SMALL), str(folder))
    given = Batch(tokens=torch.tensor([[5, 0, 6]]), mask=torch.tensor([[False, False, True]]))
    critic(given).sum().backward()
    assert float(critic.trunk.get_input_embeddings().weight.grad[0].abs().sum()) > 0


def test_a_reward_model_with_another_vocabulary_is_refused(folder: Path) -> None:
    owner = load_policy("tiny", seed=0, options=SMALL)
    owner.tokenizer.add_tokens(["<new>"])
    message = r"rl\.critic\.source.*another vocabulary.*106 tokens and 107; '<new>' is missing"
    with pytest.raises(ValueError, match=message):
        separate_critic(owner, str(folder))


def test_what_is_no_reward_model_is_no_critic(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is none at"):
        separate_critic(load_policy("tiny", options=SMALL), str(tmp_path / "nothing"))
