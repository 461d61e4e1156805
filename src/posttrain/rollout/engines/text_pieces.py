"""The text of a sequence while it is sampled, in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.models.stops import Decode

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for a part of a character


class TextPieces:
    """Gives out the text of tokens as soon as it is certain.

    A character that takes several tokens comes with the last of them, and text that may be the
    beginning of a stop string waits until it is not. The pieces add up to the text of the whole,
    but where a tokenizer reads earlier tokens otherwise once an impossible one follows.

    >>> pieces = TextPieces(lambda codes: bytes(codes).decode(errors="replace"), stop=["Q:"])
    >>> [pieces.add(code) for code in "naïve Q".encode()]
    ['n', 'a', '', 'ï', 'v', 'e', ' ', '']
    >>> pieces.add(ord("!")), pieces.stopped
    ('Q!', False)
    >>> [pieces.add(code) for code in b"?Q:"], pieces.stopped, pieces.text
    (['?', '', ''], True, 'naïve Q!?')
    """

    def __init__(self, decode: Decode, *, stop: Sequence[str] = ()) -> None:
        self.text = ""
        """The text so far; what may be a stop string is in it, what was one is not."""
        self.stopped = False
        """Whether a stop string has come."""
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        # Tokens from `_start` are decoded together: a tokenizer may join the first of them to what
        # stands before. Text up to `_read` is taken.
        self._start, self._read, self._given = 0, 0, 0

    def add(self, token: int) -> str:
        """The text that is certain with one token more; often none, or that of several."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._read])
        whole = self._decode(self._tokens[self._start :])
        if len(whole) <= len(known) or whole.endswith(UNFINISHED):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        longest = max(map(len, self._stop), default=0)
        before = max(0, len(self.text) - longest)
        self.text += whole[len(known) :]
        found = [self.text.find(string, before) for string in self._stop]
        if any(place >= 0 for place in found):
            self.stopped = True
            self.text = self.text[: min(place for place in found if place >= 0)]
            return self._give(len(self.text))
        waiting = (n for n in range(min(longest, len(self.text)), 0, -1) if self._may_stop(n))
        return self._give(len(self.text) - next(waiting, 0))

    def end(self) -> str:
        """What was held back of a sequence that is over."""
        if not self.stopped:
            self.text = self._decode(self._tokens)
        return self._give(len(self.text))

    def _give(self, up_to: int) -> str:
        piece = self.text[self._given : up_to]
        self._given = max(self._given, up_to)
        return piece

    def _may_stop(self, length: int) -> bool:
        """Whether a stop string may begin with this many characters of the end."""
        return any(string.startswith(self.text[-length:]) for string in self._stop)
