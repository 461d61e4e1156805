"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv), played on their servers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.envs.adapters import need
from posttrain.envs.event_loop import EventLoop
from posttrain.envs.tool_calls import Call
from posttrain.envs.tool_turns import ToolTurns
from posttrain.protocols import Answer
from posttrain.types import Observation, Prompt, Turn

_OF_ALL = {"metadata", "type"}  # fields that every action has, and a policy does not write
_SECONDS = 30.0


@dataclass(kw_only=True)
class Session:
    """One episode on a server: its client, what it said at first, and how many turns it had."""

    client: Any
    url: str
    opening: str = ""
    turns: int = 0
    rewarded: bool = False


class OpenEnv:
    """An environment that a server of OpenEnv keeps: ``reset``, ``step`` and its rewards.

    What the policy says fills the field ``action`` of the environment's action, without a name its
    only one; where that is no text, and where there are several, it writes the action as a JSON
    object. It reads the field ``observation``, without a name all of them. ``columns`` of the
    prompt are given to ``reset``. Where the environment has tools (MCP), its turns are calls.
    ``url`` is a server, or several: an episode goes to the one with the fewest that has room; all
    together must allow as many sessions at once. The episode ends when the environment is done,
    after ``max_turns``, or with a turn that calls no tool; where no step had a reward, the rewards
    of the recipe score.
    Needs openenv: ``pip install 'posttrain[openenv]'``.
    """

    def __init__(
        self,
        *,
        url: str | Sequence[str],
        action: str = "",
        observation: str = "",
        columns: Sequence[str] = (),
        max_turns: int = 0,
        tool_format: str = "json_tags",
        chat: bool = False,
    ) -> None:
        self._client = need("openenv", "openenv.core").GenericEnvClient
        self._open = dict.fromkeys([url] if isinstance(url, str) else url, 0)
        self._field, self._read, self._columns = action, observation, tuple(columns)
        self._max_turns = max_turns
        self._chat = chat
        self._loop = EventLoop()
        self._action = _schema(next(iter(self._open)))
        self._calls = "tool_name" in self._action["properties"]
        if not self._calls:
            self._field = action or _only_field(self._action)
        self.tools = asyncio.run(self._list_tools()) if self._calls else []
        self._turns = ToolTurns(self.tools, tool_format=tool_format, chat=chat)

    def start(self, prompt: Prompt, *, seed: int | None = None) -> Session:
        """Connect, and reset the environment with the seed and the columns."""
        return self._loop.run(self._start(prompt, seed))

    def opening(self, state: Session) -> str:
        """What the environment said when it was reset."""
        return state.opening

    def reply(self, state: Session, turn: Turn) -> Answer:
        """What the environment observes, with its reward; or that reward, where it is done."""
        state.turns += 1
        actions, wrong = self._actions(turn)
        said, reward, done = [wrong] if wrong else [], 0.0, False
        for action in actions:
            result = self._loop.run(_step(state.client, action))
            said.append(self._shown(result.observation))
            reward += float(result.reward or 0.0)
            state.rewarded |= result.reward is not None
            done = bool(result.done)
            if done:
                break
        if done or state.turns == self._max_turns or not said:
            self.close(state)
            return reward if state.rewarded else None
        if self._calls:
            heard = [{"role": "tool", "name": "", "content": text} for text in said]
            return Observation(self._turns.said(heard), reward=reward)
        [text] = said
        return Observation(text if self._chat else f"\n{text}\n", reward=reward)

    def close(self, state: Session) -> None:
        """End the session."""
        if state.client is not None:
            client, state.client = state.client, None
            self._open[state.url] -= 1
            self._loop.run(_close(client))

    async def _start(self, prompt: Prompt, seed: int | None) -> Session:
        given = {name: prompt.columns[name] for name in self._columns}
        given |= {} if seed is None else {"seed": seed % 2**31}
        *others, last = sorted(self._open, key=lambda each: self._open[each])
        for url in others:
            try:
                return await self._start_at(url, given)
            except (OSError, RuntimeError):  # full by another worker's episodes, or gone
                continue
        return await self._start_at(last, given)

    async def _start_at(self, url: str, given: Mapping[str, Any]) -> Session:
        client = self._client(base_url=url)
        await client.connect()
        self._open[url] += 1
        try:
            result = await client.reset(**given)
        except BaseException:
            self._open[url] -= 1
            await _close(client)
            raise
        shown = self._shown(result.observation)
        return Session(client=client, url=url, opening=f"\n{shown}\n" if shown else "")

    async def _list_tools(self) -> list[dict[str, Any]]:
        async with self._client(base_url=next(iter(self._open))) as client:
            found = (await client.step({"type": "list_tools"})).observation["tools"]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                },
            }
            for tool in found
        ]

    def _actions(self, turn: Turn) -> tuple[list[dict[str, Any]], str]:
        """The actions of a turn; where it is none, what the policy is told."""
        if self._calls:
            found = self._turns.find(turn.text)
            wrong = [each.reason for each in found if not isinstance(each, Call)]
            calls = [each for each in found if isinstance(each, Call)]
            actions = [
                {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                for call in calls
            ]
            return actions, "; ".join(wrong)
        if self._field:
            return [{self._field: turn.text}], ""
        try:
            action = json.loads(turn.text)
        except ValueError as error:
            return [], f"no JSON that can be read: {error}"
        needed = set(self._action.get("required", ()))
        known = set(self._action["properties"])
        if not isinstance(action, dict) or not needed <= action.keys() <= known:
            names = ", ".join(sorted(known - _OF_ALL))
            return [], f"expected a JSON object with the fields {names}"
        return [action], ""

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """An observation as text: one field of it, or all of them."""
        if self._read:
            value = observation[self._read]
        elif self._calls and "result" in observation:
            value = observation["error"] or observation["result"]
        else:
            value = {name: each for name, each in observation.items() if name != "metadata"}
            if len(value) == 1:
                [value] = value.values()
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _step(client: Any, action: dict[str, Any]) -> Any:
    return await client.step(action)


async def _close(client: Any) -> None:
    await client.close()


def _schema(url: str) -> dict[str, Any]:
    """The JSON schema of the environment's actions."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"openenv: url must begin with http:// or https://, got {url!r}")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=_SECONDS) as answer:
            found: dict[str, Any] = json.loads(answer.read())["action"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"openenv: no environment answers at {url} ({error}); start its server, for example "
            "with: uvicorn server.app:app --port 8000"
        ) from error
    return found


def _only_field(schema: Mapping[str, Any]) -> str:
    """The field that a text can fill alone, if there is one."""
    fields = {name: each for name, each in schema["properties"].items() if name not in _OF_ALL}
    needed = [name for name in schema.get("required", fields) if name in fields]
    return needed[0] if len(needed) == 1 and fields[needed[0]].get("type") == "string" else ""
