"""The server, on a real port, asked by the real client of OpenAI."""

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from byte_models import SAID, taught_model

from posttrain.serving import http_server
from posttrain.serving.http_server import Endpoint, make_app, make_server
from posttrain.serving.service import Service
from posttrain.stages.loaded.loaded_policy import LoadedPolicy as Policy

openai = pytest.importorskip("openai")

CHAT: Any = [{"role": "user", "content": "Speak."}]
WARM: dict[str, Any] = {"temperature": 1.7, "seed": 5, "max_tokens": 24}


@dataclass
class Served:
    policy: Policy
    service: Service
    port: int
    server: Any

    def client(self, **options: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/v1"
        given = {"api_key": "none", "max_retries": 0, "timeout": 30, **options}
        return openai.OpenAI(base_url=url, **given)


def serving(folder: Path, *, api_key: str = "", **limits: int) -> Iterator[Served]:
    policy = Policy(folder)
    service = Service(policy, **limits)
    server = make_server(make_app(Endpoint(service, name="taught"), api_key=api_key))
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what no one takes, waits
        opened.bind(("127.0.0.1", 0))
        opened.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            yield Served(policy, service, opened.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join()
            service.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_model(tmp_path_factory.mktemp("taught"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    yield from serving(folder, active=2, waiting=4)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with served.client() as opened:
        yield opened


def test_a_chat_is_answered_as_the_policy_answers_it(served: Served, client: Any) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "taught"
    found = client.chat.completions.create(model=model.id, messages=CHAT, temperature=0)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", SAID)
    assert choice.finish_reason == "stop"
    (expected,) = served.policy.generate(CHAT)
    used = found.usage
    assert used.prompt_tokens == len(expected.prompt.tokens)
    assert used.completion_tokens == len(expected.tokens)
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": "Speak."}]}]
    again = client.chat.completions.create(model=model.id, messages=parts, temperature=0)
    assert again.choices[0].message.content == SAID


def test_samples_are_those_of_the_policy_by_the_seed(served: Served, client: Any) -> None:
    asked = {"model": "taught", "messages": CHAT, "n": 3, "top_p": 0.95, **WARM}
    found = client.chat.completions.create(**asked)
    expected = served.policy.generate(
        CHAT, num_samples=3, temperature=1.7, top_p=0.95, seed=5, max_new_tokens=24
    )
    texts = [choice.message.content for choice in found.choices]
    assert texts == [rollout.text for rollout in expected]
    assert len(set(texts)) > 1
    others = client.chat.completions.create(**{**asked, "seed": 6})
    assert [choice.message.content for choice in others.choices] != texts


def test_a_stream_says_the_same_in_whole_characters(client: Any) -> None:
    asked: dict[str, Any] = {"model": "taught", "messages": CHAT, "n": 2, **WARM}
    whole = client.chat.completions.create(logprobs=True, **asked)
    chunks = list(
        client.chat.completions.create(
            stream=True, logprobs=True, stream_options={"include_usage": True}, **asked
        )
    )
    for choice in whole.choices:
        mine = [each for c in chunks for each in c.choices if each.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]
        streamed = [entry for each in mine if each.logprobs for entry in each.logprobs.content]
        assert streamed == choice.logprobs.content
    assert chunks[-1].usage == whole.usage
    taught = client.chat.completions.create(
        model="taught", messages=CHAT, temperature=0, stream=True
    )
    pieces = [each.delta.content for chunk in taught for each in chunk.choices]
    assert "".join(piece or "" for piece in pieces) == SAID
    assert "🎉" in pieces


def test_completions_and_their_stream(served: Served, client: Any) -> None:
    """Plain text in, no chat template; tokens are a prompt too."""
    asked: dict[str, Any] = {"model": "taught", "prompt": "ab cd", "logprobs": 2, **WARM}
    found = client.completions.create(**asked)
    (choice,) = found.choices
    tokens = served.policy.tokenizer("ab cd").input_ids
    assert found.usage.prompt_tokens == len(tokens)
    chunks = list(client.completions.create(stream=True, **asked))
    texts = [each.text for chunk in chunks for each in chunk.choices]
    assert "".join(texts) == choice.text
    assert client.completions.create(**{**asked, "prompt": tokens}).choices[0].text == choice.text
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert all(len(top) <= 2 for top in logprobs.top_logprobs)


def test_log_probs_are_those_of_policy_score(served: Served, client: Any) -> None:
    """The model's own, whatever the temperature was; the likeliest are first."""
    asked: dict[str, Any] = {"model": "taught", "messages": CHAT, **WARM}
    found = client.chat.completions.create(logprobs=True, top_logprobs=5, **asked)
    entries = found.choices[0].logprobs.content
    (rollout,) = served.policy.generate(CHAT, temperature=1.7, seed=5, max_new_tokens=24)
    scored = served.policy.score(rollout)
    count = len(entries)
    assert count >= len(scored.tokens) - 1  # all but an end token
    assert [entry.token for entry in entries] == list(scored.texts[:count])
    expected = pytest.approx(scored.logprobs[:count], abs=1e-4)
    assert [entry.logprob for entry in entries] == expected
    for entry in entries:
        top = [each.logprob for each in entry.top_logprobs]
        assert len(top) == 5
        assert top == sorted(top, reverse=True)
        assert math.fsum(map(math.exp, top)) <= 1 + 1e-6
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_stop_strings_and_lengths(client: Any) -> None:
    asked: dict[str, Any] = {"model": "taught", "messages": CHAT, "temperature": 0}
    for stop in ("! s", ["zzz", " 🎉"]):
        found = client.chat.completions.create(stop=stop, **asked)
        strings = [stop] if isinstance(stop, str) else stop
        assert found.choices[0].message.content == SAID[: SAID.find(strings[-1])]
        assert found.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(stop=stop, stream=True, **asked)
        pieces = [each.delta.content or "" for chunk in chunks for each in chunk.choices]
        assert "".join(pieces) == found.choices[0].message.content
    short = client.chat.completions.create(max_completion_tokens=3, **asked)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 3


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"frequency_penalty": 0.5}, "frequency_penalty", "is not supported, because"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "nothing constrains them"),
    ({"extra_body": {"min_p": 0.1}}, "min_p", "is not a parameter that is known here"),
    ({"n": 99}, "n", "from 1 to 16"),
    ({"temperature": -1}, "temperature", "from 0 to 10"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
    ({"max_tokens": 10_000}, "max_tokens", "at most 161 fit after the prompt"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"messages": []}, "messages", "not empty"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages", "known here: system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "of text"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "of a stream"),
]


@pytest.mark.parametrize(("wrong", "param", "said"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_not_supported_is_refused(
    client: Any, wrong: dict[str, Any], param: str, said: str
) -> None:
    """With the reason, in the shape from which the client makes its own errors."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "taught", "messages": CHAT, **wrong})
    assert caught.value.body["param"] == param
    assert caught.value.body["type"] == "invalid_request_error"
    assert said in caught.value.body["message"]


def test_other_errors(served: Served, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="is not here; there is 'taught' alone"):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    with pytest.raises(openai.NotFoundError, match="there are /v1/chat/completions"):
        client.embeddings.create(model="taught", input="a")
    long = [{"role": "user", "content": "x" * 400}]
    with pytest.raises(openai.BadRequestError, match="leaves no room for an answer"):
        client.chat.completions.create(model="taught", messages=long)
    neutral = {"frequency_penalty": 0, "user": "me", "response_format": {"type": "text"}}
    client.chat.completions.create(model="taught", messages=CHAT, max_tokens=1, **neutral)


def post(port: int, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """A request by hand, for what the client would not send."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    given = {"content-type": "application/json", **headers}
    connection.request("POST", "/v1/chat/completions", body, given)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_requests_of_pages_and_strangers_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.dumps({"messages": CHAT, "max_tokens": 1}).encode()
    port = served.port
    assert post(port, good)[0] == 200
    assert post(port, good, host="evil.example")[0] == 403
    assert post(port, good, origin="https://evil.example")[0] == 403
    assert post(port, good, **{"content-type": "text/plain"})[0] == 415
    for broken in (b"{", b"[]", b"[" * 100_000, b'"\xff"'):
        status, body = post(port, broken)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    for odd in ({"temperature": 10**400}, {"messages": [{"role": [], "content": "a"}]}):
        assert post(port, json.dumps({"messages": CHAT, **odd}).encode())[0] == 400
    half = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    assert post(port, half)[0] == 400  # no tokenizer can read it
    monkeypatch.setattr(http_server, "MAX_BODY", 10)
    assert post(port, good)[0] == 413


def test_an_error_of_any_kind_is_its_requests_alone(
    served: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("of the template")

    with monkeypatch.context() as broken:
        broken.setattr(served.policy, "prompt", fails)
        with pytest.raises(openai.InternalServerError):
            client.with_options(timeout=5).chat.completions.create(model="taught", messages=CHAT)
    assert client.chat.completions.create(model="taught", messages=CHAT, max_tokens=1).choices


def test_no_answer_names_a_file_of_this_machine(
    folder: Path, served: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by its whole path nor from the current folder."""
    system = [{"role": "system", "content": "a"}] * 2
    refuses = "{{ raise_exception('roles must alternate user/assistant/user') }}"
    monkeypatch.chdir(folder.parent)
    for name in (str(folder), folder.name):
        monkeypatch.setattr(served.policy.tokenizer, "chat_template", refuses)
        monkeypatch.setattr(served.policy.tokenizer, "name_or_path", name)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="taught", messages=system)
        said = caught.value.body["message"]
        assert str(folder) not in said
        assert f"{folder.name}/" not in said
        assert "(chat_template.jinja) refuses" in said
        assert "alternate user/assistant/user" in said


def test_a_slow_client_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the head of a request, not for its body, and not to take its answer."""
    body = json.dumps(
        {"messages": CHAT, "n": 8, "stream": True, "logprobs": True, "top_logprobs": 20, **WARM}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    monkeypatch.setattr(http_server, "PATIENCE", 2.0)
    for served in serving(folder):
        for sent, first in ((b"", b""), (head, b""), (head + b"\r\n{", b"HTTP/1.1 408")):
            with socket.create_connection(("127.0.0.1", served.port), timeout=60) as slow:
                slow.sendall(sent)
                assert slow.recv(12) == first
        with socket.socket() as slow:
            slow.settimeout(60)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", served.port))
            slow.sendall(head + b"\r\n" + body)
            assert slow.recv(12) == b"HTTP/1.1 200"
            until(lambda state=served.server.server_state: not state.connections)


def test_the_servers_longest_answer_holds_for_who_names_none(folder: Path) -> None:
    for served in serving(folder, max_tokens=3):
        with served.client() as client:
            found = client.chat.completions.create(model="taught", messages=CHAT, temperature=0)
            assert found.usage.completion_tokens == 3


def test_a_key_is_asked_for(folder: Path) -> None:
    for served in serving(folder, api_key="secret"):
        with (
            served.client(api_key="wrong") as stranger,
            pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"),
        ):
            stranger.models.list()
        with served.client(api_key="secret") as known:
            assert known.models.list().data


class Slow:
    """Has every step wait until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from posttrain.rollout.engines.stepwise import Stepwise

        self.go = threading.Event()
        step = Stepwise.step

        def waiting(steps: Stepwise) -> Any:
            self.go.wait(0.05)
            return step(steps)

        monkeypatch.setattr(Stepwise, "step", waiting)


def until(true: Any) -> None:
    """Wait, as long as a busy machine takes."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_requests_at_once_queue_and_are_what_they_are_alone(
    served: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are sampled at a time and four wait; one more hears that the server is busy."""
    asked: dict[str, Any] = {"model": "taught", "messages": CHAT, "max_tokens": 20}
    alone = [
        client.chat.completions.create(temperature=1.5, seed=seed, **asked) for seed in range(6)
    ]
    slow = Slow(monkeypatch)
    found: dict[int, Any] = {}

    def ask(seed: int) -> None:
        found[seed] = client.chat.completions.create(temperature=1.5, seed=seed, **asked)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 1:
            until(lambda: served.service.num_running == 2)
    until(lambda: served.service._waiting.full())
    with pytest.raises(openai.RateLimitError, match="ask again later"):
        client.chat.completions.create(**asked)
    slow.go.set()
    for thread in threads:
        thread.join()
    for seed in range(6):
        assert found[seed].choices == alone[seed].choices


def test_a_client_that_goes_away_frees_its_place(
    served: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a stream, and while it waits for a whole answer."""
    slow = Slow(monkeypatch)
    asked: dict[str, Any] = {"model": "taught", "messages": CHAT, "max_tokens": 150}
    warm = {"temperature": 10.0, "seed": 1}
    stream = client.chat.completions.create(stream=True, **asked, **warm)
    next(iter(stream))
    until(lambda: served.service.num_running == 1)
    stream.close()
    until(lambda: served.service.num_running == 0)
    with served.client(timeout=0.5) as hasty, pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(**asked, **warm)
    until(lambda: served.service.num_running == 0)
    slow.go.set()
    assert client.chat.completions.create(**{**asked, "max_tokens": 1}).choices
