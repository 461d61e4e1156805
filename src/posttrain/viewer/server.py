"""The server of the page: on this machine alone, for whoever has the address with its token.

Rollouts were written by models and strangers, and other pages are open in the same browser: who
asks must have the token, come by this host's name and from this page; runs have names, not paths;
every answer is bounded; the page may load and run nothing but its own files.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from posttrain.report.overview import BROKEN
from posttrain.viewer.page_answers import ANSWERS
from posttrain.viewer.shelf import NotRecordedError, Shelf, UnknownError
from posttrain.viewer.values import finite

Answer = Callable[[Request], Awaitable[Response]]
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ASSETS = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}
MAX_BODY = 100_000
HOST = "127.0.0.1"


def make_app(
    shelf: Shelf, *, token: str, port: int, warn: Callable[[str], None] = print
) -> FastAPI:
    """The application; ``port`` is where it will listen, for whom it will answer."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    cookie = f"posttrain-{port}"
    hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
    trials, making = list[Any](), threading.Lock()  # made for who asks first: torch takes seconds

    @app.middleware("http")
    async def guard(request: Request, answer: Answer) -> Response:
        response = refused(request, hosts=hosts, cookie=cookie, token=token)
        if response is None:
            response = await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/api/{name}")
    def api(name: str, request: Request) -> Response:
        if name not in ANSWERS:
            return _error("there is nothing here", 404)
        return told(lambda: ANSWERS[name](shelf, request.query_params), warn=warn)

    @app.post("/api/try")
    async def trying(request: Request) -> Response:
        body = await _body(request)

        def ask() -> Iterator[dict[str, Any]]:
            asked = _object(body)
            with making:
                if not trials:
                    from posttrain.viewer.trying import Answering

                    trials.append(Answering())
            found: Iterator[dict[str, Any]] = trials[0].answer(
                shelf.get(str(asked.get("run", ""))), asked
            )
            return found

        return await run_in_threadpool(told, ask, warn=warn)  # others are answered meanwhile

    @app.get("/{path:path}")
    def page(path: str) -> Response:
        name = path if path in ASSETS else "index.html"
        kind = ASSETS.get(name, "text/html; charset=utf-8")
        return Response(asset(name), media_type=kind)

    return app


def told(ask: Callable[[], Any], *, warn: Callable[[str], None]) -> Response:
    """An answer as JSON, or why there is none; events as a line of JSON each."""
    try:
        content = ask()
    except (UnknownError, NotRecordedError) as error:
        return _error(str(error), 404)
    except ValueError as error:
        return _error(str(error), 422)
    except BROKEN as error:  # a file that is not what it should be
        warn(f"{type(error).__name__}: {error}")
        return _error(f"cannot be read ({type(error).__name__})", 500)
    if isinstance(content, Iterator):
        return StreamedLines(_lines(content))
    text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


class StreamedLines(StreamingResponse):
    """Lines as they come. They end with it: one whose client has gone leaves nothing half done."""

    def __init__(self, lines: Generator[bytes, None, None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._lines = lines

    async def __call__(self, *given: Any) -> None:
        try:
            await super().__call__(*given)
        finally:
            self._lines.close()


async def _body(request: Request) -> bytes:
    """What was sent, a byte more than the limit at most."""
    body = bytearray()
    async for part in request.stream():
        body += part[: MAX_BODY + 1 - len(body)]
    return bytes(body)


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY:
        raise ValueError(f"expected at most {MAX_BODY:,} bytes")
    asked = json.loads(body)
    if not isinstance(asked, dict):
        raise ValueError("expected a JSON object")
    return asked


def _error(text: str, status: int) -> Response:
    return JSONResponse({"error": text}, status_code=status)


def refused(request: Request, *, hosts: set[str], cookie: str, token: str) -> Response | None:
    """Why a request is not answered; None where it is."""
    host, headers, given = request.headers.get("host", ""), request.headers, request.query_params
    if host not in hosts:  # another name for this address: DNS rebinding
        return _error("ask by the address that was printed", 403)
    origin = headers.get("origin")
    if origin not in (None, f"http://{host}"):
        return _error("this page alone may ask", 403)
    foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if foreign and (request.url.path.startswith("/api/") or request.method != "GET"):
        return _error("this page alone may ask", 403)
    shown = given.get("token")
    if shown is not None and secrets.compare_digest(shown.encode(), token.encode()):
        rest = urlencode([(key, value) for key, value in given.multi_items() if key != "token"])
        where = request.url.path + (f"?{rest}" if rest else "")
        response = RedirectResponse(f"/{where.lstrip('/')}", status_code=303)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    if request.url.path.startswith("/api/"):
        known = request.cookies.get(cookie, "")
        if not secrets.compare_digest(known.encode(), token.encode()):
            return _error("open the address that posttrain view printed: it has the token", 401)
    return None


def asset(name: str) -> bytes:
    """A built file of the page."""
    return files("posttrain.viewer").joinpath("static", name).read_bytes()


def serve(folders: list[Path], *, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted; ``say`` is told the address, once it answers."""
    shelf, token = Shelf(folders), secrets.token_urlsafe(24)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"--port {port}: {error.strerror}; take another, or leave it out"
            ) from error
        port = opened.getsockname()[1]
        app = make_app(shelf, token=token, port=port, warn=say)
        config = uvicorn.Config(app, host=HOST, port=port, log_level="error", access_log=False)
        opened.listen()  # who asks from now on is answered as soon as the server runs
        say(f"http://{HOST}:{port}/?token={token}")
        uvicorn.Server(config).run(sockets=[opened])


def _lines(events: Iterator[dict[str, Any]]) -> Generator[bytes, None, None]:
    for event in events:
        yield json.dumps(finite(event)).encode() + b"\n"
