"""Episodes of several turns: packed, padded and in any micro-batches, the gradient is the same.

From rollouts through collate, shaping and advantages to what the optimiser is given, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from critic_parts import parts
from torch import Tensor

from posttrain.build.algorithm import make_plan
from posttrain.config import recipe_from_dict, resolve
from posttrain.data.collate import collate
from posttrain.fast import packed_states as states
from posttrain.learn.learner import LocalLearner
from posttrain.learn.trained import Trained
from posttrain.models.frozen import Reference
from posttrain.pipelines.plan import Plan, State
from posttrain.pipelines.rl import optimise, prepare
from posttrain.types import Batch, Prompt, Rollout, Score, Turn

PAD = 3  # it is also sampled, and said by the environment

# Of each rollout: what the policy and the environment wrote in turn, what was earned before the
# end, and the score. One has a turn alone, one earned by tokens, and one is broken.
EPISODES: list[tuple[int, list[int], list[float], float | None]] = [
    (0, [3, 2, 1, 4, 5], [0.5, -0.25], 2.0),
    (0, [4], [], 1.0),
    (0, [1, 3, 3], [-1.0], 0.5),
    (0, [2, 1, 2, 1, 1], [0.25, 0.25], 0.0),
    (1, [5, 2, 4], [1.0], 0.0),
    (1, [2, 4, 2, 2, 3], [0.0, 0.75], -1.0),
    (1, [2, 2, 2], [9.0], None),
    (1, [6], [], 0.25),
]


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(2)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 20, (count,), generator=generator).tolist())

    prompts = [Prompt(id=str(n), text="?", tokens=drawn(6 + n)) for n in range(2)]
    made = []
    for group, lengths, earned, value in EPISODES:
        turns: list[Turn] = []
        for number, length in enumerate(lengths):
            if number % 2:
                each = (0.5, *[0.0] * (len(turns[-1].tokens) - 1)) if group else ()
                reward = earned[number // 2] + sum(each)
                turns.append(Turn(tokens=drawn(length), text="", reward=reward, token_rewards=each))
            else:
                turns.append(Turn(tokens=drawn(length), text="", logprobs=(-1.0,) * length))
        score = Score(value=0.0, state="crashed") if value is None else Score(value=value)
        made.append(Rollout(prompt=prompts[group], turns=tuple(turns), group=group, score=score))
    return made


def widened(batch: Batch) -> Batch:
    """The same batch in a wider table."""
    fill = {"tokens": PAD, "turns": -1}
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    pad = functools.partial(torch.nn.functional.pad, pad=(0, 5))
    return batch.replace(
        **{
            name: pad(value, value=fill.get(name, 0))
            for name, value in fields.items()
            if value.ndim == 2
        }
    )


def reversed_rows(batch: Batch) -> Batch:
    return batch.select(torch.arange(len(batch.tokens) - 1, -1, -1))


@dataclass(frozen=True)
class Way:
    """How a batch is laid out for the model."""

    packed: bool
    micro_batch_tokens: int
    change: Callable[[Batch], Batch] = lambda batch: batch


WAYS = {
    "padded": Way(packed=False, micro_batch_tokens=10_000),
    "padded, each alone": Way(packed=False, micro_batch_tokens=1),
    "padded, a few": Way(packed=False, micro_batch_tokens=60),
    "padded, wider": Way(packed=False, micro_batch_tokens=10_000, change=widened),
    "packed": Way(packed=True, micro_batch_tokens=10_000),
    "packed, a few": Way(packed=True, micro_batch_tokens=60),
    "packed, other order": Way(packed=True, micro_batch_tokens=40, change=reversed_rows),
}


@contextmanager
def layout(way: Way) -> Iterator[list[int]]:
    """Inside, batches are packed, or never; the calls that packed one."""
    calls: list[int] = []
    real = states.packed_states

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "packed_states", counted)
        patch.setattr(states, "_WORTHWHILE", 100.0)
        if not way.packed:
            patch.setattr(states, "kernel_for", lambda trunk, batch: None)
        yield calls


def plan_of(algorithm: str) -> Plan:
    rl: dict[str, Any] = {"algorithm": algorithm, "epochs": 2, "overlong_buffer": 4}
    rl |= {"max_new_tokens": 7, "entropy_coefficient": 0.01}
    rl |= {"advantage": {"gamma": 0.9}} if algorithm != "grpo" else {}
    rl |= {"group_size": 4}
    return make_plan(resolve(recipe_from_dict({"rl": rl, "task": "sort"})).rl)


def gradients(algorithm: str, way: Way) -> tuple[list[Tensor], Batch]:
    """What the optimisers are given, in both epochs, and the batch that the loss has seen."""
    plan = plan_of(algorithm)
    model, critic = parts("separate")
    found: list[Tensor] = []

    def seen(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        found.append(torch.cat([weight.grad.flatten() for weight in weights]).clone())

    def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(seen)
        return optimizer

    learned = Trained(critic, sgd(critic), max_gradient_norm=1e9) if plan.value_loss else None
    learner = LocalLearner(
        model,
        sgd(model),
        save=lambda folder: None,
        max_gradient_norm=1e9,
        micro_batch_tokens=way.micro_batch_tokens,
        reference=Reference(),
        critic=learned,
    )
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # away from the reference, so that the divergence is not 0
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / 50)
    state = State(kl=plan.kl, penalty=plan.penalty)
    batch = way.change(collate(rollouts(), pad_token=PAD))
    with layout(way) as calls:
        learner.way(batch.tokens.shape[1])  # it tries to pack, to see whether it can
        calls.clear()
        batch = prepare(batch, learner, plan=plan, state=state)
        results = optimise(batch, learner, plan=plan, state=state, seed=0)
    assert bool(calls) == way.packed
    assert len(results) == 2
    return found, batch


@functools.cache
def wanted(algorithm: str) -> tuple[list[Tensor], Batch]:
    return gradients(algorithm, WAYS["padded"])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("algorithm", ["grpo", "turn_grpo", "ppo"])
@pytest.mark.parametrize("name", [name for name in WAYS if name != "padded"])
def test_the_gradient_is_the_same(algorithm: str, name: str) -> None:
    expected, batch = wanted(algorithm)
    assert batch.turns is not None
    assert batch.turn_rewards is not None
    assert len(expected) == (4 if algorithm == "ppo" else 2)
    found, _ = gradients(algorithm, WAYS[name])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float64
        scale = float(theirs.abs().max())
        assert scale > 1e-3
        assert float((mine - theirs).abs().max()) < 1e-12 * max(1.0, scale)


@pytest.mark.usefixtures("float64_throughout")
def test_the_three_have_different_gradients() -> None:
    """Credit of turns is not lost on the way: one score for the episode gives another update."""
    first = [wanted(algorithm)[0][0] for algorithm in ("grpo", "turn_grpo", "ppo")]
    assert float((first[0] - first[1]).abs().max()) > 1e-3
    assert float((first[1] - first[2]).abs().max()) > 1e-3
    _, batch = wanted("turn_grpo")
    row = batch.need("advantages")[0]
    by_turn = [row[batch.need("turns")[0] == turn] for turn in range(3)]
    assert all(bool((each == each[0]).all()) for each in by_turn)
    assert len({float(each[0]) for each in by_turn}) == 3


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("algorithm", ["grpo", "turn_grpo", "ppo"])
def test_a_broken_episode_has_no_part_in_it(algorithm: str) -> None:
    broken = next(n for n, (*_, value) in enumerate(EPISODES) if value is None)
    others = torch.tensor([n for n in range(len(EPISODES)) if n != broken])
    way = Way(packed=False, micro_batch_tokens=10_000, change=lambda batch: batch.select(others))
    found, _ = gradients(algorithm, way)
    for mine, theirs in zip(found, wanted(algorithm)[0], strict=True):
        assert float((mine - theirs).abs().max()) < 1e-12 * max(1.0, float(theirs.abs().max()))
