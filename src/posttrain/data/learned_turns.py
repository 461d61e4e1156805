"""What of a conversation is learned: each turn behind the very prompt that will ask for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from posttrain.data.chats import Chat
from posttrain.data.tool_formats import Message

LearnedPart = Literal["assistant", "last", "all"]
LearnedRow = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and which of them are learned."""
Write = Callable[[Sequence[Message], bool], str]
"""The text of a chat; with True, up to where the assistant is to reply."""


def asked_for(chat: Sequence[Any], learn: LearnedPart) -> list[Chat]:
    """The chats that a template writes for :func:`conversation_rows`."""
    answers = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("messages: no assistant turn, so there is nothing to learn from")
    if learn == "all":
        return [(chat, False)]
    chosen = answers if learn == "assistant" else answers[-1:]
    return [each for at in chosen for each in ((chat[:at], True), (chat[: at + 1], False))]


def conversation_rows(
    chat: Sequence[Message],
    *,
    write: Write,
    encode: Callable[[str], tuple[int, ...]],
    end_tokens: Collection[int],
    learn: LearnedPart = "assistant",
) -> list[LearnedRow]:
    """The tokens of a conversation, and a mask that is True on what is learned of them.

    An assistant turn is what the template adds to the prompt before it, up to its end token: so a
    turn is learned from the very tokens that will stand there when it is asked for. Where a
    template writes the beginning differently once more follows (Qwen3 leaves out old thoughts),
    another row begins: still every turn is learned once, behind the prompt that it will have.
    "last" learns the last turn alone, "all" every token as it stands.
    """
    if learn == "all":
        tokens = encode(whole_text(chat, write))
        return [(tokens, learned_whole(tokens))]
    rows: list[LearnedRow] = []
    text, row, mask = "", list[int](), list[bool]()  # of the row that is being written
    parts = iter(asked_for(chat, learn))
    for asked, answered in zip(parts, parts, strict=True):
        prompt, added = _turn_texts(asked, answered, write=write)
        if not prompt.startswith(text):
            rows.append((tuple(row), tuple(mask)))
            text, row, mask = "", [], []
        before, turn = encode(prompt[len(text) :]), encode(added)
        length = _length_to_end(turn, end_tokens)
        row += [*before, *turn]
        mask += [False] * len(before) + [place < length for place in range(len(turn))]
        text = prompt + added
    return [*rows, (tuple(row), tuple(mask))]


def learned_whole(tokens: Sequence[int]) -> tuple[bool, ...]:
    """The mask of a row that is learned whole: all but its first token, which nothing predicts."""
    return tuple(place > 0 for place in range(len(tokens)))


def pieces(tokens: Sequence[int], most: int | None) -> list[LearnedRow]:
    """A text to learn whole in rows of at most so many tokens; every token but one is learned once.

    Each row begins with the last token of the one before, which nothing in it predicts.

    >>> pieces((5, 6, 7, 8, 9), 3)
    [((5, 6, 7), (False, True, True)), ((7, 8, 9), (False, True, True))]
    """
    size = len(tokens) if most is None else max(2, most)
    starts = range(0, max(1, len(tokens) - 1), max(1, size - 1))
    rows = [tuple(tokens[start : start + size]) for start in starts]
    return [(row, learned_whole(row)) for row in rows]


def whole_text(chat: Sequence[Message], write: Write) -> str:
    """The text of a conversation; the system's message stands in the last prompt, if only there."""
    text = write(chat, False)
    lost = chat[0]["role"] == "system" and chat[0]["content"].strip() not in text
    if not lost or chat[-1]["role"] != "assistant":
        return text
    return "".join(_turn_texts((chat[:-1], True), (chat, False), write=write))


def _turn_texts(asked: Chat, answered: Chat, *, write: Write) -> tuple[str, str]:
    """A prompt, and what an answer adds to it: a chat that is answered must begin with its prompt.

    Mistral's templates write the system's message into the last turn, and only if that is the
    user's: there the answer is what it adds without one.
    """
    prompt, text = write(*asked), write(*answered)
    without = [message for message in answered[0] if message["role"] != "system"]
    start = prompt
    if not text.startswith(prompt) and len(without) < len(answered[0]):
        start, text = write(without[:-1], True), write(without, False)
    if not text.startswith(start):
        raise ValueError(
            "chat: the chat template writes a prompt differently once it is answered, so the "
            "answer cannot be learned as it will be asked for; change the template: "
            f"{prompt[-40:]!r} is no longer there"
        )
    return prompt, text[len(start) :]


def _length_to_end(turn: Sequence[int], end_tokens: Collection[int]) -> int:
    """How many tokens of a turn the assistant wrote; a template's newline after it is not."""
    ends = [index for index, token in enumerate(turn) if token in end_tokens]
    if not ends:
        raise ValueError(
            "chat: the chat template puts no end token after an assistant's turn, so the "
            "model would never learn to stop; pass the policy's end_tokens, or change it"
        )
    return ends[-1] + 1
