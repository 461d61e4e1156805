"""A class with reset, tools and a reward, as TRL's environments have them."""

import asyncio
import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.envs.env_pool import EnvPool
from posttrain.envs.from_class import ClassEnv, from_class
from posttrain.types import Observation, Prompt, Score, Turn

PROMPT = Prompt(id="0", text="Count to 3.", columns={"goal": 3, "answer": "3"})


class Counter:
    """Counts up to a goal."""

    def __init__(self, *, begin: int = 0) -> None:
        self.begin = begin

    def reset(self, **columns: Any) -> str | None:
        self.count, self.columns = self.begin, columns
        return f" The goal is {columns['goal']}." if "goal" in columns else None

    def add(self, n: int) -> str:
        """Add a number to the count.

        Args:
            n: The number.

        Returns:
            The count.
        """
        if n < 0:
            raise ValueError("only up")
        self.count += n
        return f"count: {self.count}"

    def look(self) -> dict[str, int]:
        """See the count."""
        return {"count": self.count}

    def get_reward(self) -> float:
        return float(self.count == self.columns["goal"])

    def _hidden(self) -> None:
        raise AssertionError


def call(name: str, **arguments: Any) -> str:
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


def turn(text: str) -> Turn:
    return Turn(tokens=tuple(map(ord, text)), text=text)


def played(env: ClassEnv, *texts: str, prompt: Prompt = PROMPT) -> tuple[Any, list[Any]]:
    state = env.start(prompt)
    return state, [env.reply(state, turn(text)) for text in texts]


def test_public_methods_are_tools() -> None:
    names = [tool["function"]["name"] for tool in from_class(Counter).tools]
    assert names == ["add", "look"]


def test_an_episode() -> None:
    state, answers = played(
        from_class(Counter), call("add", n=1), f"{call('add', n=2)} and {call('look')}", "It is 3."
    )
    assert answers == [
        "\n<tool_result>count: 1</tool_result>\n",
        '\n<tool_result>count: 3</tool_result>\n<tool_result>{"count": 3}</tool_result>\n',
        1.0,
    ]
    assert state.counts == {
        "tool_calls": 3,
        "tool_errors": 0,
        "wrong_calls": 0,
        "malformed_calls": 0,
    }


def test_in_a_chat_results_are_messages_of_tools() -> None:
    env = from_class(Counter, tool_format="hermes", chat=True)
    one, two = (f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in ("look", "see"))
    _, [answer] = played(env, one + two)
    assert answer == [
        {"role": "tool", "name": "look", "content": '{"count": 0}'},
        {
            "role": "tool",
            "name": "see",
            "content": '{"error": "unknown tool \'see\'; known: add, look"}',
        },
    ]


def test_reset_gets_the_row_and_opens() -> None:
    env = from_class(Counter)
    state = env.start(PROMPT)
    assert env.opening(state) == " The goal is 3."
    assert state.instance.columns == {"prompt": "Count to 3.", "goal": 3, "answer": "3"}
    assert env.opening(env.start(Prompt(id="1", text="?"))) == ""
    messages = ({"role": "user", "content": "hi"},)
    assert env.start(Prompt(id="2", text="x", messages=messages)).instance.columns == {
        "prompt": list(messages)
    }


class Few(Counter):
    def reset(self, goal: int, seed: int = -1) -> None:  # type: ignore[override]
        self.count, self.columns = seed, {"goal": goal}


def test_reset_without_keywords_gets_what_it_names() -> None:
    assert from_class(Few).start(PROMPT, seed=7).instance.count == 7
    with pytest.raises(TypeError, match="goal"):
        from_class(Few).start(Prompt(id="1", text="?"))


@pytest.mark.parametrize(
    ("said", "counted", "told"),
    [
        ("<tool>add(1)</tool>", "malformed_calls", "malformed call: no JSON that can be read"),
        (call("ad", n=1), "wrong_calls", "unknown tool 'ad'; did you mean 'add'?"),
        (call("_hidden"), "wrong_calls", "unknown tool '_hidden'"),
        (call("reset"), "wrong_calls", "unknown tool 'reset'"),
        (call("get_reward"), "wrong_calls", "unknown tool 'get_reward'"),
        (call("__init__"), "wrong_calls", "unknown tool '__init__'"),
        (call("add"), "wrong_calls", "argument 'n' is missing"),
        (call("add", n="1"), "wrong_calls", "argument 'n' must be an integer, got '1'"),
        (call("add", n=1, m=2), "wrong_calls", "unknown argument 'm'"),
        (call("add", n=-1), "tool_errors", "only up"),
    ],
)
def test_what_is_the_models_fault_is_told_to_it(said: str, counted: str, told: str) -> None:
    state, [answer, end] = played(from_class(Counter), said, "3")
    assert json.loads(answer.removeprefix("\n<tool_result>").removesuffix("</tool_result>\n"))[
        "error"
    ].startswith(told)
    assert state.counts[counted] == 1
    assert end == 0.0


