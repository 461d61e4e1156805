"""Texts and settings without the folders of this machine: a path is told by its last part.

What is handed to others (answers over the network, a page, a card) tells so what a file was, and
neither where it lies nor who owns it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORD = r"[^\s'\"()\[\]{}<>,;]"  # a character of a path that stands in a text
_INSIDE = re.compile(rf"(?:\bfile://|(?<![\w.~/]))/(?!/){WORD}*/{WORD}+")  # of a word, like x=/a/b


def without_folders(text: str, *folders: str | Path) -> str:
    """A message with every file and folder of a machine as its last part.

    In the names of ``folders``, of the home and of the current folder there may be spaces.

    >>> without_folders("no /home/me/a.json, path=/home/me/b.json; see https://a.org/b/c, 1 / 2")
    'no a.json, path=b.json; see https://a.org/b/c, 1 / 2'
    """
    for folder in _known(folders):
        pattern = rf"(?<!\w){re.escape(folder)}{WORD}*"
        text = re.sub(pattern, lambda found: Path(found[0]).name, text)
    text = re.sub(f"{WORD}+", lambda found: _last_part(found[0]), text)
    return _INSIDE.sub(lambda found: Path(found[0]).name, text)


def settings_without_folders(value: Any) -> Any:
    """Settings with every path of a machine as its last part; a text with spaces may be one too."""
    if isinstance(value, Mapping):
        return {key: settings_without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [settings_without_folders(each) for each in value]
    if isinstance(value, str) and "/" in value and "\n" not in value and len(value) < 4096:
        path = Path(value)
        here = len(path.parts[0]) < 256 and path.exists()  # longer ones are no names of files
        if path.is_absolute() or value.startswith((".", "~")) or here:
            return path.name
        return without_folders(value)
    return value


def _last_part(word: str) -> str:
    """Of a word that is a path here, or an absolute one; other words as they are."""
    if "/" not in word and "\\" not in word:
        return word
    path = Path(word)
    try:
        here = path.expanduser().is_absolute() or path.expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a stranger's word that can be no path
        here = True
    return (path.name or word) if here else word


def _known(folders: tuple[str | Path, ...]) -> list[str]:
    """The home, the current folder and those given, the longest first."""
    found: set[Path] = set()
    for find in (Path.home, Path.cwd, *(Path(each).expanduser for each in folders)):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # there is none
            folder = find()
            if folder.exists():  # a hub id is no folder
                found |= {folder, folder.absolute(), folder.resolve()}
    return sorted((str(folder) for folder in found if folder.name), key=len, reverse=True)
