"""Docstrings as Markdown, for the pages of the Python API (an extension of griffe).

They are written to be read in a terminal: examples, tables and equations stand in columns.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|mod|meth|data):`~?([^`]+)`")


class DocstringText(griffe.Extension):
    """Turns every docstring into Markdown after a package was read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Examples and tables in columns become blocks of code; a role becomes the name that it has.

    >>> print(as_markdown("Adds :func:`x`.\\n\\n>>> x(1)\\n2"))
    Adds `x`.
    <BLANKLINE>
    ```pycon
    >>> x(1)
    2
    ```
    """
    parts = [_paragraph(part) for part in re.split(r"\n[ ]*\n", _ROLE.sub(r"`\1`", text))]
    return "\n\n".join(parts)


def _paragraph(part: str) -> str:
    if part.startswith(">>> "):
        return f"```pycon\n{part}\n```"
    if re.match(r"={3,}( +=+)+$", part.partition("\n")[0]):
        lines = [line for line in part.splitlines() if not re.fullmatch(r"[= ]+", line)]
        return "```text\n" + "\n".join(lines).replace("``", "") + "\n```"
    return part
