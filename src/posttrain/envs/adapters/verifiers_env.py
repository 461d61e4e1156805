"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers), run as they are."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from posttrain.envs.event_loop import EventLoop
from posttrain.envs.tool_calls import Call
from posttrain.envs.tool_turns import ToolTurns
from posttrain.protocols import Answer
from posttrain.registry import look_up
from posttrain.types import Observation, Prompt, Score, Turn

_failures: ContextVar[list[Exception]] = ContextVar("failures")


class VerifiersEnv:
    """The environment that ``verifiers.load_environment(environment, **settings)`` gives.

    Or the one that a ``"module:Class"`` makes. Its own loop plays the episode (``setup_state``,
    ``env_response``, stop conditions, limits), and its rubric scores it; a policy of ours stands in
    the place of its client, so that no text is encoded again. Where no reward function has a weight
    the rewards of the recipe score. A run sets ``tool_format`` and ``chat`` by its model.
    Needs verifiers: ``pip install 'posttrain[verifiers]'``.
    """

    def __init__(
        self,
        *,
        environment: str,
        settings: Mapping[str, Any] | None = None,
        tool_format: str = "json_tags",
        chat: bool = False,
    ) -> None:
        self._name = environment
        self._env = load(environment, json.dumps(dict(settings or {}), sort_keys=True))
        self._chat = chat
        self._loop = EventLoop()
        self._scores = any(weight for each in _rubrics(self._env) for weight in each.weights)
        self.tools = [
            {
                "type": "function",
                "function": tool.model_dump(include={"name", "description", "parameters"}),
            }
            for tool in self._env.tool_defs or ()
        ]
        self._turns = ToolTurns(self.tools, tool_format=tool_format, chat=chat)

    def start(self, prompt: Prompt) -> _Episode:
        """Begin a rollout of the environment, up to where it wants the policy's first turn."""
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        row = {"example_id": 0, "answer": "", **prompt.columns}
        row["prompt"] = [dict(message) for message in messages]
        if "tool_defs" in (row.get("info") or ()):
            raise ValueError(f"verifiers {self._name!r}: a row with tools of its own (tool_defs)")
        episode = _Episode(self._name, row["prompt"])
        self._loop.run(self._begin(episode, row))
        return episode

    def opening(self, state: _Episode) -> str:
        """What the environment has put behind the last message of the prompt."""
        return state.opening

    def reply(self, state: _Episode, turn: Turn) -> Answer:
        """The environment's messages, with the reward of the turn where it gave one; or the end."""
        return self._loop.run(self._reply(state, turn))

    def close(self, state: _Episode) -> None:
        """End what still runs; the environment cleans up."""
        self._loop.run(state.cancel())

    async def _begin(self, episode: _Episode, row: dict[str, Any]) -> None:
        episode.task = asyncio.create_task(self._play(episode, row))
        if await episode.wanted():
            raise ValueError(f"verifiers {self._name!r}: it ended before the policy's first turn")

    async def _play(self, episode: _Episode, row: dict[str, Any]) -> Any:
        """A whole rollout and its score, as ``Environment.generate`` makes them."""
        state = await self._env.rollout(row, _policy_class()(episode), "policy", {})
        error = state.get("error")
        if error is not None:
            cause = error.__cause__
            raise RuntimeError(repr(error) if cause is None else f"{error!r}, of {cause!r}")
        _failures.set([])
        await self._env.rubric.score_group([state])
        await self._env.rubric.cleanup(state)
        # verifiers gives 0 for what raised; here that is broken, not wrong.
        for failure in _failures.get():
            raise failure
        return state

    async def _reply(self, episode: _Episode, turn: Turn) -> Answer:
        episode.say(turn, self._turns.find(turn.text) if self.tools else ())
        ended = await episode.wanted()
        earned = episode.earned()
        if ended is None:
            said = episode.new if self._chat else _plain(episode.new)
            return Observation(said, reward=earned) if earned else said
        if not self._scores:
            return None
        value = float(ended["reward"])
        parts = {name: float(number) for name, number in (ended["metrics"] or {}).items()}
        return Score(value=value - episode.given, parts=parts)


