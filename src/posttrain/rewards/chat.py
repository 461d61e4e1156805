"""One question to an OpenAI-compatible chat endpoint: bounded in time and size, errors sorted."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_RESPONSE_BYTES = 1_000_000
MAX_WAIT = 60.0  # seconds between two attempts; no retry where the server asks for a longer wait
_CHUNK = 65_536
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]+)?|\[[0-9A-Fa-f:.]+\](:[0-9]+)?")
KEYS = {
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "api.deepseek.com": "DEEPSEEK_API_KEY",
    "api.groq.com": "GROQ_API_KEY",
    "api.mistral.ai": "MISTRAL_API_KEY",
    "api.together.xyz": "TOGETHER_API_KEY",
    "generativelanguage.googleapis.com": "GEMINI_API_KEY",
    "openrouter.ai": "OPENROUTER_API_KEY",
}
"""Hosts, and the environment variable with their API key, which is sent to that host alone."""


class ChatError(Exception):
    """A call without an answer; ``passing`` says that a retry may succeed.

    ``there`` says that a chat server is at that address: it answered, or timed out.
    """

    def __init__(
        self,
        reason: str,
        *,
        passing: bool,
        timed_out: bool = False,
        there: bool = False,
        after: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.passing = passing
        self.timed_out = timed_out
        self.there = there or timed_out
        self.after = after  # seconds to wait, as the server asks


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of the model, and how many tokens question and reply have."""

    text: str
    tokens_in: int = 0
    tokens_out: int = 0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, req: Any, fp: Any, *rest: Any) -> None:
        return None


def endpoint(url: str, *, has_key: bool) -> str:
    """The address of the chat completions below a base URL, checked.

    >>> endpoint("https://api.openai.com/v1/", has_key=True)
    'https://api.openai.com/v1/chat/completions'
    """
    parts = urllib.parse.urlsplit(url)
    # URL parsers disagree on the host where there is a user name or a backslash.
    strange = any(character <= " " or character == "\x7f" for character in url)
    if strange or parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.netloc):
        raise ValueError(f"url: expected https://HOST/… (or http://HOST/…), got {url!r}")
    if has_key and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ValueError(
            f"url: {url!r} would send the API key in the clear; use https, or unset the key's "
            "environment variable if the server needs none"
        )
    url = url.rstrip("/")
    return url if url.endswith("/chat/completions") else f"{url}/chat/completions"


def key_for(url: str, variable: str) -> str:
    """The key for a host: from the host's variable in :data:`KEYS`, or from ``variable``.

    A recipe may come from anybody, and name any variable and any host. So a key is sent only to its
    host in :data:`KEYS`, and to those that ``VARIABLE_HOSTS`` in the environment lists.
    """
    host = urllib.parse.urlsplit(url).hostname or ""
    name = variable or KEYS.get(host, "")
    key = os.environ.get(name, "") if name else ""
    named = [word.strip().lower() for word in os.environ.get(f"{name}_HOSTS", "").split(",")]
    if key and KEYS.get(host) != name and host not in named:
        raise ValueError(
            f"api_key_variable: {name} is not sent to {host!r}, because nobody outside the recipe "
            f"has said that it is for that host; if it is: export {name}_HOSTS={host}"
        )
    return key


def ask(url: str, body: Mapping[str, Any], *, key: str, seconds: float) -> Reply:
    """Post a question, and read the answer within ``seconds``; raises :class:`ChatError`."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        endpoint(url, has_key=bool(key)), data=json.dumps(body).encode(), headers=headers
    )
    deadline = time.monotonic() + seconds
    handlers: list[Any] = [_NoRedirect]
    if urllib.parse.urlsplit(url).hostname in _LOOPBACK:  # a proxy would read the key
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as response:
            return _reply(_read(response, deadline))
    except urllib.error.HTTPError as error:
        with error:  # close the connection that the error holds
            raise _refusal(error) from None
    except (OSError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        timed_out = isinstance(cause, TimeoutError)
        reason = f"no answer within {seconds:g} s" if timed_out else f"no connection ({cause})"
        raise ChatError(reason, passing=True, timed_out=timed_out) from None


def wait_before(attempt: int, error: ChatError) -> float:
    """Seconds to wait before the next attempt: what the server asks for, or 1, 2, 4 … with jitter.

    >>> wait_before(0, ChatError("429", passing=True, after=7.0))
    7.0
    >>> 2 <= wait_before(2, ChatError("500", passing=True)) <= 4
    True
    """
    if error.after is not None:
        return error.after
    ceiling = min(MAX_WAIT, 2.0**attempt)
    return ceiling * random.uniform(0.5, 1.0)


def _read(response: Any, deadline: float) -> bytes:
    """The body, with a deadline: the socket's own timeout starts again with each byte."""
    pieces: list[bytes] = []
    while sum(map(len, pieces)) <= MAX_RESPONSE_BYTES:
        if time.monotonic() > deadline:
            raise TimeoutError
        piece = response.read1(_CHUNK)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    raise ChatError(f"an answer of more than {MAX_RESPONSE_BYTES} bytes", passing=True)


def _reply(body: bytes) -> Reply:
    try:
        data = json.loads(body)
        text = data["choices"][0]["message"]["content"]
        usage = data.get("usage") or {}
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ChatError("an answer that is no chat completion", passing=True)
    return Reply(text=text, tokens_in=tokens[0], tokens_out=tokens[1])


def _refusal(error: urllib.error.HTTPError) -> ChatError:
    after = _seconds(error.headers.get("Retry-After", ""))
    passing = error.code in (408, 429) or error.code >= 500
    return ChatError(
        f"HTTP {error.code}",
        passing=passing and (after or 0.0) <= MAX_WAIT,
        there=passing,
        after=after,
    )


def _seconds(text: str) -> float | None:
    """The header Retry-After: a number of seconds, or a date."""
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
