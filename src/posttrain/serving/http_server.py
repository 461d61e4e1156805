"""The server of ``posttrain serve``: chat completions, completions, and the list of one model.

Prompts come from anyone who may ask, and other pages are open in a browser on the same machine: who
asks comes by this host's name, from no other origin, with the key where there is one; a request is
bounded in size and time, and so are those that wait. No answer names a file of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.serving.asked import AskedWronglyError, Kind, read_asked
from posttrain.serving.openai_answers import AnswerWriter, error_body
from posttrain.serving.service import BusyError, Event, Service
from posttrain.track.local_paths import without_folders

Application = Callable[..., Awaitable[None]]
MAX_BODY = 2_000_000  # bytes
MAX_CONNECTIONS = 256
PATIENCE = 30.0  # seconds for a request to come whole, and for a client to take what is ready
LOOK = 0.25  # seconds between two looks whether the client is still there
LOCAL = ("127.0.0.1", "localhost", "::1")
NAMES = {"127.0.0.1", "localhost", "[::1]"}


class Endpoint:
    """Answers requests by a service; its model has one name."""

    def __init__(self, service: Service, *, name: str) -> None:
        self.service, self.name = service, name
        self.created = int(time.time())

    async def answer(self, request: Request, kind: Kind) -> Response:
        """A whole answer, a stream, or an error in OpenAI's shape."""
        try:
            return await self._answered(request, kind)
        except ConnectionError:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - what the model could not do has a status too
            return _refused(error, model=self.service.policy.name)

    async def _answered(self, request: Request, kind: Kind) -> Response:
        asked = read_asked(await _body(request), kind=kind, model=self.name)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop, policy = asyncio.get_running_loop(), self.service.policy

        def tell(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        end = policy.policy.end_tokens
        writer = AnswerWriter(asked, model=self.name, tokenizer=policy.tokenizer, end=end)
        job = self.service.submit(asked, tell)
        streams = False
        try:
            writer.prompt_tokens = (await _next(events, request)).prompt_tokens
            if asked.stream:
                streams = True
                return Streamed(
                    _chunks(events, writer, model=policy.name), cancel=job.cancelled.set
                )
            while not (event := await _next(events, request)).done:
                writer.add(event.tokens)
            return JSONResponse(writer.whole())
        finally:
            if not streams:
                job.cancelled.set()  # who has gone frees the place

    def models(self) -> dict[str, Any]:
        """The list of the one model."""
        about = {"id": self.name, "object": "model", "created": self.created}
        return {"object": "list", "data": [{**about, "owned_by": "posttrain"}]}


async def _body(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a page of another origin cannot send unasked
        raise AskedWronglyError("content-type: send application/json", status=415)
    body = b""
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise AskedWronglyError(f"a request has at most {MAX_BODY:,} bytes", status=413)
    except TimeoutError:
        late = f"the request was not whole after {PATIENCE:g} seconds"
        raise AskedWronglyError(late, status=408) from None
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # half a character has no bytes: refused
        return found
    except (ValueError, RecursionError) as error:
        raise AskedWronglyError(f"the request is not JSON: {error}") from None


async def _next(events: asyncio.Queue[Event], request: Request) -> Event:
    """The next event, an error raised; ``ConnectionError`` where nobody waits any more."""
    while not await request.is_disconnected():  # looked at with every event, and between them
        with contextlib.suppress(TimeoutError):
            event = await asyncio.wait_for(events.get(), LOOK)
            if event.error is not None:
                raise event.error
            return event
    raise ConnectionError("the client has gone")


async def _chunks(
    events: asyncio.Queue[Event], writer: AnswerWriter, *, model: str
) -> AsyncIterator[bytes]:
    """Server-sent events."""
    for chunk in writer.opening():
        yield _line(chunk)
    while not (event := await events.get()).done:
        if event.error is not None:
            yield _line(error_body(without_folders(str(event.error), model), kind="server_error"))
            return
        for chunk in writer.add(event.tokens):
            yield _line(chunk)
    for chunk in writer.closing():
        yield _line(chunk)
    yield b"data: [DONE]\n\n"


class Streamed(StreamingResponse):
    """A stream of events; when it ends, or its client goes away, ``cancel`` is called."""

    def __init__(self, chunks: AsyncIterator[bytes], *, cancel: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._cancel = cancel

    async def __call__(self, *given: Any) -> None:
        try:
            await super().__call__(*given)
        finally:
            self._cancel()


def _line(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def _refused(error: Exception, *, model: str) -> Response:
    if isinstance(error, BusyError):
        body = error_body(str(error), kind="rate_limit_error", code="rate_limit_exceeded")
        return JSONResponse(body, status_code=429, headers={"Retry-After": "1"})
    if isinstance(error, AskedWronglyError):
        body = error_body(str(error), param=error.param, code=error.code)
        return JSONResponse(body, status_code=error.status)
    if isinstance(error, ValueError):  # of the template or the engine, about what was asked
        return JSONResponse(error_body(without_folders(str(error), model)), status_code=400)
    body = error_body(without_folders(str(error), model), kind="server_error")
    return JSONResponse(body, status_code=500)


def make_app(endpoint: Endpoint, *, api_key: str = "", local: bool = True) -> Application:
    """The application; ``local`` has it answer by this machine's own names alone."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return endpoint.models()

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> Response:
        if name != endpoint.name:
            body = error_body(f"the model {name!r} is not here", code="model_not_found")
            return JSONResponse(body, status_code=404)
        return JSONResponse(endpoint.models()["data"][0])

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await endpoint.answer(request, "chat")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await endpoint.answer(request, "completion")

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    def nothing(path: str) -> Response:
        text = f"/{path}: there are /v1/chat/completions, /v1/completions and /v1/models"
        return JSONResponse(error_body(text, code="unknown_url"), status_code=404)

    async def guarded(scope: Any, *channels: Any) -> None:
        refused = None
        if scope["type"] == "http":
            refused = _unwelcome(Request(scope), api_key=api_key, local=local)
        await (refused or app)(scope, *channels)

    return guarded


def _unwelcome(request: Request, *, api_key: str, local: bool) -> Response | None:
    """Why a request is not answered; None where it is."""
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] or host
    if local and name not in NAMES and host not in NAMES:  # DNS rebinding
        return JSONResponse(error_body("ask by the address that was printed"), status_code=403)
    if request.headers.get("origin") not in (None, f"http://{host}"):
        return JSONResponse(error_body("pages of other origins may not ask"), status_code=403)
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if api_key and not secrets.compare_digest(given.encode(), api_key.encode()):
        body = error_body("send the key as Authorization: Bearer KEY", code="invalid_api_key")
        return JSONResponse(body, status_code=401)
    return None


def serve(
    service: Service, *, name: str, host: str, port: int, api_key: str, say: Callable[[str], None]
) -> None:
    """Serve until interrupted; ``say`` is told the address, once it answers."""
    local = host in LOCAL
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; take another") from error
        app = make_app(Endpoint(service, name=name), api_key=api_key, local=local)
        port = opened.getsockname()[1]
        opened.listen()  # who asks from now on is answered as soon as the server runs
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        make_server(app).run(sockets=[opened])


class BoundedConnection(H11Protocol):
    """A connection that is dropped where its client sends no whole head, or takes no answer."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        elif not self.flow.write_paused:  # whoever answers the request bounds the rest
            self._go_on()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._go_on()

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.abort)

    def _go_on(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def make_server(app: Application) -> Any:
    """What runs the application on a socket; at most so many connections are open at once."""
    quiet = {"log_level": "error", "access_log": False}
    limits: Any = {"limit_concurrency": MAX_CONNECTIONS, "http": BoundedConnection}
    return uvicorn.Server(uvicorn.Config(app, interface="asgi3", **limits, **quiet))
