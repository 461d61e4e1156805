"""The environment that OpenEnv's own command makes, served here, as it is made."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from played_episodes import asked, play, replies, score, trained

from posttrain.envs import make_env
from posttrain.types import Prompt

SECONDS = 120  # for a server to start, on a busy machine

TOOLS = '''
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Adds(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adds")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **given):
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **given):
        return Observation(done=True, reward=0.0)

    @property
    def state(self):
        return State()

app = create_app(Adds, CallToolAction, CallToolObservation, max_concurrent_envs=8)
'''


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _serve(folder: Path, app: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server of that app, and its address; :func:`_wait` until it answers."""
    port = _free_port()
    command = [sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", str(port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": ""}, **quiet)
    return process, f"http://127.0.0.1:{port}"


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS:
        assert process.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(f"{url}/schema", timeout=5).close()
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"no answer at {url}")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two servers of the echo environment (each takes one session), and one with a tool."""
    pytest.importorskip("openenv.core", reason="openenv is not installed: make env-adapters")
    folder = tmp_path_factory.mktemp("openenv")
    made = [sys.executable, "-W", "ignore", "-m", "openenv.cli", "init", "echo_game"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    (folder / "adds.py").write_text(TOOLS, encoding="utf-8")
    servers = [_serve(folder / "echo_game", "server.app:app") for _ in range(2)]
    servers.append(_serve(folder, "adds:app"))
    try:
        for process, url in servers:
            _wait(process, url)
        yield {"echo": [url for _, url in servers[:2]], "tool": servers[2][1]}
    finally:
        for process, _ in servers:
            process.kill()
            process.wait()


def openenv(*, chat: bool = True, **options: Any) -> Any:
    return make_env({"name": "openenv", **options}, chat=chat, tool_format="json_tags")


def test_the_environment_of_the_package_is_played_unchanged(urls: dict[str, Any]) -> None:
    """Its rewards are of turns: a tenth for each character, at most 1."""
    env = openenv(url=urls["echo"], observation="echoed_message", max_turns=3)
    said = [["hello", "x", "three little words"], ["a", "b", "c"]]
    for _ in range(2):  # sessions were given back
        long, short = play(env, [asked("Say something!")], says=said)
        assert replies(long) == ["hello", "x"]
        assert [turn.reward for turn in long.turns if not turn.sampled] == [0.5, 0.1]
        assert score(long).value == pytest.approx(1.6)
        assert score(short).value == pytest.approx(0.3)


def test_the_policy_reads_what_reset_said_and_whole_observations(urls: dict[str, Any]) -> None:
    env = openenv(url=urls["echo"], max_turns=2, chat=False)
    prompt = Prompt(id="0", text="Say!", tokens=(1, 2))
    state = env.start(prompt, seed=3)
    assert env.opening(state) == (
        '\n{"echoed_message": "Echo Game environment ready!", "message_length": 0}\n'
    )
    env.close(state)
    env.close(state)
    [rollout] = play(env, [prompt], says=[["hi", "there"]])
    assert replies(rollout) == ['\n{"echoed_message": "hi", "message_length": 2}\n']


def test_tools_of_an_environment_are_called(urls: dict[str, Any]) -> None:
    env = openenv(url=urls["tool"])
    [tool] = env.tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    call = '<tool>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool>'
    right, wrong = play(env, [asked("2+3?")], says=[[call, "5"], ["<tool>2+3</tool>", "6"]])
    assert "5" in replies(right)[0]
    assert "expected a JSON object" in replies(wrong)[0]
    for rollout in (right, wrong):  # this environment rewards nothing: the scorer's 0 counts
        assert score(rollout).ok
        assert score(rollout).parts == {}


def test_a_server_that_is_full_or_gone_makes_an_episode_invalid(urls: dict[str, Any]) -> None:
    env = openenv(url=urls["echo"][:1], max_turns=2)
    held = env.start(asked("Say!"))
    [rollout] = play(env, [asked("Say something!")], says=[["a", "b"]])
    assert score(rollout).state == "invalid"
    env.close(held)
    with pytest.raises(ValueError, match="no environment answers at"):
        openenv(url=f"http://127.0.0.1:{_free_port()}")


def test_a_model_is_trained_by_the_command_line(urls: dict[str, Any], tmp_path: Path) -> None:
    env = {"name": "openenv", "url": urls["echo"], "observation": "message_length", "max_turns": 2}
    rows = trained(tmp_path, env)
    assert len(rows) == 2
    for row in rows:  # two turns, a tenth for each character, at most 1
        assert None in row["sampler_logprobs"]
        said = [turn["text"] for turn in row["turns"] if turn["sampled"]]
        assert row["reward"] == pytest.approx(sum(min(1.0, len(text) / 10) for text in said))


def test_without_openenv_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain\[openenv\]'"):
        openenv(url="http://127.0.0.1:1")
