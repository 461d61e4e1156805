"""What the server says of errors, and whom it drops, without a model or a port."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

testclient = pytest.importorskip("fastapi.testclient")

from starlette.requests import Request  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from posttrain.serving import http_server  # noqa: E402
from posttrain.serving.http_server import Endpoint, make_app, make_server  # noqa: E402
from posttrain.serving.service import Event  # noqa: E402


class Failing:
    """A service that takes every request, and cannot sample it."""

    def __init__(self, said: str, *, model: str = "org/name") -> None:
        policy = SimpleNamespace(end_tokens=(0,))
        self.said = said
        self.policy = SimpleNamespace(policy=policy, tokenizer=None, name=model)

    def submit(self, asked: Any, tell: Any) -> Any:
        tell(Event(prompt_tokens=1))
        tell(Event(error=ValueError(self.said)))
        return SimpleNamespace(cancelled=Mock())


def told(service: Any) -> str:
    """The error that a client hears, the same for an answer and for a stream."""
    app: Any = make_app(Endpoint(service, name="a"))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    client = testclient.TestClient(app, base_url="http://127.0.0.1")
    whole = client.post("/v1/chat/completions", json=asked)
    assert whole.status_code == 400
    message: str = whole.json()["error"]["message"]
    stream = client.post("/v1/chat/completions", json={**asked, "stream": True})
    last = [line for line in stream.text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == message
    return message


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("role ~nosuchuser/x is not known", "role x is not known"),
        (f"role {'a' * 300}/x is not known", "role x is not known"),
        ("role a\0b/x is not known", None),  # what it says depends on the version of Python
        (
            "roles alternate user/assistant of org/name",
            "roles alternate user/assistant of org/name",
        ),
    ],
    ids=["no home", "too long", "null", "no path"],
)
def test_words_of_a_client_that_can_be_no_path_are_told(said: str, expected: str | None) -> None:
    found = told(Failing(said))
    assert found == expected or expected is None


@pytest.mark.parametrize("given", ["whole", "from the current folder"])
def test_no_folder_with_a_space_in_its_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    home, current, model = tmp_path / "John Smith", tmp_path / "my work", tmp_path / "my work/a (1)"
    home.mkdir()
    model.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(current)
    name = str(model) if given == "whole" else model.name
    for folder in (str(home), str(current), str(model), name):
        said = f"no file {folder}/models/x.json, '{folder}/y' or file:{folder}/z here"
        assert told(Failing(said, model=name)) == "no file x.json, 'y' or file:z here"
    assert told(Failing(f"{name}: no template", model=name)) == "a (1): no template"


def test_who_takes_no_answer_is_dropped_though_it_asks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE", 0.01)

    async def talk() -> None:
        dropped, over = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await over.wait()

        config = make_server(app).config
        config.load()
        connection = http_server.BoundedConnection(config, state := ServerState(), app_state={})
        connection.connection_made(Mock(abort=dropped.set))
        connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        connection.pause_writing()
        connection.data_received(b"G")
        try:
            async with asyncio.timeout(20):
                await dropped.wait()
        finally:
            connection.connection_lost(None)
            over.set()
            await asyncio.gather(*state.tasks)

    asyncio.run(talk())


def test_who_has_gone_frees_the_place_however_fast_tokens_come() -> None:
    service, cancelled = Failing("nobody looked"), Mock()
    sent = [{"type": "http.request", "body": b'{"prompt": "a"}'}, {"type": "http.disconnect"}]

    def submit(asked: Any, tell: Any) -> Any:
        for _ in range(20):
            tell(Event(prompt_tokens=1))
        tell(Event(error=ValueError(service.said)))
        return SimpleNamespace(cancelled=SimpleNamespace(set=cancelled))

    async def receive() -> dict[str, Any]:
        return sent.pop(0)

    async def talk() -> int:
        headers = [(b"content-type", b"application/json")]
        asked = Request({"type": "http", "headers": headers}, receive)
        return (await Endpoint(service, name="a").answer(asked, "completion")).status_code

    service.submit = submit  # type: ignore[method-assign]
    assert asyncio.run(talk()) == 499
    cancelled.assert_called_once_with()
