"""Tokens as text: of each in a sequence, and the characters that a tokenizer does not give back."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_NAME = "tokenizer.json"
_UNFINISHED = "\ufffd"  # what a part of a character decodes to


class TokenTexts:
    """Token ids to texts, by a ``tokenizer.json``: data, of which nothing is run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, known in added.items() if known.special)

    @classmethod
    def read(cls, path: Path) -> TokenTexts:
        """Read a ``tokenizer.json``."""
        return cls(Tokenizer.from_file(str(path)))

    def split(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text; of a character's several tokens the last has it.

        >>> from tokenizers.models import WordLevel
        >>> TokenTexts(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))).split([1, 0])
        ['b', ' a']
        """
        texts: list[str] = []
        start = done = 0  # decoded from ``start`` on, of which what is before ``done`` was given
        for end in range(1, len(tokens) + 1):
            text = self._decode(tokens[start:end])
            if text.endswith(_UNFINISHED) and end < len(tokens):
                texts.append("")
                continue
            texts.append(text[len(self._decode(tokens[start:done])) :])
            start, done = done, end
        return texts

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def tokenizer_json(tokenizer: Any) -> str:
    """The ``tokenizer.json`` of a tokenizer of transformers; empty where it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else str(backend.to_str())


def lost_characters(
    tokenizer: PreTrainedTokenizerBase, characters: Collection[str]
) -> dict[str, str]:
    """The characters that do not come back from their tokens, each with what comes in its place.

    Compatible forms are the same: a tokenizer may well read ``ﬁ`` as ``fi``.
    """
    known = [border for border in ("a", "0", "") if _read(tokenizer, [border]) == [border]]
    border = known[0] if known else ""  # around the text: some tokenizers strip the ends
    asked = sorted(characters)
    texts = [f"{border}{character}{border}" for character in asked]
    found = zip(asked, texts, _read(tokenizer, texts), strict=True)
    return {
        character: read.removeprefix(border).removesuffix(border)
        for character, text, read in found
        if _form(read) != _form(text)
    }


def _read(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[str]:
    """Texts as they come back from their tokens."""
    if not texts:
        return []
    rows = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return [tokenizer.decode(row, **options) for row in rows]


def _form(text: str) -> str:
    return unicodedata.normalize("NFKC", text).strip()
