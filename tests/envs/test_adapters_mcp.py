"""The tools of an MCP server, which is started here, over stdin and stdout."""

import sys
from pathlib import Path
from typing import Any

import pytest
from played_episodes import asked, play, replies, score

from posttrain.envs import make_env

SERVER = '''
import os
try:
    from mcp.server.mcpserver import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("sums")
calls = []

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    calls.append((a, b))
    return f"{a + b} ({os.environ.get('UNIT', '')}, call {len(calls)})"

@server.tool()
def fail() -> str:
    """Raises."""
    raise ValueError("not today")

@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)

server.run("stdio")
'''
ADD = '<tool>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool>'


def mcp(folder: Path, *, chat: bool = True) -> Any:
    pytest.importorskip("mcp", reason="mcp is not installed: make env-adapters")
    (folder / "sums.py").write_text(SERVER, encoding="utf-8")
    command = [sys.executable, str(folder / "sums.py")]
    spec = {"name": "mcp", "command": command, "variables": {"UNIT": "apples"}}
    return make_env(spec, chat=chat, tool_format="json_tags")


def test_the_tools_of_a_server_are_called_and_each_episode_has_its_own(tmp_path: Path) -> None:
    env = mcp(tmp_path)
    assert [tool["function"]["name"] for tool in env.tools] == ["add", "fail", "leave"]
    assert env.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    said = [[ADD, ADD, "5"], [ADD, "6"]]
    twice, once = play(env, [asked("2+3?")], says=said)
    assert replies(twice) == ["5 (apples, call 1)", "5 (apples, call 2)"]
    assert replies(once) == ["5 (apples, call 1)"]
    assert score(twice).ok
    # The rewards of the recipe score it: there is no part "env" but what was counted.
    counted = {name.removeprefix("env/"): value for name, value in score(twice).parts.items()}
    assert counted == {"tool_calls": 2, "tool_errors": 0, "wrong_calls": 0, "malformed_calls": 0}


def test_errors_are_told_and_a_server_that_is_gone_is_invalid(tmp_path: Path) -> None:
    env = mcp(tmp_path, chat=False)
    fails = [
        '<tool>{"name": "fail"}</tool>',
        '<tool>{"name": "add", "arguments": {"a": 2}}</tool>',
        "<tool>add</tool>",
        "5",
    ]
    told, gone = play(env, [asked("2+3?")], says=[fails, ['<tool>{"name": "leave"}</tool>']])
    assert "not today" in replies(told)[0]
    assert "b" in replies(told)[1]
    assert "malformed call" in replies(told)[2]
    assert score(told).ok
    assert score(gone).state == "invalid"
    assert "the MCP server failed" in score(gone).reason
    state = env.start(asked("2+3?"))
    env.close(state)
    env.close(state)


def test_what_cannot_be_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give either command, a list of words, or url"):
        make_env({"name": "mcp"})
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain\[mcp\]'"):
        make_env({"name": "mcp", "url": "http://127.0.0.1:1/mcp"})
