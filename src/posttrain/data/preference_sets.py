"""Preferences for a reward model, from JSONL: pairs, ranked sets, or completions with scores."""

from __future__ import annotations

import itertools
import json
import random
import sys
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.sources import check_messages, check_text, read_numbered

PAIRS, SETS, LABELS = "pairs", "ranked sets", "labelled completions"
# The columns that identify the kind of a row.
KINDS = {"chosen": PAIRS, "rejected": PAIRS, "ranked": SETS, "completion": LABELS, "score": LABELS}

Row = Mapping[str, Any]
Messages = tuple[Mapping[str, str], ...]
Label = tuple[dict[str, Any], str, float]  # a prompt, its completion and the score
Note = tuple[int, str]  # a count, and the text after it: "of 9 rows …"; a warning unless 0


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Completions of one prompt, best first; ``margin`` is by how much (0: not given).

    The prompt is text, or ``messages`` that end with the user's or a tool's; ``prompt`` is then "".

    >>> Ranked(prompt="2+3=", completions=("5", "6")).margin
    0.0
    """

    prompt: str
    messages: Messages = ()
    completions: tuple[str, ...]
    margin: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.prompt.strip()) == bool(self.messages):
            raise ValueError("prompt: give either text or messages, and not both")
        if self.messages:
            _check_chat([dict(message) for message in self.messages], where="messages")
        if len(self.completions) < 2:
            raise ValueError(
                f"completions: a preference is between at least 2, got {len(self.completions)}; "
                "add what the best is better than, or remove it"
            )
        places: dict[str, int] = {}
        for place, text in enumerate(self.completions, start=1):
            check_text({f"number {place}": text}, f"number {place}", where="completions")
            if (earlier := places.setdefault(text.strip(), place)) != place:
                raise ValueError(
                    f"completions: number {earlier} and number {place}, the best being number 1, "
                    "are the same text but for white space, so neither is better; mend one"
                )
        if not _is_number(self.margin) or self.margin < 0:
            raise ValueError(
                f"margin: must be a number of at least 0, got {self.margin!r:.60}; leave it out "
                "where it is not known"
            )
        object.__setattr__(self, "margin", float(self.margin))


def read_preferences(
    path: str | Path, *, max_pairs_per_prompt: int = 16, seed: int = 0
) -> list[Ranked]:
    """The preferences of a JSONL file, whose rows are all of one kind.

    Each has ``prompt``, or ``messages`` for a chat, and beside it

    1. ``chosen`` and ``rejected``, or
    2. ``ranked``, a list with the best first, or
    3. ``completion`` and ``score``: a better and a worse completion of a prompt make a pair, at
       most ``max_pairs_per_prompt`` of them, drawn with ``seed``. Equal scores make none.

    The first two may have a ``margin``; the third has none, as scores have no common scale.
    ``chosen`` and ``rejected`` may be chats that begin with the prompt and differ in the last
    message alone. Rows that repeat or contradict another are kept, and reported in a warning.
    """
    if max_pairs_per_prompt < 1:
        raise ValueError(f"max_pairs_per_prompt: must be at least 1, got {max_pairs_per_prompt}")
    rows = [(f"{path}:{number}", row) for number, row in read_numbered(path)]
    kind = _common_kind(rows)
    if kind == LABELS:
        labels = [_label(row, where=where) for where, row in rows]
        identities: list[Hashable] = [(_key(**prompt), *rest) for prompt, *rest in labels]
        sets, notes = _compare(labels, limit=max_pairs_per_prompt, seed=seed)
    else:
        read = _pair if kind == PAIRS else _ranked
        sets, notes = [read(row, where=where) for where, row in rows], []
        identities = [(_key(s.prompt, s.messages), s.completions, s.margin) for s in sets]
    if not sets:
        raise ValueError(
            f"{path}: no prompt has two different completions with different scores, so there is "
            "no preference; score more completions of each prompt"
        )
    for number, text in (_repeats(identities, rows), *notes, _contradictions(sets)):
        if number:
            warnings.warn(f"{path}: {number} {text}", stacklevel=2)
    return sets


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """One completion of a prompt, text or ``messages``, and whether it is ``desirable``."""

    prompt: str
    messages: Messages = ()
    completion: str
    desirable: bool

    @property
    def completions(self) -> tuple[str, ...]:
        """It alone, as a set has them."""
        return (self.completion,)


def read_labelled(path: str | Path) -> list[Labelled]:
    """Completions that are desirable or not, of a JSONL file.

    Its rows have ``prompt`` or ``messages``, ``completion`` and a ``label``, true or false; or they
    are those of :func:`read_preferences`: of a pair the first is desirable and the second is not,
    of a ranked set those above the middle, and those below it.
    """
    return [
        row
        for found in read_compared(path)
        for row in ([found] if isinstance(found, Labelled) else _halves(found))
    ]


def read_compared(path: str | Path) -> Sequence[Ranked | Labelled]:
    """The rows of a file of labels, or the sets of one of preferences."""
    rows = [(f"{path}:{number}", row) for number, row in read_numbered(path)]
    if any("label" in row for _, row in rows):
        return [_labelled(row, where=where) for where, row in rows]
    return read_preferences(path)


def _halves(s: Ranked) -> list[Labelled]:
    middle = (len(s.completions) - 1) / 2
    return [
        Labelled(prompt=s.prompt, messages=s.messages, completion=text, desirable=place < middle)
        for place, text in enumerate(s.completions)
        if place != middle
    ]


def _labelled(row: Row, *, where: str) -> Labelled:
    label = row.get("label")
    if label not in (True, False):  # 1 and 0, too: tables often have them
        fault = f"must be true or false, got {label!r:.60}" if "label" in row else "is not there"
        raise ValueError(f"{where}: 'label' {fault}; write true where the completion is desirable")
    text = check_text(row, "completion", where=where)
    return Labelled(**_prompt(row, where=where), completion=text, desirable=bool(label))


def write_preferences(path: str | Path, sets: Sequence[Ranked]) -> None:
    """Write ranked sets as JSONL, which ``read_preferences`` reads back as they were."""
    if not sets:
        raise ValueError(f"{path}: there are no preferences to write; give at least one")
    lines = []
    for ranked in sets:
        chat = [dict(message) for message in ranked.messages]
        prompt = {"messages": chat} if chat else {"prompt": ranked.prompt}
        row = {**prompt, "ranked": ranked.completions, "margin": ranked.margin}
        lines.append(json.dumps(row) + "\n")
    Path(path).write_bytes("".join(lines).encode())


def _common_kind(rows: Sequence[tuple[str, Row]]) -> str:
    """The kind that all rows are of."""
    first = common = ""
    for where, row in rows:
        kinds = list(dict.fromkeys(KINDS[column] for column in KINDS if column in row))
        if len(kinds) != 1:
            raise ValueError(
                f"{where}: the row has columns of {' and of '.join(kinds) or 'no kind'}; give it "
                "'chosen' and 'rejected', or 'ranked', or 'completion' and 'score'"
            )
        if common not in ("", kinds[0]):
            raise ValueError(f"{where}: of {kinds[0]}, but {first} is of {common}; split the file")
        first, common = first or where, kinds[0]
    return common


def _prompt(row: Row, *, where: str) -> dict[str, Any]:
    if "messages" not in row:
        if isinstance(row.get("prompt"), list):
            raise ValueError(f"{where}: 'prompt' is a list; if it is a chat, call it 'messages'")
        return {"prompt": check_text(row, "prompt", where=where), "messages": ()}
    if "prompt" in row:
        raise ValueError(f"{where}: the row has both 'prompt' and 'messages'; remove one")
    return {"prompt": "", "messages": _check_chat(row["messages"], where=where)}


def _check_chat(messages: Any, *, where: str) -> Messages:
    checked = check_messages(messages, where=where)
    if checked[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"{where}: the last message is the {checked[-1]['role']}'s; a prompt ends with the "
            "user's or a tool's message, and what the assistant says next is a completion"
        )
    return checked


def _pair(row: Row, *, where: str) -> Ranked:
    if isinstance(row.get("chosen"), list) or isinstance(row.get("rejected"), list):
        prompt, texts = _divide(row, where=where)
    else:
        prompt = _prompt(row, where=where)
        texts = [check_text(row, column, where=where) for column in ("chosen", "rejected")]
    return _make(row, where=where, **prompt, completions=tuple(texts))


def _divide(row: Row, *, where: str) -> tuple[dict[str, Any], list[str]]:
    """The prompt with which two chats begin, and the message with which each ends."""
    if twice := [column for column in ("prompt", "messages") if column in row]:
        raise ValueError(
            f"{where}: {twice[0]!r} beside 'chosen' and 'rejected' that are chats; let the chats "
            "begin with the prompt and remove it, or write 'chosen' and 'rejected' as text"
        )
    chats = []
    for column in ("chosen", "rejected"):
        if not isinstance(row.get(column), list):
            raise ValueError(f"{where}: {column!r} is not there or no chat; write both alike")
        chats.append(check_messages(row[column], where=f"{where}: {column!r}"))
    shared = 0  # the last message is never shared: equal chats would leave no completion
    while shared < min(map(len, chats)) - 1 and chats[0][shared] == chats[1][shared]:
        shared += 1
    ends = [[message["role"] for message in chat[shared:]] for chat in chats]
    if not shared or ends != [["assistant"], ["assistant"]]:
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' begin with {shared} shared messages, then come the "
            f"messages of {'+'.join(ends[0])} and of {'+'.join(ends[1])}; they must share the "
            "whole prompt, and then each end with exactly one message, the assistant's"
        )
    return {"prompt": "", "messages": chats[0][:shared]}, [chat[-1]["content"] for chat in chats]


def _ranked(row: Row, *, where: str) -> Ranked:
    if not isinstance(row["ranked"], list):
        raise ValueError(f"{where}: 'ranked' must be a list of texts, the best first; put it in []")
    return _make(row, where=where, **_prompt(row, where=where), completions=tuple(row["ranked"]))


def _make(row: Row, *, where: str, **fields: Any) -> Ranked:
    try:
        return Ranked(**fields, margin=row.get("margin", 0.0))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _label(row: Row, *, where: str) -> Label:
    score: Any = row.get("score")
    if not isinstance(score, bool) and not _is_number(score):
        fault = f"must be a number, got {score!r:.60}" if "score" in row else "is not there"
        fix = "write a number, true or false"
        if "label" in row and "score" not in row:
            fix = 'rows with a label are for dpo.loss = "kto"'
        raise ValueError(f"{where}: 'score' {fault}; {fix}")
    if "margin" in row:
        raise ValueError(f"{where}: 'margin' is a pair's, and this row is none; remove it")
    return _prompt(row, where=where), check_text(row, "completion", where=where), float(score)


def _compare(labels: Sequence[Label], *, limit: int, seed: int) -> tuple[list[Ranked], list[Note]]:
    """Every pair that scores decide, at most ``limit`` of a prompt, and what to warn of."""
    groups: dict[Hashable, list[Label]] = {}
    for label in labels:
        groups.setdefault(_key(**label[0]), []).append(label)
    sets: list[Ranked] = []
    num_without = num_more = 0
    for key, group in groups.items():
        pairs = [
            (one, two) if score > other else (two, one)
            for (_, one, score), (_, two, other) in itertools.combinations(group, 2)
            if score != other and one.strip() != two.strip()
        ]
        num_without += not pairs
        if len(pairs) > limit:
            num_more += 1
            # A generator for each prompt, so that rows of other prompts do not change its draws.
            random.Random(f"{seed} {key}").shuffle(pairs)
        sets += [Ranked(**group[0][0], completions=pair) for pair in pairs[:limit]]
    without = "are left without a pair: no two of their completions differ in text and in score"
    more = f"have more than {limit} pairs, of which {limit} are drawn (max_pairs_per_prompt)"
    return sets, [
        (num_without, f"of {len(groups)} prompts {without}"),
        (num_more, f"of {len(groups)} prompts {more}"),
    ]


def _repeats(identities: Sequence[Hashable], rows: Sequence[tuple[str, Row]]) -> Note:
    """The rows that say the same as an earlier one."""
    first: dict[Hashable, str] = {}
    places = zip(identities, rows, strict=True)
    repeated = [where for what, (where, _) in places if first.setdefault(what, where) != where]
    line = "".join(repeated[:1]).rpartition(":")[2]
    note = f"of {len(rows)} rows repeat an earlier one (the first in line {line}) and are kept"
    return len(repeated), f"{note}; remove them if that is not meant"


def _contradictions(sets: Sequence[Ranked]) -> Note:
    """The sets in which one text is better than another, and worse in another set."""
    claims = [
        [(_key(s.prompt, s.messages), *pair) for pair in itertools.combinations(s.completions, 2)]
        for s in sets
    ]
    known = set(itertools.chain.from_iterable(claims))
    number = sum(any((key, b, a) in known for key, a, b in claim) for claim in claims)
    share = f"of {len(sets)} preferences ({number / len(sets):.1%})"
    return number, f"{share} are contradicted by another about the same prompt, and are kept"


def _key(prompt: str, messages: Messages) -> Hashable:
    """A prompt as a hashable value."""
    return prompt, tuple((message["role"], message["content"]) for message in messages)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; NaN and infinity are none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max
