"""A mistyped option of a command that also takes overrides: it is not taken for one of them."""

from __future__ import annotations

import difflib
from typing import Any

from typer.core import TyperCommand


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
