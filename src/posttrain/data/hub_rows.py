"""Rows of a data set on a hub, through the package ``datasets`` (the extra ``hub``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%-]*){0,2}")
_FILE = re.compile(r"\.(jsonl?|parquet|csv|tsv|arrow|txt|gz|zst|bz2|xz|zip|xlsx?|yaml|toml)$", re.I)
EXAMPLE = "openai/gsm8k:main:train"


def is_hub_id(text: str) -> bool:
    """Whether a text that names no file here may be a hub id: ``owner/name:config:split``.

    >>> [is_hub_id(text) for text in ("openai/gsm8k:main:train", "data/rows.jsonl", "rows")]
    [True, False, False]
    """
    return bool(_ID.fullmatch(text)) and not _FILE.search(text)


def split_hub_id(text: str) -> dict[str, Any]:
    """The data set, its configuration and its split, which is ``train`` unless it is named.

    >>> split_hub_id("openai/gsm8k:main:test")
    {'name': 'openai/gsm8k', 'config': 'main', 'split': 'test'}
    """
    name, *rest = text.split(":")
    if len(rest) == 1 and rest[0] in ("train", "test", "validation"):
        rest = ["", *rest]
    config, split = (*rest, "", "")[:2]
    return {"name": name, "config": config or None, "split": split or "train"}


def hub_rows(
    name: str, *, config: str | None = None, split: str = "train"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a split, streamed: what is not asked for is not downloaded."""
    try:
        import datasets
    except ImportError:
        raise FileNotFoundError(
            f"{name}: there is no such file or folder here; if it is a data set on a hub, that "
            "takes pip install 'posttrain[hub]'"
        ) from None
    try:
        found = datasets.load_dataset(name, config, split=split, streaming=True)
        yield from enumerate(found, start=1)
    except (OSError, ValueError, RuntimeError) as error:  # what is thrown offline, or not found
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"{name}: neither a file here nor a data set that the hub gave ({type(error).__name__}:"
            f" {why}); it is written owner/name:config:split, {EXAMPLE!r} say; offline, save it "
            "where there is a network (save_to_disk) and give the folder"
        ) from error
