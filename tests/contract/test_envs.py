"""What every environment keeps: states that know nothing of each other, answers that can be read,
and an end.
"""

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.envs import ENVS, make_env
from posttrain.envs.env_pool import EnvPool
from posttrain.models.load import load_policy
from posttrain.protocols import Answer, Env
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines import NativeEngine
from posttrain.rollout.engines.scripted import code_points
from posttrain.rollout.environment import Conversations, Environment, episode_seed
from posttrain.types import Prompt, Rollout, Sampling, Score, Turn

SPECS: dict[str, dict[str, Any]] = {
    "scripted": {"name": "scripted"},
    "scripted, two replies": {"name": "scripted", "replies": ["so?", "really?"]},
    "scripted, with a score": {"name": "scripted", "replies": ["so?"], "score": 0.25},
    "scripted, in tokens": {"name": "scripted", "replies": [[5, 6]]},
    "calculator": {"name": "calculator"},
    "python": {"name": "python", "sandbox": "none"},
    "wordle": {"name": "wordle", "max_guesses": 1},
    "alphabet_sort": {"name": "alphabet_sort", "turns": 1},
    "guess_number": {"name": "guess_number", "high": 20},
    "tic_tac_toe": {"name": "tic_tac_toe"},
    "tic_tac_toe, perfect": {"name": "tic_tac_toe", "opponent": "perfect", "illegal_moves": 9},
}
PROMPTS = [Prompt(id=str(n), text="2+3=", tokens=(5, 6, 7), columns={"answer": n}) for n in (0, 1)]
SAID = [Turn(tokens=(8, n), text=f"<{n}>", logprobs=(-1.0, -2.0)) for n in (3, 4)]
MANY = 50  # turns after which a rollout is over, whatever was said


@pytest.fixture(params=SPECS)
def env(request: pytest.FixtureRequest) -> Env:
    return make_env(SPECS[request.param])


def ends(answer: Answer) -> bool:
    return not isinstance(answer, str | list | tuple)


def conversation(env: Env, prompt: Prompt, *, turns: Sequence[Turn], seed: int = 0) -> list[Answer]:
    """All that it says, up to the end."""
    seeded = {"seed": seed} if "seed" in inspect.signature(env.start).parameters else {}
    state, said = env.start(prompt, **seeded), []
    for turn in itertools.islice(itertools.cycle(turns), MANY):
        said.append(env.reply(state, turn))
        if ends(said[-1]):
            break
    return said


# These want a library of others: tests/envs/test_adapters_*.py play them, where it is installed.
ADAPTERS = {"verifiers", "openenv", "mcp", "gymnasium"}


def test_every_environment_is_here() -> None:
    assert {spec["name"] for spec in SPECS.values()} | ADAPTERS == set(ENVS)


@pytest.mark.parametrize("workers", [0, 1])
def test_it_comes_to_an_end_and_says_what_can_be_read(env: Env, workers: int) -> None:
    last = conversation(env, PROMPTS[0], turns=SAID)[-1]
    assert ends(last)
    assert last is None or isinstance(last, int | float | Score)
    pool = EnvPool(env, workers=workers)
    encode = lambda said, turn: code_points(str(said))  # noqa: E731
    talks = Conversations(Environment(pool=pool, encode=encode, render=lambda prompt: prompt))
    talks.begin(PROMPTS[:1], sampling=Sampling(), num_samples=1, seed=0)
    rollout = Rollout(prompt=PROMPTS[0], turns=(SAID[0],), group=0)
    for said in itertools.islice(itertools.cycle(SAID), 1, MANY):
        turn = talks(rollout, 0).result()
        if turn is None:
            break
        assert turn.tokens
        assert not turn.sampled
        rollout = replace(rollout, turns=(*rollout.turns, turn, said))
    assert turn is None
    talks.close()
    pool.shutdown()
    assert {score.state for score in talks.scores.values()} == (
        {"ok"} if last is not None else set()
    )


def test_the_same_turns_get_the_same_answers(env: Env) -> None:
    first, again = (conversation(env, PROMPTS[0], turns=SAID) for _ in range(2))
    assert first == again


def test_states_know_nothing_of_each_other(env: Env) -> None:
    """Two conversations, turn by turn beside each other, are what each is alone."""
    alone = [conversation(env, prompt, turns=SAID) for prompt in PROMPTS]
    seeded = {"seed": 0} if "seed" in inspect.signature(env.start).parameters else {}
    states = [env.start(prompt, **seeded) for prompt in PROMPTS]
    beside: list[list[Answer]] = [[], []]
    for turn in itertools.islice(itertools.cycle(SAID), MANY):
        for said, state in zip(beside, states, strict=True):
            if not (said and ends(said[-1])):
                said.append(env.reply(state, turn))
    assert beside == alone


class Zero:
    """Scores nothing."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


def test_a_real_engine_talks_to_it(env: Env) -> None:
    """Its turns stand between those of the policy, and only the policy's have log-probs."""
    policy = load_policy("tiny", seed=5, options={"hidden_size": 16, "max_positions": 512})
    engine = NativeEngine(policy.model, end_tokens=policy.end_tokens, decode=str)
    with torch.no_grad():
        found = collect_scored(
            PROMPTS,
            Sampling(max_new_tokens=3),
            engine=engine,
            scorer=Zero(),
            num_samples=2,
            seed=0,
            env=Environment(
                pool=EnvPool(env, workers=0),
                encode=lambda said, turn: [9] * len(said),
                render=lambda prompt: prompt,
            ),
        )
    for number, rollout in enumerate(found.rollouts):
        sampled = [turn for turn in rollout.turns if turn.sampled]
        said = conversation(env, PROMPTS[number // 2], turns=sampled, seed=episode_seed(0, number))
        assert [turn.sampled for turn in rollout.turns] == [
            place % 2 == 0 for place in range(2 * len(said) - 1)
        ]
        assert rollout.score is not None
        last = said[-1]
        assert rollout.score.value == (last.value if isinstance(last, Score) else last or 0.0)
