"""The process in which chat templates run, with limits: a template is a program.

Started by :mod:`posttrain.data.chats` as a file, so that it imports nothing of posttrain. It reads
lines of JSON with chats, and writes for each a line with its text or an error. The system kills
the process when it exceeds its CPU time; the parent reports that.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from typing import Any

MAX_BYTES = 2**30  # memory beyond what the process takes before it reads a template
MAX_CHARACTERS = 2**24


def main() -> None:
    """Answer until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of libraries go to stderr: stdout is for answers
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        found = []
        for chat in asked["chats"]:
            _limit_seconds(asked["seconds"])
            found.append(_answer(render_jinja_template, asked, chat=chat))
            if "text" not in found[-1]:
                break  # the parent raises for the first chat that fails
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        if "memory" in found[-1]:
            return  # a new process for the next chat: this one has used up its memory


def _limit_seconds(seconds: int) -> None:
    """Limit the CPU time of the next chat, counted from now."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(time.process_time()) + seconds
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except FileNotFoundError:  # macOS has no /proc, and its kernel ignores RLIMIT_AS
        return
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(render: Any, asked: dict[str, Any], *, chat: Any) -> dict[str, str]:
    messages, reply = chat
    try:
        rendered, _ = render(
            conversations=[messages],
            chat_template=asked["template"],
            add_generation_prompt=reply,
            **asked["names"],
        )
    except MemoryError:
        used = f"takes more than {MAX_BYTES // 2**20:,} MiB of memory to write one chat"
        return {"limit": used, "memory": "used up"}
    except RecursionError:
        return {"limit": "calls itself without end"}
    except Exception as error:  # noqa: BLE001 - a template may raise anything: it is reported
        return {"error": str(error) or type(error).__name__}
    if len(rendered[0]) > MAX_CHARACTERS:
        size = f"{len(rendered[0]):,} characters"
        return {"limit": f"writes {size} for one chat, more than {MAX_CHARACTERS:,}"}
    return {"text": rendered[0]}


if __name__ == "__main__":
    main()
