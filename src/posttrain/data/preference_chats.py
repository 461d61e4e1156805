"""Where the prompt ends and the answers begin, in pairs that do not say so."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from itertools import takewhile
from typing import Any

from posttrain.data.row_checks import check_messages

_SPEAKERS = {"Human": "user", "Assistant": "assistant", "System": "system"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant|System):[ ]?")
BOTH = ("chosen", "rejected")
# Letters and the marks on them, by their Unicode categories; those of many scripts have no case.
_WITH_CASE = {"Lu", "Ll", "Lt", "Lm", "Mn", "Mc", "Me"}
_LETTERS = {"Lo", *_WITH_CASE}
_JOINTS = {".": ",", ",": ",", "'": "'", "’": "'"}
_JOINED = re.compile(r".[wd][wd].|.w'w|w'w.|.d,d|d,d.")  # the place is the middle of four


def divided(row: dict[str, Any], *, where: str) -> dict[str, Any]:
    """A row of preferences whose pair, if it is one, is a prompt and two texts.

    ``chosen`` and ``rejected`` may be chats that begin with the prompt, or that answer one beside
    them (TRL, UltraFeedback); or texts with a common beginning, transcripts of Human and Assistant
    (HH-RLHF) or plain ones.
    """
    if not any(isinstance(row.get(column), list) for column in BOTH):
        texts = [text for text in map(row.get, BOTH) if isinstance(text, str)]
        if "prompt" in row or "messages" in row or len(texts) < len(BOTH):
            return row
        return {**row, **_texts(texts, where=where)}
    chats = []
    for column in BOTH:
        if not isinstance(row.get(column), list):
            raise ValueError(f"{where}: {column!r} is not there or no chat; write both alike")
        chats.append(list(check_messages(row[column], where=f"{where}: {column!r}")))
    rest = {key: value for key, value in row.items() if key not in (*BOTH, "prompt", "messages")}
    return {**rest, **_chats(chats, row, where=where)}


def _chats(chats: list[Any], row: dict[str, Any], *, where: str) -> dict[str, Any]:
    shared = 0  # the last message is never shared: equal chats would leave no completion
    while shared < min(map(len, chats)) - 1 and chats[0][shared] == chats[1][shared]:
        shared += 1
    before = _before(row, chats[0], shared=shared, where=where)
    ends = [[message["role"] for message in chat[shared:]] for chat in chats]
    if not before or ends != [["assistant"], ["assistant"]]:
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' begin with {shared} shared messages, then come the "
            f"messages of {'+'.join(ends[0])} and of {'+'.join(ends[1])}; they must share the "
            "whole prompt, or have it in 'prompt', and then each end with exactly one message, the "
            "assistant's"
        )
    answers = {column: chat[-1]["content"] for column, chat in zip(BOTH, chats, strict=True)}
    return {"messages": before, **answers}


def _before(row: dict[str, Any], chat: list[Any], *, shared: int, where: str) -> list[Any]:
    """The messages of the prompt: those that both chats begin with, else the row's own."""
    given = row.get("messages")
    if given is None and "prompt" in row:
        given = [{"role": "user", "content": row["prompt"]}]
    if given is None:
        return chat[:shared]
    prompt = list(check_messages(given, where=f"{where}: 'prompt'"))
    if not shared:
        return prompt
    # What stands beside the chats is their beginning, all of one (UltraFeedback), or a question.
    last = prompt[-1]["content"]
    if prompt not in (chat[: len(prompt)], chat) and last not in [m["content"] for m in chat]:
        raise ValueError(
            f"{where}: 'prompt' is not what 'chosen' and 'rejected' begin with; remove it, or let "
            "them hold the answer alone"
        )
    return chat[:shared]


def _texts(texts: list[str], *, where: str) -> dict[str, Any]:
    """The prompt and the answers of two texts with a common beginning; nothing without one.

    The prompt is all that both begin with, less a space at its end, as in TRL; no word is split.
    """
    turns = [_transcript(text) for text in texts]
    if all(turns):
        return _chats(turns, {}, where=where)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    common = "".join(one for one, _ in same)
    longest = min(len(common), *(len(text.rstrip()) - 1 for text in texts))  # no answer is empty
    for words in (_LETTERS, _WITH_CASE):  # a script without spaces has few places between words
        cut = longest
        while cut > 0 and any(_goes_on(text, cut, words=words) for text in texts):
            cut -= 1
        cut -= common[:cut].endswith(" ")
        if common[: max(cut, 0)].strip():
            answers = {column: text[cut:] for column, text in zip(BOTH, texts, strict=True)}
            return {"prompt": common[:cut], **answers}
    return {}


def _goes_on(text: str, cut: int, *, words: Collection[str]) -> bool:
    """Whether a word or a number, like ``can't`` and ``3.50``, stands on both sides of a place.

    >>> [cut for cut in range(1, 9) if _goes_on("a 3.50=x", cut, words=_LETTERS)]
    [3, 4, 5]
    """
    near = text[max(0, cut - 2) : cut].rjust(2) + text[cut : cut + 2].ljust(2)
    return _JOINED.fullmatch("".join(_kind(char, words) for char in near)) is not None


def _kind(char: str, words: Collection[str]) -> str:
    category = unicodedata.category(char)
    known = "d" if category[0] == "N" else "w" if category in words else " "
    return _JOINTS.get(char, known)


def _transcript(text: str) -> list[dict[str, str]]:
    """The turns of a text like ``Human: … Assistant: …``; none where it is no such text.

    >>> _transcript("\\n\\nHuman: 2+3?\\n\\nAssistant: 5")
    [{'role': 'user', 'content': '2+3?'}, {'role': 'assistant', 'content': '5'}]
    """
    before, *parts = _TURN.split(text)
    if before.strip() or len(parts) < 4:
        return []
    said = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _SPEAKERS[who], "content": what.strip()} for who, what in said]
