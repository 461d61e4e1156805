"""Text that nobody vouches for (prompts, completions, names), made safe to show."""

from __future__ import annotations

import unicodedata

# Control and format characters (escape sequences, text that runs backwards), halves of characters,
# line and paragraph separators: each can change what a terminal shows of the rest.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str, *, limit: int | None = None) -> str:
    r"""One line of harmless characters; a text over ``limit`` loses its middle, not its end.

    Rich markup stays as it is: show the result in a ``rich.text.Text``, which knows none.

    >>> printable("a\x1b[2Jb\nc")
    'a\\x1b[2Jb\\nc'
    >>> printable("0123456789", limit=7)
    '012…789'
    """
    if limit is not None and len(text) > limit:
        head = limit // 2
        text = f"{text[:head]}…{text[len(text) - (limit - head - 1) :]}" if limit > 1 else "…"
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
