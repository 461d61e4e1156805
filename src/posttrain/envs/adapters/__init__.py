"""Environments of other libraries, one file each: a library is imported when it is played."""

import importlib
from typing import Any


def need(name: str, module: str = "") -> Any:
    """A library that an extra of its name brings, or a module of it."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        mend = f"{name} is not installed; run: pip install 'posttrain[{name}]'"
        raise ImportError(f"env {name!r}: {mend}") from error
