"""A learner with a critic: a step is a hand-written pair of AdamW steps; sets are never parted."""

import copy
from dataclasses import replace

import pytest
import torch
from critic_parts import (
    COEFFICIENT,
    CRITIC_LIMIT,
    CRITIC_RATE,
    LIMIT,
    RATE,
    batch,
    learner,
    objective,
    parts,
    value_objective,
)
from small_model import OPTIONS, parameters, small_model
from torch import Tensor, nn

from posttrain.algorithms.weights import sequence_mean
from posttrain.data.collate import collate_ranked
from posttrain.models.load import load_policy
from posttrain.models.reward import reward_from_policy, scores
from posttrain.pipelines.reward_model import preference
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms

METRICS = ("policy_loss", "value_loss", "critic_gradient_norm")


class Hand:
    """Two models and two optimisers, and nothing of the library."""

    def __init__(self, kind: str) -> None:
        self.model, critic = parts(kind)
        self.head, self.trunk = critic.head, None if critic.shared else critic.trunk
        mine = [] if self.trunk is None else list(self.trunk.parameters())
        self.critic = [*mine, *self.head.parameters()]
        self.optimizers = [
            torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
            for weights in (self.model.parameters(), self.critic)
        ]
        self.critic_steps = 0

    def ask(self, given: Batch) -> tuple[Tensor, Tensor]:
        """Row by row, without padding: log π of chosen tokens, and V of what stands before."""
        rows = []
        for tokens, real in zip(given.tokens, given.attention, strict=True):
            row, room = tokens[real][None], len(tokens) - int(real.sum())
            output = self.model(input_ids=row, output_hidden_states=True)
            states = output.hidden_states[-1]  # one pass for both where the trunk is one
            if self.trunk is not None:
                states = self.trunk(input_ids=row).last_hidden_state
            every = output.logits[0, :-1].log_softmax(-1)
            logprobs = every.gather(-1, row[0, 1:, None])[:, 0]
            values = states[0, :-1] @ self.head.weight[0] + self.head.bias[0]
            rows.append(nn.functional.pad(torch.stack([logprobs, values]), (1, room)))
        logprobs, values = torch.stack(rows, dim=1) * given.mask
        return logprobs, values

    def losses(self, given: Batch, old: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's and the critic's: means over sequences of means over tokens."""
        logprobs, values = self.ask(given)
        ratio, gain = (logprobs - old).exp(), given.advantages
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * given.mask
        value = (values - given.returns).square() / 2 * given.mask
        policy, value = (terms.sum(1) / given.mask.sum(1) for terms in (policy, value))
        return policy.mean(), value.mean()

    def step(self, policy: Tensor, value: Tensor, *, only_critic: bool = False) -> list[float]:
        """Each cut by its own norm, at its own rate; the norms before the cut."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (value if only_critic else policy + COEFFICIENT * value).backward()
        chosen = [
            (list(self.model.parameters()), LIMIT, self.optimizers[0]),
            (self.critic, CRITIC_LIMIT, self.optimizers[1]),
        ]
        self.optimizers[1].param_groups[0]["lr"] = CRITIC_RATE / (self.critic_steps + 1)
        self.critic_steps += 1
        norms = []
        for weights, limit, optimizer in chosen[only_critic:]:
            norms.append(torch.cat([weight.grad.flatten() for weight in weights]).norm().item())
            assert norms[-1] > limit, "the cut is not at work"
            for weight in weights:
                weight.grad *= limit / (norms[-1] + 1e-6)
            optimizer.step()
        return norms


def distance(modules: list[nn.Module], others: list[nn.Module]) -> float:
    ours, theirs = (torch.cat([parameters(one) for one in row]) for row in (modules, others))
    return float((ours - theirs).abs().max())


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 10_000])
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_a_step_is_a_pair_of_hand_written_adamw_steps(kind: str, micro_batch_tokens: int) -> None:
    """Three steps on one batch, weights equal to 1e-10; a shared trunk learns from both losses."""
    model, critic = parts(kind)
    student = learner(model, critic, micro_batch_tokens=micro_batch_tokens)
    hand, given = Hand(kind), batch()
    prepared = student.infer(given)
    with torch.no_grad():
        old, _ = hand.ask(given)
    for step in range(3):
        result = student.step(sequence_mean(prepared), objective)
        policy_loss, value_loss = hand.losses(given, old)
        norms = hand.step(policy_loss, value_loss)
        assert distance([model, critic.head], [hand.model, hand.head]) < 1e-10
        if critic.trunk is not None:
            assert distance([critic.trunk], [hand.trunk]) < 1e-10
        expected = [policy_loss.item(), COEFFICIENT * value_loss.item(), norms[1]]
        found = [result.metrics[name] for name in METRICS]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert result.loss == pytest.approx(expected[0] + expected[1], rel=1e-10)
        assert (result.gradient_norm, result.learning_rate) == pytest.approx((norms[0], RATE))
        assert student.critic.num_steps == student.trained.num_steps == step + 1


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 10_000])
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_only_the_critic_learns_where_it_is_told_so(kind: str, micro_batch_tokens: int) -> None:
    """The policy keeps every bit, optimiser and schedule included; then both go on as by hand."""
    model, critic = parts(kind)
    student = learner(model, critic, micro_batch_tokens=micro_batch_tokens)
    hand, given = Hand(kind), batch()
    old = (prepared := student.infer(given)).old_logprobs
    student.step(sequence_mean(prepared), objective)
    hand.step(*hand.losses(given, old))
    weights = parameters(model)
    state = copy.deepcopy(student.trained.optimizer.state_dict()["state"])
    for _ in range(2):
        before = parameters(critic)
        result = student.step(sequence_mean(prepared), value_objective)
        losses = hand.losses(given, old)
        (norm,) = hand.step(*losses, only_critic=True)
        found = (result.loss, result.metrics["critic_gradient_norm"])
        assert found == pytest.approx((losses[1].item(), norm), rel=1e-10)
        assert (result.gradient_norm, result.learning_rate) == (0.0, RATE)  # the policy's
        assert float((parameters(critic) - before).abs().max()) > 1e-4
        assert distance([critic.head], [hand.head]) < 1e-10
    assert torch.equal(parameters(model), weights)
    assert student.trained.num_steps == 1
    after = student.trained.optimizer.state_dict()["state"]
    torch.testing.assert_close(after, state, rtol=0, atol=0)
    student.step(sequence_mean(prepared), objective)
    hand.step(*hand.losses(given, old))
    assert distance([model, critic.head], [hand.model, hand.head]) < 1e-10