class Broken(Counter):
    def get_reward(self) -> float:
        raise OSError("no grader")


def test_a_row_without_what_reset_wants_is_refused_before_the_episode() -> None:
    env = from_class(Few)
    env.check_columns(Prompt(id="0", text="", columns={"goal": 3}))
    with pytest.raises(ValueError, match=r"Few: reset wants 'goal', which prompt '0' does not"):
        env.check_columns(Prompt(id="0", text="Play."))


def test_what_is_the_environments_fault_is_raised() -> None:
    env = from_class(Broken)
    with pytest.raises(OSError, match="no grader"):
        played(env, "3")


def test_states_are_instances_of_their_own() -> None:
    env = from_class(Counter)
    one, two = env.start(PROMPT), env.start(PROMPT)
    env.reply(one, turn(call("add", n=3)))
    assert (env.reply(one, turn("3")), env.reply(two, turn("3"))) == (1.0, 0.0)


class TestRewards:
    def test_a_number_of_the_instance(self) -> None:
        kind = type("Kept", (Counter,), {"get_reward": None, "reward": 0.25})
        assert played(from_class(kind), "3")[1] == [0.25]

    def test_without_any_the_recipes_rewards_score(self) -> None:
        kind = type("Unscored", (Counter,), {"get_reward": None})
        assert played(from_class(kind), "3")[1] == [None]

    def test_functions_of_trl_get_lists_of_one_episode(self) -> None:
        seen: dict[str, Any] = {}

        def reward_func(environments: list[Counter], **given: Any) -> list[float]:
            seen.update(given)
            return [environment.count / 2 for environment in environments]

        def named(completions: list[Any], answer: list[str]) -> list[float | None]:
            return [None if answer == ["3"] else 9.0]

        env = from_class(Counter, rewards=[reward_func, named], chat=True)
        state, [_, score] = played(env, call("add", n=3), "3")
        assert score == Score(value=2.5, parts={"Counter": 1.0, "reward_func": 1.5})
        assert seen["prompts"] == ["Count to 3. The goal is 3."]
        assert seen["goal"] == [3]
        assert seen["completion_ids"] == [list(map(ord, call("add", n=3) + "3"))]
        roles = [message["role"] for message in seen["completions"][0]]
        assert roles == ["assistant", "tool", "assistant"]
        assert seen["completions"][0][0]["tool_calls"][0]["function"]["arguments"] == {"n": 3}
        assert env.score(state) == score

    def test_a_function_must_return_one(self) -> None:
        def two(**given: Any) -> list[float]:
            return [1.0, 2.0]

        with pytest.raises(ValueError, match="'two': expected a list of one reward"):
            played(from_class(Counter, rewards=[two]), "3")


class Ends(Counter):
    closed = 0

    @property
    def done(self) -> bool:
        return self.count >= self.columns["goal"]

    def on_text(self, text: str) -> str | None:
        return None if text == "over" else "Call a tool. "

    def close(self) -> None:
        Ends.closed += 1


def test_a_class_may_say_when_it_ends() -> None:
    env = from_class(Ends, until="done")
    assert [tool["function"]["name"] for tool in env.tools] == ["add", "look"]
    _, answers = played(env, "well", call("add", n=1), call("add", n=2))
    assert answers == ["Call a tool. ", "\n<tool_result>count: 1</tool_result>\n", 1.0]
    state, answers = played(env, "over")
    assert answers == [0.0]
    env.close(state)
    assert Ends.closed == 1
    from_class(Counter).close(state)


class Waits:
    """Its methods are coroutines, and some are not."""

    async def reset(self, **columns: Any) -> str:
        await asyncio.sleep(0)
        return "hello"

    async def fetch(self, word: str) -> str:
        """Fetch a word.

        Args:
            word: The word.
        """
        await asyncio.sleep(0)
        return word.upper()

    def now(self) -> str:
        """Say it at once."""
        return "now"

    async def reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


def test_coroutines() -> None:
    env = from_class(Waits)
    assert inspect.iscoroutinefunction(env.reply)

    async def episode() -> list[Any]:
        state = await env.start(PROMPT)
        said = [env.opening(state)]
        for text in (call("fetch", word="a") + call("now"), "done"):
            said.append(await env.reply(state, turn(text)))
        await env.close(state)
        return said

    assert asyncio.run(episode()) == [
        "hello",
        "\n<tool_result>A</tool_result>\n<tool_result>now</tool_result>\n",
        0.5,
    ]


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="SimpleNamespace: it has no method reset"):
        from_class(SimpleNamespace)
    with pytest.raises(ValueError, match="Bare: it has no public methods"):
        from_class(type("Bare", (), {"reset": lambda self: None}))
    with pytest.raises(ValueError, match="tool 'bare': it needs a docstring"):
        from_class(type("Tool", (), {"reset": lambda self: None, "bare": bare}))
    with pytest.raises(ValueError, match="tool_format: unknown name 'hermess'; did you mean 'he"):
        from_class(Counter, tool_format="hermess")