class _Episode:
    """One rollout: where verifiers asks for a turn and ours is handed over."""

    def __init__(self, name: str, prompt: Sequence[Mapping[str, Any]]) -> None:
        self.task: asyncio.Task[Any]
        self.opening = ""
        self.new: list[dict[str, str]] = []
        self.given = 0.0
        """Rewards of turns so far."""
        self._name = name
        self._read = [(message["role"], _text(message)) for message in prompt]
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._trajectory: list[Any] = []
        self._num_calls = 0

    async def answer(self, messages: Sequence[Any], state: Any) -> Any:
        """Called by verifiers, which wants the policy's turn after these messages."""
        self._trajectory = state["trajectory"]
        self._take([(message["role"], _text(message)) for message in messages])
        self._asked.put_nowait(None)
        return await self._said.get()

    async def wanted(self) -> Any:
        """None once verifiers wants a turn; the state of the rollout where it is over."""
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asked, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return None
        asked.cancel()
        return self.task.result()

    def say(self, turn: Turn, found: Sequence[Any]) -> None:
        """Hand a turn of the policy over; a malformed call is one with arguments that are none."""
        from verifiers import types

        calls = []
        for each in found:
            self._num_calls += 1
            right = isinstance(each, Call)
            name = each.name if right else "malformed"
            written = json.dumps(each.arguments) if right else f"malformed: {each.reason}"
            number = f"call_{self._num_calls}"
            calls.append(types.ToolCall(id=number, name=name, arguments=written))
        self._read.append(("assistant", turn.text))
        cut = turn.stop_reason == "length"
        message = types.ResponseMessage(
            content=turn.text,
            tool_calls=calls or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
        )
        usage = types.Usage(
            prompt_tokens=0,
            reasoning_tokens=0,
            completion_tokens=len(turn.tokens),
            total_tokens=len(turn.tokens),
        )
        said = types.Response(id="", created=0, model="policy", usage=usage, message=message)
        self._said.put_nowait(said)

    def earned(self) -> float:
        """The reward that the environment gave to the last turn of the policy, where it did."""
        reward = self._trajectory[-1]["reward"] if self._trajectory else None
        earned = 0.0 if reward is None or self.task.done() else float(reward)
        self.given += earned
        return earned

    async def cancel(self) -> None:
        """End the rollout, and wait until its environment has cleaned up."""
        self.task.cancel()
        await asyncio.wait({self.task})

    def _take(self, messages: list[tuple[str, str]]) -> None:
        """Of the messages keep those that are new: what was read or sampled must still be there."""
        known, first = self._read, not self._trajectory
        if first and len(messages) == len(known) and messages[:-1] == known[:-1]:
            (_, before), (_, now) = known[-1], messages[-1]
            if now.startswith(before):
                self.opening, self._read = now.removeprefix(before), messages
                return
        if messages[: len(known)] != known or first:
            raise ValueError(
                f"verifiers {self._name!r}: it rewrites messages that the policy has read; here an "
                "episode is one sequence of tokens, which only grows"
            )
        self.new = [{"role": role, "content": text} for role, text in messages[len(known) :]]
        self._read = messages


@functools.lru_cache(maxsize=8)
def load(environment: str, settings: str) -> Any:
    """An environment of verifiers, loaded once, with its settings, a JSON object."""
    try:
        import verifiers

        make = getattr(verifiers, "load_environment", None)
    except ImportError as error:
        raise ImportError(
            "env 'verifiers': verifiers is not installed; run: pip install 'posttrain[verifiers]'"
        ) from error
    if make is None:
        raise ImportError(
            f"env 'verifiers': version {verifiers.__version__} has no load_environment any more; "
            "run: pip install 'posttrain[verifiers]', which takes one below 0.4"
        )
    if ":" in environment:
        make = look_up(environment, {}, kind="environment")
        env = make(**json.loads(settings))
    else:
        env = make(environment, **json.loads(settings))
    if env.rubric.has_group_rewards:
        raise ValueError(
            f"verifiers {environment!r}: a reward function over a group of rollouts, and here each "
            "is scored when it ends; use rewards of single rollouts"
        )
    for rubric in _rubrics(env):
        rubric.funcs = [_watched(function) for function in rubric.funcs]
    return env


def _rubrics(env: Any) -> Iterator[Any]:
    """The rubrics that hold the reward functions of an environment, or of a group of them."""
    waiting = [each.rubric for each in getattr(env, "envs", [env])]
    while waiting:
        rubric = waiting.pop(0)
        waiting += getattr(rubric, "rubrics", ())
        yield rubric


def _watched(function: Any) -> Any:
    """A reward function whose exceptions are kept: a rubric logs them, and gives 0."""

    @functools.wraps(function)
    async def watched(*given: Any, **named: Any) -> Any:
        try:
            result = function(*given, **named)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            _failures.get().append(error)
            raise

    return watched


@functools.cache
def _policy_class() -> Any:
    """A client of verifiers that samples nothing itself: its ``client`` is an episode."""
    from verifiers.clients import Client

    base: Any = Client

    async def get_response(self: Any, prompt: Any, *given: Any, state: Any, **named: Any) -> Any:
        return await self.client.answer(prompt, state)

    unused = dict.fromkeys(base.__abstractmethods__)
    return type("Policy", (base,), {**unused, "get_response": get_response})


def _plain(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages for a policy that knows no chat."""
    return "".join(f"\n{message['content']}\n" for message in messages)


def _text(message: Any) -> str:
    """The text of a message; what is no text cannot be read."""
    content = message["content"]
    if isinstance(content, str) or content is None:
        return content or ""
    kinds = {part["type"] for part in content} - {"text"}
    if kinds:
        raise ValueError(f"verifiers: a message with content of type {kinds.pop()!r}, not text")
    return "".join(part["text"] for part in content)
