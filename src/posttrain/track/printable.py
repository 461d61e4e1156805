"""Untrusted text (prompts, completions, names), made safe to show."""

from __future__ import annotations

import re
import shlex
import unicodedata

# Control and format characters (escape sequences, text that runs backwards), halves of characters,
# line and paragraph separators: each can change what a terminal shows of the rest.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# A word that means itself to every shell, wherever it stands; zsh looks up "=name" as a command.
_PLAIN_WORD = re.compile(r"(?!=)[A-Za-z0-9_@%+=:,./-]+")
MARKS = {"pass": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}
"""How a verdict is marked in a terminal, and its style."""
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'", "!": r"\x21"}


def printable(text: str, *, limit: int | None = None) -> str:
    r"""One line of harmless characters; a text over ``limit`` loses its middle, not its end.

    Rich markup stays as it is: :class:`posttrain.track.safe_terminal.Terminal` knows none.

    >>> printable("a\x1b[2Jb\nc")
    'a\\x1b[2Jb\\nc'
    >>> printable("0123456789", limit=7)
    '012…789'
    """
    if limit is not None and len(text) > limit:
        head = limit // 2
        text = f"{text[:head]}…{text[len(text) - (limit - head - 1) :]}" if limit > 1 else "…"
    return "".join(_visible(character) for character in text)


def counted(number: int, noun: str) -> str:
    """A number of things, in words.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def harmless(text: str) -> str:
    r"""The lines of a text, each of harmless characters.

    >>> harmless("one\ntwo\x1b[2J")
    'one\ntwo\\x1b[2J'
    """
    return "\n".join(printable(line) for line in text.split("\n"))


def command_line(*arguments: object) -> str:
    r"""One line that bash and zsh take apart into these very arguments, however it is copied.

    What a terminal would not show, or not give back, is written out as bytes: ``$'…'``.

    >>> print(command_line("posttrain", "generate", "my model", "2+3=\n"))
    posttrain generate 'my model' $'2+3=\n'
    """
    return " ".join(_word(str(argument)) for argument in arguments)


def _word(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"no command line can hold a NUL character: {printable(text, limit=60)}")
    if _PLAIN_WORD.fullmatch(text):
        return text
    if not any(_is_lost(character) for character in text):
        quoted = shlex.quote(text)
        return f"'{text}'" if quoted == text else quoted
    return "$'" + "".join(_escaped(character) for character in text) + "'"


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if not _is_lost(character):
        return character
    # The bytes of a file name that is not UTF-8 come back as they were (PEP 383).
    how = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", how))


def _is_lost(character: str) -> bool:
    """Whether copying from a terminal may lose or change it: what acts, and spaces of all kinds."""
    kind = unicodedata.category(character)
    return kind in _HIDDEN or (kind == "Zs" and character != " ")


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
