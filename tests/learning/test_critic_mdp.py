"""The critic learns the value of every state of a task small enough to write all of it down.

Four tokens, two prompts, at most three tokens an answer: 80 answers with a reward each, and 26
states. The policy is fixed; the loop's own pieces train the critic, and V must become what the
policy can expect from each state, counted out answer by answer.
"""

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from posttrain.algorithms.advantages import gae
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.losses.value import squared
from posttrain.algorithms.shaping import score_at_last_token
from posttrain.data.collate import collate
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw, rate_factor
from posttrain.learn.trained import Trained
from posttrain.models.critic import Critic, separate_critic
from posttrain.models.load import Policy
from posttrain.pipelines.plan import Plan, State
from posttrain.pipelines.rl import optimise, prepare
from posttrain.types import Batch, Prompt, Rollout, Score, Turn

END, TOKENS, LONGEST = 0, range(4), 3
PROMPTS = ((1, 2), (3, 1))
STEPS = 150


@functools.cache
def policy() -> Policy:
    """A random model, not too sure of anything: the rarest answer comes 4 times in 1000."""
    config = GPT2Config(
        vocab_size=len(TOKENS),
        n_positions=8,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 0.3
    return Policy(model=model, tokenizer=None, source="", end_tokens=(END,), pad_token=END)


@functools.cache
def chances(state: tuple[int, ...]) -> tuple[float, ...]:
    """π(· | state), by a forward pass of its own."""
    with torch.no_grad():
        logits = policy().model(torch.tensor([state])).logits[0, -1]
    return tuple(logits.double().softmax(-1).tolist())


def over(answer: tuple[int, ...]) -> bool:
    return len(answer) == LONGEST or answer[-1:] == (END,)


def answers() -> Iterator[tuple[int, ...]]:
    """Every answer, once."""
    for length in range(1, LONGEST + 1):
        for answer in itertools.product(TOKENS, repeat=length):
            if over(answer) and not any(over(answer[:n]) for n in range(length)):
                yield answer


def reward(prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Anything from −0.5 to 1.5, with no pattern that a state's last token would give away."""
    place = int("".join(map(str, (*prompt, *answer))), base=5)
    return (place * 7919 % 41) / 20 - 0.5


def expected_return(prompt: tuple[int, ...], answer: tuple[int, ...], *, gamma: float) -> float:
    """What the policy can expect from here on; the reward comes with the answer's last token."""
    found = 0.0
    for token, chance in zip(TOKENS, chances((*prompt, *answer)), strict=True):
        after = (*answer, token)
        if over(after):
            found += chance * reward(prompt, after)
        else:
            found += chance * gamma * expected_return(prompt, after, gamma=gamma)
    return found


def states() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every state in which a token is chosen, as prompt and answer so far."""
    seen = {
        (prompt, answer[:n])
        for prompt in PROMPTS
        for answer in answers()
        for n in range(len(answer))
    }
    return sorted(seen)


def rollout(number: int, answer: tuple[int, ...], logprobs: tuple[float, ...]) -> Rollout:
    reason = "stop" if answer[-1] == END else "length"
    prompt = PROMPTS[number]
    return Rollout(
        prompt=Prompt(id=str(number), text="", tokens=prompt),
        turns=(Turn(tokens=answer, logprobs=logprobs, text="", stop_reason=reason, version=0),),
        group=number,
        score=Score(value=reward(prompt, answer)),
    )


def everything() -> Batch:
    """All answers to both prompts, with their exact log-probs."""
    rows = []
    for number, prompt in enumerate(PROMPTS):
        for answer in answers():
            picked = [chances((*prompt, *answer[:n]))[token] for n, token in enumerate(answer)]
            rows.append(rollout(number, answer, tuple(torch.tensor(picked).log().tolist())))
    return collate(rows, pad_token=END)


def by_chance(batch: Batch) -> Batch:
    """Every state counts once, and there every way on as often as the policy takes it.

    So ``Σ weights · loss`` is the mean over states of the expected loss, and nothing is sampled.
    """
    ahead = batch.sampler_logprobs.double().flip(1).cumsum(1).flip(1)
    return batch.replace(weights=ahead.exp() * batch.mask / len(states()))


def learner(steps: int) -> tuple[LocalLearner, Critic]:
    critic = separate_critic(policy())
    trained = Trained(
        critic,
        adamw(critic, learning_rate=3e-3),
        schedule=lambda step: rate_factor(step, total=steps, warmup=10, schedule="cosine"),
    )
    model = policy().model
    optimizer = adamw(model, learning_rate=1.0)  # it must never be used
    return LocalLearner(model, optimizer, save=lambda folder: None, critic=trained), critic


def plan(*, gamma: float, lam: float, **others: object) -> Plan:
    return Plan(
        shaping=(score_at_last_token,),
        advantage=functools.partial(gae, gamma=gamma, lam=lam, normalise=False),
        loss=clipped,
        value_loss=squared,
        critic_warmup=1,
        **others,
    )


def errors(critic: Critic, *, gamma: float) -> Tensor:
    """|V − the enumerated value| of every state, each asked by itself."""
    found = []
    for prompt, answer in states():
        tokens = torch.tensor([[*prompt, *answer, END]])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[0, -1] = True
        with torch.no_grad():
            value = critic(Batch(tokens=tokens, mask=mask))[0, -1].item()
        found.append(abs(value - expected_return(prompt, answer, gamma=gamma)))
    return torch.tensor(found)


def test_the_task_is_what_it_says() -> None:
    """All answers are there, their chances add up to one, and values differ enough to matter."""
    batch = everything()
    chance = batch.sampler_logprobs.double().sum(1).exp()
    assert len(chance) == 80
    assert chance[batch.groups == 0].sum().item() == pytest.approx(1.0, abs=1e-6)
    assert chance[batch.groups == 1].sum().item() == pytest.approx(1.0, abs=1e-6)
    assert float(chance.min()) > 3e-3
    assert float(chance.max()) < 0.3
    assert len(states()) == 26
    assert by_chance(batch).weights.sum().item() == pytest.approx(1.0, abs=1e-6)
    values = torch.tensor([expected_return(*state, gamma=1.0) for state in states()])
    assert float(values.std()) > 0.2


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.8, 0.5)])
def test_v_becomes_the_expected_return_of_every_state(gamma: float, lam: float) -> None:
    """By λ-returns of all answers, weighted by their chances; the policy keeps every bit."""
    student, critic = learner(STEPS)
    chosen = plan(gamma=gamma, lam=lam, weights=by_chance)
    start, state = everything(), State(kl=Coefficient(value=0.0))
    before = [weight.clone() for weight in policy().model.parameters()]
    assert float(errors(critic, gamma=gamma).max()) > 0.3
    for _ in range(STEPS):
        batch = prepare(start, student, plan=chosen, state=state)
        optimise(batch, student, plan=chosen, state=state, seed=0)
    worst = float(errors(critic, gamma=gamma).max())
    assert worst < 0.05
    for weight, old in zip(policy().model.parameters(), before, strict=True):
        assert torch.equal(weight, old)