def bare(self: Any) -> None:
    pass


MEETING = threading.Barrier(2)


class Mixed:
    """A tool that is a coroutine, and one that is none and waits for another episode's."""

    def reset(self, **columns: Any) -> None: ...

    async def think(self) -> str:
        """Think."""
        return "hm"

    def meet(self) -> str:
        """Wait until another one calls this."""
        MEETING.wait(timeout=20)
        return "met"

    def hang(self) -> str:
        """Wait for ever."""
        threading.Event().wait()
        return "never"


def test_a_tool_that_is_no_coroutine_holds_up_no_other_episode() -> None:
    """Two of them meet in one worker, whose loop would run one after the other."""
    pool = EnvPool(from_class(Mixed), workers=1, threads=4, seconds=60.0, memory_mb=512)
    call = Turn(tokens=(), text='<tool>{"name": "meet"}</tool>')
    episodes = [pool.open(Prompt(id=str(n), text="?"), seed=1) for n in range(2)]
    answers = [pool.ask(episode, call) for episode in episodes]
    for answer in answers:
        assert answer.result() == "\n<tool_result>met</tool_result>\n"
    pool.shutdown()


def test_one_that_hangs_beside_coroutines_is_known_by_name() -> None:
    """Its thread is stuck, and so its worker is replaced; nobody else is suspected."""
    pool = EnvPool(from_class(Mixed), workers=1, threads=4, seconds=2.0, memory_mb=512)
    call = Turn(tokens=(), text='<tool>{"name": "hang"}</tool>')
    failure: Any = pool.ask(pool.open(Prompt(id="0", text="?"), seed=1), call).result()
    pool.shutdown()
    assert failure.reason == "gave no answer within 2 s"
    assert pool.restarts == 1


class Sends:
    """Tools of which one is a class's own, and arguments that are called as code calls its own."""

    def reset(self, **columns: Any) -> None:
        self.columns = columns

    @classmethod
    def send(cls, function: str, self_: int = 0) -> str:
        """Send it.

        Args:
            function: What is sent, one of
                mail: a letter
            self_: Nothing.
        """
        return f"{cls.__name__} {function}"

    def watch(self) -> Observation:
        """Nothing that a tool may return."""
        return Observation("x", reward=1.0)


@contextmanager
def pool_of(env: Any, *, threads: int) -> Iterator[EnvPool]:
    pool = EnvPool(env, workers=min(threads, 1), threads=threads or 1)
    yield pool
    pool.shutdown()


@pytest.mark.parametrize("threads", [0, 2])
def test_columns_and_arguments_may_be_called_function(threads: int) -> None:
    """So they are in data sets of calls; methods of the class are tools, as in TRL."""
    env = from_class(Sends)
    prompt = Prompt(id="0", text="Send!", columns={"function": "f", "job": 1, "given": 2})
    call = '<tool>{"name": "send", "arguments": {"function": "mail"}}</tool>'
    with pool_of(env, threads=threads) as pool:
        episode = pool.open(prompt, seed=0)
        answer = pool.ask(episode, Turn(tokens=(), text=call)).result()
    assert answer == "\n<tool_result>Sends mail</tool_result>\n"


def test_a_tool_that_returns_a_reward_is_an_error_of_the_tool() -> None:
    env = from_class(Sends)
    state = env.start(PROMPT)
    answer = env.reply(state, Turn(tokens=(), text='<tool>{"name": "watch"}</tool>'))
    assert "a tool returns what the model reads; the score is what reward() returns" in answer
    assert state.counts["tool_errors"] == 1


@pytest.mark.parametrize(("said", "read", "remembered"), [
    ("so?", "so?", "so?"),
    ([{"role": "user", "content": "so?"}], "\nso?\n", "so?"),
    (Observation("so?", reward=0.5), Observation("so?", reward=0.5), "so?"),
    (Score(value=0.5), Score(value=0.5), None),
    (0.5, 0.5, None),
])  # fmt: skip
def test_what_is_said_to_a_turn_without_a_call_is_any_answer(
    said: Any, read: Any, remembered: str | None
) -> None:
    """Not its ``repr``, which the policy read before."""

    class Says:
        def reset(self, **columns: Any) -> None: ...

        def on_text(self, text: str) -> Any:
            return said

        def reward(self) -> float:
            return 0.0

    env = from_class(Says)
    state = env.start(PROMPT)
    assert env.reply(state, Turn(tokens=(), text="a")) == read
    told = [message["content"] for message in state.messages if message["role"] == "user"]
    assert told == ([] if remembered is None else [remembered])
