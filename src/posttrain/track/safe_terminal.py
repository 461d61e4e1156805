"""All output to a terminal, made harmless: no text of files, models or recipes can control it.

Escape sequences (colours, links, titles), text that runs backwards and rich's own markup are shown
as the characters that they are made of. Everything that posttrain prints goes through here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from posttrain.track.printable import harmless


class Terminal(Console):
    """A console that reads no markup in text, and escapes control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A plain string as text that is as wide as it will be drawn."""
        return super().render_str(harmless(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What is drawn: rich's own control codes as they are, all text harmless."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


class HarmlessRecord(logging.LogRecord):
    """A log record with an escaped message: libraries may quote a model folder or data."""

    def getMessage(self) -> str:  # noqa: N802 - logging's own name
        """The message, harmless."""
        return harmless(super().getMessage())


def say(text: str, *, style: str = "", error: bool = False) -> None:
    """Print lines that may hold anything, on standard output or error."""
    console = Terminal(stderr=error)
    console.print(Text(harmless(text), style=style), soft_wrap=True, highlight=False)


def say_json(value: Any) -> None:
    r"""Print JSON; what would act in a terminal stands as ``\uXXXX``, which means the same."""
    text = json.dumps(value, default=str, ensure_ascii=False, indent=2)
    say("".join(c if c == "\n" or c == harmless(c) else json.dumps(c)[1:-1] for c in text))
