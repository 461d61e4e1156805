"""Commands that a user is shown: each does, copied into a shell, what it says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posttrain.track.printable import command_line

_LONGEST = 500  # characters of a prompt that one would still copy


def generate_command(run: Path, prompts: Iterable[str]) -> str | None:
    """What asks a run's model the shortest of these prompts; None where none can be typed.

    A prompt of messages has no text, and no command line holds a NUL.
    """
    typed = [text for text in prompts if text and "\0" not in text and len(text) <= _LONGEST]
    if not typed:
        return None
    prompt = min(typed, key=len)
    end = ["--"] if prompt.startswith("-") or str(run).startswith("-") else []
    return command_line("posttrain", "generate", *end, run, prompt)
