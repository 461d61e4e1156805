"""Silence for what takes no time: the bars transformers draws while it reads or writes a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars inside; a download from the hub is not done inside, and keeps its bar."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
