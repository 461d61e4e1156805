"""Mistyped options: none is taken for an override, and messages escape what was typed."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from posttrain.track.printable import harmless


class WithOverrides(TyperCommand):
    """A command that takes ``--section.key value``; an option of its own, mistyped, is refused."""

    def invoke(self, ctx: Any) -> Any:
        known = [name for item in self.params for name in item.opts if name.startswith("--")]
        for word in ctx.args:
            name = word.partition("=")[0]
            if word.startswith("--") and "." not in name:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                if near:
                    raise ValueError(f"{self.name}: no option {name}; did you mean {near[0]}?")
        return super().invoke(ctx)


@contextlib.contextmanager
def harmless_mistypings() -> Iterator[None]:
    """Escape the typed words that typer quotes in its own error messages."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):
            error.message = harmless(error.message)  # type: ignore[attr-defined]
        raise
