"""Stop strings: where the text of a sequence says that it is over."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def cut_at_stop(
    tokens: Sequence[int], decode: Decode, *, stop: Sequence[str]
) -> tuple[int, str] | None:
    """How many tokens it takes to complete a stop string, and the text before it; None if none.

    Tokens are counted by the text of those up to each: a string may begin within one token and end
    in another, and a character may take several.

    >>> cut_at_stop([72, 105, 81, 58, 32], lambda codes: bytes(codes).decode(), stop=["Q:"])
    (4, 'Hi')
    """
    if not _holds(decode(tokens), stop):
        return None
    count = bisect.bisect_left(
        range(len(tokens) + 1), True, key=lambda number: _holds(decode(tokens[:number]), stop)
    )
    text = decode(tokens[:count])
    return count, text[: min(text.find(string) for string in stop if string in text)]


def tail_length(stop: Sequence[str], *, new: int) -> int:
    """Tokens at the end of a sequence that hold every stop string its ``new`` ones complete."""
    return new + max(len(string.encode()) for string in stop)  # a token spells a byte or more


def may_have_stopped(tail: Sequence[int], decode: Decode, *, stop: Sequence[str]) -> bool:
    """Whether the end of a sequence looks as if it held a stop string: :func:`cut_at_stop` knows.

    The first characters may read otherwise than within the whole.
    """
    return _holds(decode(tail), stop)


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(string in text for string in stop)
