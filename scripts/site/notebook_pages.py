"""A notebook as a page of the site: its text, its cells, and what they printed, as committed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def notebook_page(path: Path) -> str:
    """Markdown of a notebook."""
    read = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    for cell in read["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code" and text.strip():
            parts.append(fenced(text, "python"))
            parts += _outputs(cell["outputs"])
    first, *rest = parts
    where = f"*A notebook: [{path.name}]({_blob(path)}), run by the tests.*"
    return "\n\n".join([first, where, *rest]) + "\n"


def _blob(path: Path) -> str:
    return f"https://github.com/posttrain/posttrain/blob/main/notebooks/{path.name}"


def fenced(text: str, language: str) -> str:
    """A block of code, whatever backticks it holds."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _outputs(outputs: list[dict[str, Any]]) -> Iterator[str]:
    """What a cell printed and returned: a picture or table where there is one, else text."""
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            encoded = "".join(data["image/png"]).replace("\n", "")
            yield f'<img class="output" alt="" src="data:image/png;base64,{encoded}">'
        elif "text/html" in data:  # one line: a blank one would end the block of HTML
            html = " ".join("".join(data["text/html"]).split())
            yield f'<div class="output">{html}</div>'
        elif text := _ESCAPES.sub("", "".join(data.get("text/plain", ""))).strip("\n"):
            yield f'<div class="output" markdown>\n\n{fenced(text, "text")}\n\n</div>'
