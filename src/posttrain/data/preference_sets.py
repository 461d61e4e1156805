"""Preferences for a reward model: pairs, ranked sets, or completions with scores or labels."""

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

from posttrain.data.conventions import read_as
from posttrain.data.row_checks import check_messages, check_text

PAIRS, SETS, LABELS = "pairs", "ranked sets", "labelled completions"
# The columns that identify the kind of a row.
KINDS = {"chosen": PAIRS, "rejected": PAIRS, "ranked": SETS, "completion": LABELS, "score": LABELS}
PAIR = {"chosen", "rejected"}
KEPT = ("prompt", "messages", *KINDS, "label", "margin", "ended")
MAX_PAIRS = 16  # of a prompt whose completions have scores

Row = Mapping[str, Any]
Messages = tuple[Mapping[str, str], ...]
Label = tuple[dict[str, Any], str, float]  # a prompt, its completion and the score
Note = tuple[int, str]  # a count, and the text after it: "of 9 rows …"; a warning unless 0


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Completions of one prompt, best first; ``margin`` is by how much (0: not given).

    The prompt is text, or ``messages`` that end with the user's or a tool's; ``prompt`` is then "".
    ``ended`` says of each whether its writer ended it; one that was cut off is learned without an
    end token. Empty: all were ended.

    >>> Ranked(prompt="2+3=", completions=("5", "6")).margin
    0.0
    """

    prompt: str
    messages: Messages = ()
    completions: tuple[str, ...]
    margin: float = 0.0
    ended: tuple[bool, ...] = ()

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
                    "are the same text but for white space, so neither is better; fix one"
                )
        if not _is_number(self.margin) or self.margin < 0:
            raise ValueError(
                f"margin: must be a number of at least 0, got {self.margin!r:.60}; leave it out "
                "where it is not known"
            )
        object.__setattr__(self, "margin", float(self.margin))
        flags = isinstance(self.ended, tuple) and all(type(flag) is bool for flag in self.ended)
        if not flags or (self.ended and len(self.ended) != len(self.completions)):
            raise ValueError(
                "ended: must be true or false for each completion, in a list of "
                f"{len(self.completions)}; leave it out where all were ended"
            )
        object.__setattr__(self, "ended", self.ended or (True,) * len(self.completions))


def read_preferences(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    name: str = "data",
    max_pairs_per_prompt: int = MAX_PAIRS,
    seed: int = 0,
) -> list[Ranked]:
    """The preferences of a file, whose rows are all of one kind.

    Each has ``prompt``, or ``messages`` for a chat, and beside it

    1. ``chosen`` and ``rejected``, or
    2. ``ranked``, a list with the best first, or
    3. ``completion`` and ``score``, or ``label``: a better and a worse completion of a prompt make
       a pair, at most ``max_pairs_per_prompt`` of them, drawn with ``seed``. Equal ones make none.

    The first two may have a ``margin``; the third has none, as scores have no common scale. Beside
    ``ranked``, a list ``ended`` is false where a completion was cut off (see :class:`Ranked`).
    Conventions are those of :mod:`posttrain.data.conventions`. Rows that repeat or contradict
    another are kept, and reported in a warning.
    """
    if max_pairs_per_prompt < 1:
        raise ValueError(f"max_pairs_per_prompt: must be at least 1, got {max_pairs_per_prompt}")
    rows = _read(source, columns=columns, name=name)
    return _preferences(rows, name=_named(source, name), limit=max_pairs_per_prompt, seed=seed)


def _read(
    source: Any, *, columns: Mapping[str, str] | None, name: str
) -> list[tuple[str, dict[str, Any]]]:
    read = read_as("preferences", source, columns=columns, name=name)
    return [  # the whole row where half of a pair is missing: the error shows what it has
        (at, {k: v for k, v in row.items() if k in KEPT or len(PAIR & row.keys()) == 1})
        for _, at, row in read
    ]


def _named(source: Any, name: str) -> str:
    return str(source) if isinstance(source, str | Path) else name


def _preferences(
    rows: Sequence[tuple[str, Row]], *, name: str, limit: int, seed: int
) -> list[Ranked]:
    kind = _common_kind(rows)
    if kind == LABELS:
        labels = [_label(row, where=where) for where, row in rows]
        identities: list[Hashable] = [(_key(**prompt), *rest) for prompt, *rest in labels]
        sets, notes = _compare(labels, limit=limit, seed=seed)
    else:
        read = _pair if kind == PAIRS else _ranked
        sets, notes = [read(row, where=where) for where, row in rows], []
        identities = [(_key(s.prompt, s.messages), s.completions, s.margin) for s in sets]
    if not sets:
        raise ValueError(
            f"{name}: no prompt has two different completions with different scores, so there is "
            "no preference; score more completions of each prompt"
            + ('; rows with a label are for dpo.loss = "kto"' if "label" in rows[0][1] else "")
        )
    for number, text in (_repeats(identities, rows), *notes, _contradictions(sets)):
        if number:
            warnings.warn(f"{name}: {number} {text}", stacklevel=3)
    return sets


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """One completion of a prompt, text or ``messages``, and whether it is ``desirable``."""

    prompt: str
    messages: Messages = ()
    completion: str
    desirable: bool
    ended: tuple[bool] = (True,)

    @property
    def completions(self) -> tuple[str, ...]:
        """It alone, as a set has them."""
        return (self.completion,)


def read_labelled(
    source: Any, *, columns: Mapping[str, str] | None = None, name: str = "data"
) -> list[Labelled]:
    """Completions that are desirable or not.

    The rows have ``prompt`` or ``messages``, ``completion`` and a ``label``, true or false; or they
    are those of :func:`read_preferences`: of a pair the first is desirable and the second is not,
    of a ranked set those above the middle, and those below it.
    """
    return [
        row
        for found in read_compared(source, columns=columns, name=name)
        for row in ([found] if isinstance(found, Labelled) else _halves(found))
    ]


def read_compared(
    source: Any, *, columns: Mapping[str, str] | None = None, name: str = "data"
) -> Sequence[Ranked | Labelled]:
    """The rows of a file of labels, or the sets of one of preferences."""
    rows = _read(source, columns=columns, name=name)
    if any("label" in row for _, row in rows):
        return [_labelled(row, where=where) for where, row in rows]
    return _preferences(rows, name=_named(source, name), limit=MAX_PAIRS, seed=0)


def _halves(s: Ranked) -> list[Labelled]:
    middle = (len(s.completions) - 1) / 2
    return [
        Labelled(
            prompt=s.prompt,
            messages=s.messages,
            completion=text,
            desirable=place < middle,
            ended=(ended,),
        )
        for place, (text, ended) in enumerate(zip(s.completions, s.ended, strict=True))
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
        row |= {} if all(ranked.ended) else {"ended": ranked.ended}
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
    prompt = _prompt(row, where=where)
    texts = [check_text(row, column, where=where) for column in ("chosen", "rejected")]
    return _make(row, where=where, **prompt, completions=tuple(texts))


def _ranked(row: Row, *, where: str) -> Ranked:
    if not isinstance(row["ranked"], list):
        raise ValueError(f"{where}: 'ranked' must be a list of texts, the best first; put it in []")
    ended = row.get("ended", ())
    given = {"completions": tuple(row["ranked"]), "ended": tuple(ended) if ended else ()}
    return _make(row, where=where, **_prompt(row, where=where), **given)


def _make(row: Row, *, where: str, **fields: Any) -> Ranked:
    try:
        return Ranked(**fields, margin=row.get("margin", 0.0))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _label(row: Row, *, where: str) -> Label:
    score: Any = row.get("score")
    if not isinstance(score, bool) and not _is_number(score):
        fault = f"must be a number, got {score!r:.60}" if "score" in row else "is not there"
        if "label" in row:  # one of true and false is a score
            fault = f"is not there, and 'label' is {row['label']!r:.60}"
        raise ValueError(f"{where}: 'score' {fault}; write a number, true or false")
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
    place = "".join(repeated[:1])
    note = f"of {len(rows)} rows repeat an earlier one (the first is {place}) and are kept"
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
