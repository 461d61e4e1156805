"""Characters that a tokenizer lacks: read as an unknown token, as another one, or not at all."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
