"""Silence for what transformers draws and reports while it reads or writes a folder."""

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


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """No warnings of transformers inside, for the caller looks at what they are about itself."""
    shown = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(shown)