def test_without_an_active_token_nothing_changes() -> None:
    """No active token: neither policy nor critic moves, and no schedule advances."""
    model, critic = parts("separate")
    student = learner(model, critic)
    before = torch.cat([parameters(model), parameters(critic)])
    broken = batch().replace(valid=torch.zeros(3, dtype=torch.bool))
    for only_critic in (False, True):
        result = student.step(sequence_mean(broken), value_objective if only_critic else objective)
        assert (result.loss, result.gradient_norm) == (0.0, 0.0)
    assert torch.equal(torch.cat([parameters(model), parameters(critic)]), before)
    assert student.trained.num_steps == student.critic.num_steps == 0


def test_without_a_critic_there_is_none_to_train() -> None:
    student = learner(small_model(), None)
    with pytest.raises(ValueError, match="only_critic: this learner has no critic"):
        student.step(sequence_mean(batch()), value_objective)
    assert student.infer(batch()).values is None


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_infer_adds_the_critics_values(kind: str) -> None:
    """Those of a naive forward pass, without gradient; broken rows and other tokens are 0."""
    model, critic = parts(kind)
    given = batch().replace(valid=torch.tensor([True, True, False]))
    found = learner(model, critic, micro_batch_tokens=7).infer(given)
    with torch.no_grad():
        old, expected = Hand(kind).ask(given)
    both = torch.stack([found.old_logprobs, found.values])[:, :2]
    assert torch.allclose(both, torch.stack([old, expected])[:, :2], rtol=0, atol=1e-12)
    assert not bool(found.values[2].any())
    assert (found.values.requires_grad, found.values.dtype) == (False, torch.float64)
    assert float(expected[:2][given.mask[:2]].abs().min()) > 1e-3


SETS = [  # best first, and the margin by which the best should win
    (((5, 6, 7), (5, 8)), 0.0),
    (((9, 10), (9, 11, 12, 13, 14), (9, 15, 16)), 0.5),
    (((17, 18, 19, 20), (17, 21)), 0.25),
    (((22, 0), (22, 23, 24), (22, 25), (22, 26, 27, 28)), 0.0),
]


def rewarded() -> nn.Module:
    owner = replace(load_policy("tiny", options=OPTIONS), model=small_model())
    return reward_from_policy(owner, seed=5).model


def ranking_loss(model: nn.Module) -> Tensor:
    """The mean over sets of −Σ_k log [e^(s_k − m) / (e^(s_k − m) + Σ_{j>k} e^s_j)]."""
    losses = []
    for members, margin in SETS:
        states = [model.model(torch.tensor([row])).last_hidden_state[0, -1] for row in members]
        found = [model.score(state)[0] for state in states]
        for place, score in enumerate(found[:-1]):
            leader = (score - margin).exp()
            rivals = sum(other.exp() for other in found[place + 1 :])
            losses.append(-(leader / (leader + rivals)).log())
    return sum(losses) / len(SETS)


CALLS = {  # the sets in each forward pass, row by row
    1: [[1, 1, 1], [2, 2], [3, 3, 3, 3], [0, 0]],
    24: [[1, 1, 1], [2, 2, 3, 3, 3, 3], [0, 0]],
    10_000: [[1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0]],
}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("micro_batch_tokens", CALLS)
def test_sets_are_compared_whole(micro_batch_tokens: int) -> None:
    """Widest first, none parted; three steps equal hand-written AdamW steps to 1e-10."""
    model, mine = rewarded(), rewarded()
    cut = {"micro_batch_tokens": micro_batch_tokens, "keep_groups": True}
    student = learner(model, None, forward=scores, **cut)
    seen: list[list[int]] = []

    @Objective
    def watched(outputs: Outputs, part: Batch) -> Terms:
        seen.append(part.groups.tolist())
        return preference(outputs, part)

    optimizer = torch.optim.AdamW(mine.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    given = collate_ranked(SETS, pad_token=0)
    for _ in range(3):
        result = student.step(given, watched)
        loss = ranking_loss(mine)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(mine.parameters(), LIMIT)
        assert float(norm) > LIMIT
        optimizer.step()
        found = (result.loss, result.gradient_norm)
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-10)
        assert distance([model], [mine]) < 1e-10
    assert seen == CALLS[micro_batch_tokens] * 3
