"""The tools of an MCP server (https://modelcontextprotocol.io) as an environment."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.envs.adapters import need
from posttrain.envs.event_loop import EventLoop
from posttrain.envs.tool_calls import Call
from posttrain.envs.tool_turns import COUNTED, ToolTurns
from posttrain.forked import dies_with_parent
from posttrain.protocols import Answer
from posttrain.types import Prompt, Turn


@dataclass
class Connected:
    """One episode: its session with the server, which a task of its own opens and closes."""

    ready: asyncio.Future[Any]
    over: asyncio.Event
    task: asyncio.Task[None] | None = None
    broken: list[Exception] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))


class McpTools:
    """Answers the calls of a turn by the tools of a server; a turn without one ends the episode.

    The server is a ``command`` that is started for each episode and speaks over stdin and stdout,
    with ``variables`` added to its few environment variables, or the ``url`` of one that runs. The
    rewards of the recipe score the policy's last turn. What a tool answers as an error is told to
    the policy; a server that is gone makes the episode invalid.
    Needs mcp: ``pip install 'posttrain[mcp]'``.
    """

    scores = False

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str = "",
        variables: Mapping[str, str] | None = None,
        tool_format: str = "json_tags",
        chat: bool = False,
    ) -> None:
        if bool(command) == bool(url):
            raise ValueError("env 'mcp': give either command, a list of words, or url")
        need("mcp")
        search = (variables or {}).get("PATH")
        if command and shutil.which(command[0], path=search) is None:
            raise ValueError(f"env 'mcp': command: there is no program {command[0]!r}")
        self._command, self._url = list(command), url
        self._variables = dict(variables or {})
        self._loop = EventLoop()
        self.tools = asyncio.run(self._list_tools())
        self._turns = ToolTurns(self.tools, tool_format=tool_format, chat=chat)

    def start(self, prompt: Prompt) -> Connected:
        """Connect to the server."""
        return self._loop.run(self._start())

    def reply(self, state: Connected, turn: Turn) -> Answer:
        """The results of the calls in a turn; None where there are none."""
        return self._loop.run(self._reply(state, turn))

    def close(self, state: Connected) -> None:
        """End the session, and the server that was started for it."""
        self._loop.run(_end(state))

    def counts(self, state: Connected) -> dict[str, int]:
        """How many calls there were, and what became of them."""
        return dict(state.counts)

    async def _start(self) -> Connected:
        state = Connected(asyncio.get_running_loop().create_future(), asyncio.Event())
        state.task = asyncio.create_task(self._hold(state))
        await state.ready
        return state

    async def _reply(self, state: Connected, turn: Turn) -> Answer:
        calls = self._turns.find(turn.text)
        if not calls:
            await _end(state)
            return None
        session = await state.ready

        async def invoke(call: Call) -> str:
            try:
                result = await session.call_tool(call.name, call.arguments)
            except Exception as error:
                state.broken.append(error)
                raise
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
            if getattr(result, "is_error", None) or getattr(result, "isError", None):
                raise ValueError(text)
            return text

        said = await self._turns.answer(calls, invoke, counts=state.counts)
        if state.broken:
            raise ConnectionError(f"the MCP server failed: {state.broken[0]!r}")
        return self._turns.said(said)

    async def _hold(self, state: Connected) -> None:
        """The session, opened and closed by the same task, as its library wants."""
        try:
            async with self._session() as session:
                state.ready.set_result(session)
                await state.over.wait()
        except Exception as error:
            if state.ready.done():
                raise
            state.ready.set_exception(error)

    async def _list_tools(self) -> list[dict[str, Any]]:
        async with self._session() as session:
            found = (await session.list_tools()).tools
        dumped = [tool.model_dump(by_alias=True) for tool in found]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool["inputSchema"],
                },
            }
            for tool in dumped
        ]

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import get_default_environment, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as stack:
            if self._url:
                transport: Any = streamable_http_client(self._url)
            else:
                given = {**get_default_environment(), **self._variables}
                # Its library starts it in a session of its own: a worker that is killed leaves it.
                program, *arguments = dies_with_parent(self._command)
                server = StdioServerParameters(command=program, args=arguments, env=given)
                transport = stdio_client(server)
            read, write, *_ = await stack.enter_async_context(transport)
            session = await stack.enter_async_context(ClientSession(read, write))
            await session.initialize()
            yield session


async def _end(state: Connected) -> None:
    state.over.set()
    if state.task is not None:
        await asyncio.wait({state.task})
