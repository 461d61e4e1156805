"""Control tokens, and text in data that spells one: it is encoded as text, never as the token.

``<|im_end|>`` in a question would end the user's turn, and what follows could speak as the system.
So every control token that data spells is read as the text it is written with, while those that
the chat template writes stay. Every other token is the one that the whole text gives.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"</?\w+>")  # <think>, </tool_call>: words that models write and data quotes
_PRIVATE = range(0x100000, 0x10FFFE)  # characters that Unicode gives no meaning

Hidden = Mapping[str, str]  # a stand-in, and the character that it stands for


class ControlTokens:
    """The control tokens of a tokenizer: its special ones, and those that open or end turns.

    ``written`` is what its chat template writes around messages: some tokenizers (DeepSeek's) do
    not declare the tokens of the roles as special. Without ``as_text`` data may spell them, and
    they are the tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_tokens: Collection[int] = (),
        written: str = "",
        as_text: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self.as_text = as_text
        special = {*tokenizer.all_special_ids, *end_tokens}
        self._texts: dict[int, str] = {}
        unmarked, normalised = may_open(tokenizer), False
        for index, token in tokenizer.added_tokens_decoder.items():
            content = token.content
            opens = content in written and content in unmarked
            if token.special or index in special or opens:
                self._texts[index] = content
                normalised = normalised or token.normalized
        longest_first = sorted(self._texts.values(), key=len, reverse=True)
        spelled = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._pattern = re.compile(spelled)
        self._starts = re.compile(f"(?=({spelled}))")  # lookahead: finds overlapping tokens too
        self._firsts = {text[0] for text in longest_first}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer that normalises text before it looks for added tokens finds other spellings,
        # too.
        self._normalised = normalised and getattr(backend, "normalizer", None) is not None

    def spelled(self, text: str) -> set[str]:
        """The control tokens that a text spells."""
        return {found[1] for found in self._found(text)}

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        # A quick test: most texts hold no first character of any control token.
        return iter(()) if self._firsts.isdisjoint(text) else self._starts.finditer(text)

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Hidden]:
        """The messages with a stand-in for the first character of each control token they spell.

        All texts are searched as one: a template may write two messages side by side.
        """
        roles = [message["role"] for message in messages]
        bodies = [{n: v for n, v in message.items() if n != "role"} for message in messages]
        texts = list(_texts(bodies))
        joined = "".join(texts)
        starts = self._data_starts(joined)
        if not starts:
            return [dict(message) for message in messages], {}
        free = (chr(code) for code in _PRIVATE if chr(code) not in joined)
        stand_ins = {first: next(free) for first in dict.fromkeys(joined[p] for p in starts)}
        characters = list(joined)
        for place in starts:
            characters[place] = stand_ins[characters[place]]
        rest = iter(characters)
        replaced = iter(["".join(next(rest) for _ in text) for text in texts])
        hidden = {stand_in: first for first, stand_in in stand_ins.items()}
        bodies = _with_texts(bodies, replaced)
        return [{"role": role, **b} for role, b in zip(roles, bodies, strict=True)], hidden

    def encode(self, text: str, hidden: Hidden | None = None) -> tuple[int, ...]:
        """The tokens of a text, in which stand-ins mark data; without ``hidden``, all is data."""
        if hidden is None:
            starts = self._data_starts(text)
        else:
            starts = {place for place, character in enumerate(text) if character in hidden}
            text = shown(text, hidden)
        if not starts:
            return tuple(self._plain(text).input_ids)
        self._need_fast(text, starts)
        encoded = self._plain(text, return_offsets_mapping=True)
        tokens: list[int] = []
        for token, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
            if token in self._texts and not starts.isdisjoint(range(start, end)):
                tokens += self._as_text(text[start:end], token)
            else:
                tokens.append(token)
        self._check_kept(tokens, text, starts=starts)
        return tuple(tokens)

    def encode_pair(self, first: str, second: str) -> tuple[int, ...]:
        """The tokens of two texts as an encoder reads them, with what its tokenizer puts around."""
        if not (self._data_starts(first) or self._data_starts(second)):
            return tuple(self._tokenizer(first, second).input_ids)
        self._need_fast(first + second, self._data_starts(first + second))
        encoded = self._tokenizer(first, second, return_offsets_mapping=True)
        tokens: list[int] = []
        spans = zip(encoded.sequence_ids(), encoded.offset_mapping, strict=True)
        for token, (side, (start, end)) in zip(encoded.input_ids, spans, strict=True):
            text = "" if side is None else (first, second)[side][start:end]
            data = token in self._texts and text and self._data_starts(text)
            tokens += self._as_text(text, token) if data else [token]
        return tuple(tokens)

    def _data_starts(self, text: str) -> set[int]:
        """Where data would become a control token: the index of its first character."""
        if not self.as_text:
            return set()
        starts = {found.start() for found in self._found(text)}
        if self._normalised and self._tokenizer.is_fast:
            encoded = self._plain(text, return_offsets_mapping=True)
            spans = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
            unknown = self._tokenizer.unk_token_id
            starts |= {a for token, (a, _) in spans if token in self._texts and token != unknown}
        return starts

    def _plain(self, text: str, **options: Any) -> Any:
        # No warning about length: rows that are too long are dropped and counted by the caller.
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _as_text(self, text: str, token: int) -> list[int]:
        """The tokens of a control token's spelling, without looking for added tokens in it."""
        control = self._texts.keys() - {self._tokenizer.unk_token_id}
        for parts in ([text], list(text)):  # the whole text may be one ordinary token
            found = [index for part in parts for index in self._pieces(part)]
            if control.isdisjoint(found):
                return found
        raise ValueError(
            f"special tokens: this tokenizer has no other tokens for {self._texts[token]!r}, which "
            "the data contains; remove it there"
        )

    def _pieces(self, text: str) -> list[int]:
        # After a newline, because some tokenizers put a space before the first word of a text.
        before, both = self._untouched("\n"), self._untouched("\n" + text)
        whole = both[: len(before)] == before
        return both[len(before) :] if whole else self._untouched(text)

    def _untouched(self, text: str) -> list[int]:
        """Encode as a tokenizer does between added tokens: normalise, split into words, look up."""
        backend: Any = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    def _check_kept(self, tokens: Sequence[int], text: str, *, starts: set[int]) -> None:
        """Raise unless the control tokens that remain are exactly those that the template wrote."""
        unknown = self._tokenizer.unk_token_id
        kept = sum(token in self._texts and token != unknown for token in tokens)
        own = "".join("\0" if n in starts else c for n, c in enumerate(text))
        ours = [found[0] for found in self._pattern.finditer(own)]
        wrote = sum(spelling != self._texts.get(unknown) for spelling in ours)
        if kept != wrote:
            raise ValueError(
                f"special tokens: the data contains {self._texts_at(text, starts)}, and with this "
                "tokenizer it cannot be told from what the chat template writes; remove it there"
            )

    def _need_fast(self, text: str, starts: set[int]) -> None:
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"special tokens: the data contains {self._texts_at(text, starts)}, and this "
                "tokenizer (it is not a fast one) cannot read that as text; remove it there"
            )

    def _texts_at(self, text: str, starts: set[int]) -> str:
        found = self._starts.match(text, min(starts))
        return repr(found[1] if found else text[min(starts) :][:20])


def may_open(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Added tokens that are not declared as special, and may yet be those of roles."""
    contents = [t.content for t in tokenizer.added_tokens_decoder.values() if not t.special]
    return {text for text in contents if text.strip() and not _TAG.fullmatch(text)}


def shown(text: str, hidden: Hidden) -> str:
    """A text with every stand-in replaced by the character that it stands for."""
    return (
        text.translate({ord(stand_in): first for stand_in, first in hidden.items()})
        if hidden
        else text
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    """The value with its texts replaced, in the order of :func:`_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        return {name: _with_texts(inner, texts) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(inner, texts) for inner in value]
    return value
