"""Chats as a model's template writes them, in a process of their own with limits.

A chat template is a program that comes with a model: it may loop for hours or ask for all memory.
No check inside this process could bound it (a string can grow in a hundred ways), so it runs in
another one, which the system limits: :mod:`posttrain.data.chat_worker`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

WORKER = Path(__file__).with_name("chat_worker.py")
MAX_SECONDS = 10  # CPU time of one chat; chat_worker has the other limits
TOGETHER = 256  # chats in one request: each request costs a round trip to the process
SYSTEM = "remove the system message (model.system, or from the data)"
SHOWN = 300  # characters of what a template wrote, in an error


Chat = tuple[Sequence[Mapping[str, Any]], bool]  # messages, and whether the assistant is to reply


class TemplateLimit(ValueError):  # noqa: N818 - named after what is wrong
    """A template took more time, memory or text than writing a chat can need."""


class TemplateRefusal(ValueError):  # noqa: N818 - named after what is wrong
    """A template raised an error about the messages of a chat, the one with this ``number``."""

    def __init__(self, text: str, *, number: int) -> None:
        super().__init__(text)
        self.number = number


class ChatRefused(ValueError):  # noqa: N818 - named after what is wrong
    """A chat template raised an error: it knows no such chats."""


class _Writer:
    """The process that writes chats: started on first use, restarted where something killed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # requests may come from several threads
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ended = 0  # exit code of the last process

    def write(self, asked: Mapping[str, Any]) -> list[str]:
        """The texts of the chats that were asked for."""
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            answers = self._ask(line) or self._ask(line)
        if answers is None:
            raise TemplateLimit(
                f"could not be run: its process ended twice, with code {self._ended} (-9: someone "
                "killed it, or memory is used up)"
            )
        if "limit" in answers[-1]:
            raise TemplateLimit(answers[-1]["limit"])
        if "error" in answers[-1]:
            raise TemplateRefusal(answers[-1]["error"], number=len(answers) - 1)
        return [answer["text"] for answer in answers]

    def _ask(self, line: bytes) -> list[dict[str, str]] | None:
        """The answers; None where the process was killed from outside."""
        stdin, stdout = self._pipes()
        reply = b""
        with contextlib.suppress(BrokenPipeError):  # the process died before the request
            stdin.write(line)
            stdin.flush()
            reply = stdout.readline()
        if reply.endswith(b"\n"):
            return list(json.loads(reply))
        code = self._ended = self.close()
        if code == -signal.SIGXCPU:
            used = f"takes more than {MAX_SECONDS} s of processor time"
            return [{"limit": f"{used} to write one chat"}]
        if code in (-signal.SIGSEGV, -signal.SIGABRT):
            return [{"limit": f"crashes the interpreter ({signal.Signals(-code).name})"}]
        return None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        # A fork of this process shares its pipes, and must start a chat process of its own.
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it: it may be needed to shut down
            )
        process = self._process
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        return process.stdin, process.stdout

    def close(self) -> int:
        """End the process; returns its exit code."""
        if self._process is None or self._owner != os.getpid():
            return 0
        stdin, stdout = self._pipes()
        process, self._process = self._process, None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        stdout.close()
        return process.wait()


_writer = _Writer()
atexit.register(_writer.close)


def write_chats(template: str, chats: Sequence[Chat], *, names: Mapping[str, Any]) -> list[str]:
    """The texts of chats; with a reply to come, a text ends where the assistant begins.

    ``names`` are what the template may ask for beside the messages: special tokens and tools.
    """
    texts: list[str] = []
    for start in range(0, len(chats), TOGETHER):
        part = chats[start : start + TOGETHER]
        plain = [([dict(message) for message in messages], reply) for messages, reply in part]
        try:
            texts += _writer.write(
                {"template": template, "chats": plain, "names": dict(names), "seconds": MAX_SECONDS}
            )
        except TemplateRefusal as error:
            raise TemplateRefusal(str(error), number=start + error.number) from None
    return texts


def try_template(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Sequence[Chat]], list[str]],
    *,
    file: str,
) -> None:
    """Refuse a chat template that leaves out a message of such a chat, and say what it wrote.

    A template that writes other roles like the user's gets a warning.
    """
    roles = [message["role"] for message in messages]
    contents = [f"message {number} of {len(roles)}." for number in range(1, len(roles) + 1)]
    chat = [{**m, "content": text} for m, text in zip(messages, contents, strict=True)]
    reply = roles[-1] != "assistant"
    [text] = write([(chat, reply)])
    # Mistral's write the system's message into the last turn: what counts is the prompt of that.
    prompt = "" if reply or roles[0] != "system" else write([(chat[:-1], True)])[0]
    missing = [message for message in chat if message["content"] not in text + prompt]
    # Some templates write the calls of a message alone.
    left_out = [message["role"] for message in missing if not message.get("tool_calls")]
    if left_out:
        raise ValueError(
            f"chat: the chat template ({file}) leaves out the {left_out[0]}'s message: "
            f"of a chat of {', '.join(roles)} it writes {text[:SHOWN]!r}; "
            f"{f'{SYSTEM}, or ' * (left_out[0] == 'system')}fix the template, or set "
            "chat = false and write plain prompts"
        )
    for role in sorted({*roles} - {"user"}):
        others = [_as_users(m) if m["role"] == role else m for m in chat]
        try:
            [same] = write([(others, reply)])
        except ChatRefused:
            continue  # the template refuses the other role, so it tells them apart
        if same == text:
            warnings.warn(
                f"chat: the chat template ({file}) writes the {role}'s messages like "
                f"the user's, so that the model cannot tell them apart: {text[:SHOWN]!r}; "
                "fix the template, unless that is intended",
                stacklevel=3,
            )


def _as_users(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the user's, who neither calls tools nor answers for them."""
    tools = ("tool_calls", "tool_call_id", "name")
    return {**{key: value for key, value in message.items() if key not in tools}, "role": "user"}
