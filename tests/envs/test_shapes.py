"""Functions as environments, and make_env, which knows the shapes apart."""

import asyncio
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

from posttrain.config.specs import complete_task
from posttrain.envs import ENVS, make_env
from posttrain.envs.from_class import ClassEnv
from posttrain.envs.from_function import FunctionEnv, from_function
from posttrain.types import Observation, Prompt, Score, Turn

PROMPT = Prompt(id="0", text="2+3=", columns={"answer": "5"})


def turn(text: str) -> Turn:
    return Turn(tokens=(1,), text=text)


def test_a_function_gets_the_conversation() -> None:
    seen: list[Any] = []

    def env(messages: list[dict[str, str]]) -> Any:
        seen.append(messages)
        return "so?" if len(seen) == 1 else Score(value=0.5)

    made = from_function(env)
    state = made.start(PROMPT)
    assert [made.reply(state, turn(text)) for text in ("4", "5")] == ["so?", Score(value=0.5)]
    asked = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "4"}]
    more = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "5"}]
    assert seen == [asked, [*asked, *more]]


@pytest.mark.parametrize("end", [None, 0, 1.5, Score(value=1.0)])
def test_a_function_ends_it(end: Any) -> None:
    made = from_function(lambda messages: end)
    assert made.reply(made.start(PROMPT), turn("x")) is end


def test_what_goes_on() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    for said, plain in [
        ("a", "a"),
        (messages, "\na\nb\n"),
        ([5, 6], [5, 6]),
        (Observation(messages, reward=0.5), Observation("\na\nb\n", reward=0.5)),
    ]:
        for chat in (True, False):
            made = from_function(lambda messages, said=said: said, chat=chat)
            assert made.reply(made.start(PROMPT), turn("x")) == (said if chat else plain)


def test_columns_and_the_seed_by_name() -> None:
    def env(messages: Any, answer: str, seed: int, level: int = 3) -> float:
        return float(answer) + seed + level

    made = from_function(env)
    assert made.reply(made.start(PROMPT, seed=100), turn("x")) == 108.0
    with pytest.raises(ValueError, match="asks for 'answer', which prompt '1' does not have"):
        made.start(Prompt(id="1", text="?"))


@pytest.mark.parametrize("env", [lambda answer: 1.0, lambda *, messages: 1.0, lambda: 1.0])
def test_a_function_that_does_not_ask_for_messages_is_refused(env: Any) -> None:
    """Its first parameter would be given them under another name."""
    with pytest.raises(ValueError, match="first parameter of a function is called messages"):
        from_function(env)


def test_a_function_that_makes_none_says_so() -> None:
    with pytest.raises(ValueError, match=r"<lambda>\(\) returned a str, no environment; a functio"):
        make_env(lambda: "so?")


def test_a_coroutine() -> None:
    async def env(messages: Any) -> str:
        await asyncio.sleep(0)
        return "later"

    made = from_function(env)
    assert inspect.iscoroutinefunction(made.reply)
    assert asyncio.run(made.reply(made.start(PROMPT), turn("x"))) == "later"


class Tool:
    """The shape of TRL."""

    def __init__(self, size: int = 3, *, word: str = "a") -> None:
        self.size, self.word = size, word

    def reset(self, **columns: Any) -> None:
        pass

    def look(self) -> str:
        """Look."""
        return self.word * self.size


class Asks:
    """The protocol."""

    def __init__(self, *, times: int = 1, chat: bool = False) -> None:
        self.times, self.chat = times, chat

    def start(self, prompt: Prompt) -> None:
        return None

    def reply(self, state: None, turn: Turn) -> None:
        return None


def asks(*, times: int = 1) -> Asks:
    return Asks(times=times)


def tools(*, size: int = 2) -> Tool:
    return Tool(size)


def answers(messages: list[Any], answer: str, *, bonus: float = 0.0) -> float:
    return bonus + float(messages[-1]["content"] == answer)


def environment_reward(environments: list[Tool], **given: Any) -> list[float]:
    return [float(environment.size) for environment in environments]


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_envs")
    for each in (Tool, Asks, asks, tools, answers, environment_reward):
        setattr(module, each.__name__, each)
    module.Strange = type("Strange", (), {})  # type: ignore[attr-defined]
    module.Clash = Clash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_envs", module)


