"""What libraries draw, report and patch beside their work, kept from those who did not ask."""

from __future__ import annotations

import contextlib
import logging as standard_logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging

_COMPILER = re.compile(r"torch[./](_dynamo|_inductor|_functorch|_subclasses|fx)\b")
_LOADING = threading.RLock()
compiler_remarks: list[str] = []  # of the run under way: what compiler_explained has told
# What PyTorch says (a part of it), and what that means here; {…} is filled in from its words.
_MEANINGS = {
    "recompile_limit": "PyTorch's compiler gives up on {function}: it was called in more ways than "
    "the compiler keeps apart (the last: {reason}). It runs uncompiled from here on: the same "
    "numbers, slower steps",
    "TensorFloat32 tensor cores": "float32 products are computed in full, not in TensorFloat32: "
    'exact, and slower than they could be; model.compute = "bfloat16" is the fast way',
    "does not support bfloat16 compilation": "this GPU cannot compile bfloat16 arithmetic, so that "
    "layers run uncompiled: the same numbers, slower steps",
}


@contextlib.contextmanager
def loading_alone() -> Iterator[None]:
    """No other thread loads a model meanwhile.

    While transformers loads one, it replaces methods of its classes (``tie_weights``), and two that
    overlap leave them replaced: every tied model after that would have a head of random memory.
    """
    with _LOADING:
        yield


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


@contextlib.contextmanager
def compiler_explained() -> Iterator[None]:
    """Inside, what PyTorch's compiler warns of is a warning in our words, each but once.

    Who sets ``TORCH_LOGS`` wants to read the compiler itself, and does.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    compiler_remarks.clear()

    def tell(text: str) -> None:
        sentence = compiler_sentence(text)
        if sentence not in compiler_remarks:
            compiler_remarks.append(sentence)
            warnings.warn(sentence, stacklevel=2)

    def keep(record: standard_logging.LogRecord) -> bool:
        if record.levelno != standard_logging.WARNING or not _COMPILER.match(record.name):
            return True  # an error whole, as it is
        tell(record.getMessage())
        return False

    def show(message: Warning | str, *given: Any, **more: Any) -> None:
        _, filename, *_ = given  # after its category
        if _COMPILER.search(Path(filename).as_posix()):
            tell(str(message))
        else:
            before(message, *given, **more)

    loggers = dict(standard_logging.root.manager.loggerDict)
    ours = [logger for name, logger in loggers.items() if name.startswith("torch")]
    # A placeholder for loggers to come has no handlers.
    shown = {handler for logger in ours for handler in getattr(logger, "handlers", ())}
    before: Any = warnings.showwarning
    setattr(warnings, "showwarning", show)  # noqa: B010 - its type names every parameter
    for handler in shown:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in shown:
            handler.removeFilter(keep)
        warnings.showwarning = before


def compiler_sentence(text: str) -> str:
    """What a warning of PyTorch's compiler means here; one that is not known as it is, in one line.

    >>> compiler_sentence("Online softmax is disabled on the fly\\nsince …")
    "PyTorch's compiler remarks: Online softmax is disabled on the fly since …"
    """
    words = {"function": r"function: (.+)", "reason": r"last reason: (?:\d+/\d+: )?(.+)"}
    found = {name: re.search(pattern, text) for name, pattern in words.items()}
    said = {name: match[1].strip() if match else "unknown" for name, match in found.items()}
    said["function"] = re.sub(r"[^ (]*/", "", said["function"])  # where torch is does not matter
    for mark, meaning in _MEANINGS.items():
        if mark in text:
            return meaning.format(**said)
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    return f"PyTorch's compiler remarks: {line}"
