"""Toy games of Gymnasium, drawn as text and played by the names of their actions."""

import sys
from typing import Any

import pytest
from played_episodes import asked, play, replies, score

from posttrain.envs import make_env
from posttrain.types import Prompt

LAKE = {"environment": "FrozenLake-v1", "settings": {"is_slippery": False}}
MOVES = ["left", "down", "right", "up"]


def gym(*, chat: bool = True, **options: Any) -> Any:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: make env-adapters")
    return make_env({"name": "gymnasium", **options}, chat=chat)


def test_the_lake_is_crossed_by_the_names_of_the_actions() -> None:
    env = gym(**LAKE, actions=MOVES)
    state = env.start(Prompt(id="0", text="Cross!"), seed=2**40)
    assert env.opening(state) == "\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    env.close(state)
    way = ["down", "Down!", "right", "down", "right", "not left, but right"]
    goal, hole = play(env, [asked("Cross!")], says=[way, ["right", "what?", "down"]])
    assert replies(goal)[0].splitlines()[1:] == ["SFFF", "[F]HFH", "FFFH", "HFFG"]
    assert len(replies(goal)) == 5
    assert score(goal).value == 1.0
    assert replies(hole)[1] == "one of: left, down, right, up"
    assert (score(hole).ok, score(hole).value) == (True, 0.0)


def test_rewards_are_of_turns_and_turns_can_be_limited() -> None:
    """The taxi pays 1 for each move, and 10 to let a passenger out who is not in it."""
    env = gym(environment="Taxi-v4", max_turns=3, chat=False)
    prompt = Prompt(id="0", text="Drive!", tokens=(1,))
    [rollout] = play(env, [prompt], says=[["0", "5", "1"]])
    assert [turn.reward for turn in rollout.turns if not turn.sampled] == [-1.0, -10.0]
    assert score(rollout).value == -12.0
    assert replies(rollout)[0].startswith("\n+---------+\n")


def test_the_same_seed_gives_the_same_game() -> None:
    env = gym(environment="Taxi-v4")
    prompt = Prompt(id="0", text="Drive!")
    first, again, other = (env.opening(env.start(prompt, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_what_cannot_be_played_as_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="6 actions, got 1"):
        gym(environment="Taxi-v4", actions=["go"])
    with pytest.raises(ValueError, match="a policy writes text: use one"):
        gym(environment="Pendulum-v1")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain\[gymnasium\]'"):
        make_env({"name": "gymnasium", "environment": "Taxi-v4"})