class Clash(Tool):
    def __init__(self, *, until: int = 3) -> None:
        super().__init__(until)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Tool", ClassEnv),
        ("tools", ClassEnv),
        ("Asks", Asks),
        ("asks", Asks),
        ("answers", FunctionEnv),
    ],
)
def test_the_shapes_are_told_apart(name: str, kind: type) -> None:
    assert type(make_env(f"own_envs:{name}")) is kind


def test_options_of_each_shape() -> None:
    env: Any = make_env({"name": "own_envs:Asks", "times": 4})
    assert env.times == 4
    env = make_env({"name": "own_envs:answers", "bonus": 2.0})
    assert env.reply(env.start(PROMPT), turn("5")) == 3.0
    env = make_env(
        {"name": "own_envs:Tool", "size": 2, "word": "b", "rewards": "own_envs:environment_reward"}
    )
    state = env.start(PROMPT)
    assert "bb" in env.reply(state, turn('<tool>{"name": "look"}</tool>'))
    assert env.reply(state, turn("")).value == 2.0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "own_envs:Tool", "siz": 2}, "unknown option 'siz'; did you mean 'size'"),
        ({"name": "own_envs:Tool", "size": "2"}, "option 'size' must be int, got '2'"),
        ({"name": "own_envs:answers", "bonu": 2}, "unknown option 'bonu'; did you mean 'bonus'"),
        ({"name": "own_envs:Asks", "until": "x"}, "unknown option 'until'"),
        ({"name": "own_envs:asks", "until": "x"}, "options of a class with reset, and Asks has"),
        ("own_envs:Strange", "a class needs start and reply, or reset and public methods"),
        ("own_envs:Clash", "rename the option 'until' of Clash"),
        ("own_envs:Nothing", "cannot import 'own_envs:Nothing'"),
        ("scriptd", "task.env: unknown name 'scriptd'; did you mean 'scripted'?"),
        ({"name": "own_envs:Tool", "rewards": "own_envs:no"}, "task.env.rewards: cannot import"),
        ({"name": "own_envs:Tool", "tool_format": "xml"}, "tool_format: unknown name 'xml'"),
    ],
)
def test_what_is_wrong_is_said(spec: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_env(spec)


def test_the_context_reaches_who_has_an_option_for_it() -> None:
    env: Any = make_env("own_envs:Asks", chat=True, tool_format="hermes")
    assert env.chat is True
    env = make_env({"name": "own_envs:Asks", "chat": False}, chat=True)
    assert env.chat is False
    env = make_env("own_envs:Tool", chat=True, tool_format="llama")
    [answer] = env.reply(env.start(PROMPT), turn('{"name": "look", "parameters": {}}'))
    assert answer == {"role": "tool", "name": "look", "content": "aaa"}
    make_env("scripted", chat=True, tool_format="hermes")


def test_a_recipe_has_the_options_written_out_but_not_what_the_model_decides() -> None:
    given = {"name": "arithmetic", "env": {"name": "own_envs:Asks", "times": 2}}
    assert complete_task(given, rewards=None)["env"] == {"name": "own_envs:Asks", "times": 2}
    given["env"] = {"name": "own_envs:Tool", "chat": True}
    assert complete_task(given, rewards=None)["env"] == {
        "name": "own_envs:Tool",
        "rewards": "",
        "until": "",
        "chat": True,
        "size": 3,
        "word": "a",
    }
    with pytest.raises(ValueError, match=r"task\.env 'own_envs:Tool': unknown option 'siz'"):
        complete_task(
            {"name": "arithmetic", "env": {"name": "own_envs:Tool", "siz": 2}}, rewards={}
        )


def test_all_of_the_table_are_made_by_name() -> None:
    ours = [name for name, made in ENVS.items() if ".adapters." not in made.__module__]
    for name in ours:
        env = make_env(name, chat=True, tool_format="hermes")
        assert hasattr(env, "start")
        assert hasattr(env, "reply")
