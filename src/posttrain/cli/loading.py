"""Imports of large libraries, shown where they take long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from posttrain.track.progress import phase, showing


@contextlib.contextmanager
def loading(console: Console | None = None) -> Iterator[None]:
    """Show that torch and other large libraries are imported inside, by default on stderr."""
    with showing(console), phase("loading torch and what models need"):
        yield
