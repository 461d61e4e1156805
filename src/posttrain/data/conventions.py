"""The usual ways to write prompts, demonstrations and preferences, all brought to one.

A row is turned into the canonical columns of a *form*, by the table ``CONVENTIONS``:

* prompts: ``prompt`` or ``messages``, maybe ``answer``, and columns for rewards;
* demonstrations: ``prompt`` and ``completion``, or ``messages``, or ``text`` alone;
* preferences: ``prompt`` or ``messages``, and ``chosen`` and ``rejected``, or ``ranked``, or
  ``completion`` and ``score`` or ``label``.

A convention applies to a row that has its columns, where what it would give is not there yet.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple

from posttrain.data.preference_chats import divided
from posttrain.data.row_checks import mapping
from posttrain.data.row_files import Row, Table, open_table, shortly
from posttrain.registry import did_you_mean

Form = Literal["prompts", "demonstrations", "preferences"]
FORMS: dict[Form, tuple[str, ...]] = {
    "prompts": ("prompt", "messages", "answer"),
    "demonstrations": ("prompt", "completion", "messages", "text"),
    "preferences": (
        "prompt", "messages", "chosen", "rejected", "ranked", "completion", "score", "label",
        "margin", "ended",
    ),
}  # fmt: skip
# What ShareGPT's conversations call the roles.
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "bot": "assistant", "function": "tool", "observation": "tool", "developer": "system",
}  # fmt: skip
_SAMPLE = 100  # rows that are looked at to say how a source is understood
_CHATS = ("prompt", "messages", "conversations", "chosen", "rejected", "completion")
_NUMBERS = ("score", "label", "margin")


class Convention(NamedTuple):
    """What a row has, for which forms, and what is made of it; ``said`` is how that is told.

    ``turn`` changes the row and returns whether it applied.
    """

    said: str
    forms: tuple[Form, ...]
    turn: Callable[[Row, str], bool]


def read_as(
    form: Form, source: Any, *, columns: Mapping[str, str] | None = None, name: str = "data"
) -> Iterator[tuple[int, str, Row]]:
    """The rows of a source in a form: number, place for errors, and the canonical row.

    ``columns`` maps a canonical column to the one that holds it: ``{"prompt": "question"}``. A row
    of several scored completions comes as several.
    """
    table = source if isinstance(source, Table) else open_table(source, name=name)
    chosen = check_columns(form, columns)
    found = False
    for number, row in table.rows:
        where = table.where(number)
        for each in _canonical(dict(row), form, columns=chosen, table=table, where=where):
            found = True
            yield number, where, each
    if not found:
        raise ValueError(f"{table.name}: holds no rows; give at least one")


def check_columns(form: Form, columns: Mapping[str, str] | None) -> dict[str, str]:
    """A map of columns; a ``ValueError`` for a name that the form does not have."""
    if not isinstance(columns or {}, Mapping):
        raise ValueError(f"columns: got {columns!r}; write {mapping('prompt', 'text')}, say")
    for name, theirs in (columns or {}).items():
        if name not in FORMS[form]:
            turned = f"is it the other way round? {mapping(theirs, name)}"
            hint = turned if theirs in FORMS[form] else did_you_mean(name, FORMS[form])
            raise ValueError(f"columns: {form} have no {name!r}; {hint}")
        if not isinstance(theirs, str) or not theirs:
            raise ValueError(f"columns.{name}: must be the name of a column, got {theirs!r}")
    return dict(columns or {})


def _canonical(
    row: Row,
    form: Form,
    *,
    columns: Mapping[str, str],
    table: Table,
    where: str,
    told: Counter[str] | None = None,
) -> list[Row]:
    row = _mapped(row, columns, where=where)
    if not table.typed:
        _typed(row)
    if table.columnar:
        row = {key: value for key, value in row.items() if not _missing(row, key)}
    for column in _CHATS:
        if column in row:
            row[column] = _chat(row[column], read_text=column in ("messages", "conversations"))
    for convention in CONVENTIONS:
        if form in convention.forms and convention.turn(row, where) and told is not None:
            told[convention.said] += 1
    if form != "preferences":
        return [row]
    return [divided(each, where=where) for each in _scored(row, where=where)]


def _mapped(row: Row, columns: Mapping[str, str], *, where: str) -> Row:
    for name, theirs in columns.items():
        if theirs not in row:
            known = ", ".join(map(repr, row)) or "none"
            raise ValueError(
                f"{where}: no column {theirs!r}, which columns.{name} names; found: {known}; "
                f"{did_you_mean(theirs, row)}"
            )
    taken = {name: row[theirs] for name, theirs in columns.items()}
    if "prompt" in columns and "messages" not in columns:
        row.pop("messages", None)  # a whole chat beside the prompt that was chosen
    return {**row, **taken}


def _missing(row: Row, name: str) -> bool:
    """Whether a cell is null and may be: of a column that rows can do without."""
    optional = ("messages", "conversations", "answer", "ranked", *_NUMBERS)
    chat = row.get("messages") is not None or row.get("conversations") is not None
    return row[name] is None and (name in optional or (chat and name in ("prompt", "completion")))


def _typed(row: Row) -> None:
    """Cells of CSV that hold numbers, true or false, or chats, as what they hold."""
    for name in (*_NUMBERS, *_CHATS):
        text = row.get(name)
        listed = isinstance(text, str) and text.lstrip()[:2] in ("[{", "[ ")
        if isinstance(text, str) and (name in _NUMBERS or listed):
            try:
                row[name] = json.loads(text.strip().lower() if name in _NUMBERS else text)
            except (ValueError, RecursionError):
                continue  # said where the column is checked


def _chat(value: Any, *, read_text: bool) -> Any:
    """A chat as ``role`` and ``content``: keys that are null are left out, text parts are joined.

    What is none is returned as it is.
    """
    if read_text and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return value
    return [_message(each) for each in value]


def _message(given: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None or key == "content"}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {"role": ROLES.get(role, role), "content": message.pop("value", None), **message}
    parts = message.get("content")
    if isinstance(parts, list) and parts and all(_is_text(part) for part in parts):
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _is_text(part: Any) -> bool:
    plain = isinstance(part, dict) and part.get("type") == "text"
    return plain and isinstance(part.get("text"), str)


# ------------------------------------------------------------------------------- the conventions


def _renamed(
    theirs: str, ours: str, *, forms: tuple[Form, ...], unless: tuple[str, ...] = ("messages",)
) -> Convention:
    """``ours`` is what ``theirs`` holds, where there is neither ``ours`` nor any of ``unless``."""

    def turn(row: Row, where: str) -> bool:
        if theirs not in row or any(name in row for name in (ours, *unless)):
            return False
        row[ours] = row[theirs]
        return True

    return Convention(f"{ours} from {theirs}", forms, turn)


def _conversations(row: Row, where: str) -> bool:
    if "conversations" not in row or "messages" in row or "prompt" in row:
        return False
    row["messages"] = row.pop("conversations")
    return True


def _alpaca(row: Row, where: str) -> bool:
    if not isinstance(row.get("instruction"), str) or "prompt" in row or "messages" in row:
        return False
    more = row.get("input")
    behind = f"\n\n{more}" if isinstance(more, str) and more.strip() else ""
    row["prompt"] = row["instruction"] + behind
    return True


def _ground_truth(row: Row, where: str) -> bool:
    judge = row.get("reward_model")
    if "answer" in row or not isinstance(judge, dict) or judge.get("ground_truth") is None:
        return False
    row["answer"] = judge["ground_truth"]
    return True


def _behind_hashes(row: Row, where: str) -> bool:
    answer = row.get("answer")
    last = answer.rstrip().rpartition("\n")[2] if isinstance(answer, str) else ""
    found = last.partition("####")[2].strip()
    if not found:
        return False
    row.setdefault("solution", answer)
    thousands = re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", found)
    row["answer"] = found.replace(",", "") if thousands else found
    return True


def _prompt_of_messages(row: Row, where: str) -> bool:
    if not isinstance(row.get("prompt"), list) or "messages" in row:
        return False
    row["messages"] = row.pop("prompt")
    return True


def _whole_chat(row: Row, where: str) -> bool:
    """A prompt and a completion that are both messages, as one chat."""
    said = row.get("completion")
    if not isinstance(said, list) or "messages" not in row:
        return False
    row["messages"] = [*row["messages"], *said]
    del row["completion"]
    return True


def _said(row: Row, where: str) -> bool:
    """A completion that is one message of the assistant, as its text."""
    said = row.get("completion")
    if not isinstance(said, list) or len(said) != 1 or not isinstance(said[0], dict):
        return False
    row["completion"] = said[0].get("content")
    return True


def _text_alone(row: Row, where: str) -> bool:
    return "text" in row and not any(name in row for name in ("prompt", "completion", "messages"))


def _labels(row: Row, where: str) -> bool:
    if "label" not in row or "score" in row or row["label"] not in (True, False):
        return False
    row["score"] = float(row["label"])
    return True


_ALL: tuple[Form, ...] = ("prompts", "demonstrations", "preferences")
_PROMPTS: tuple[Form, ...] = ("prompts",)
_SHOWN: tuple[Form, ...] = ("demonstrations",)
_COMPARED: tuple[Form, ...] = ("preferences",)
_OTHER_KINDS = ("chosen", "ranked", "completions", "responses")
CONVENTIONS = (
    Convention("messages from conversations", _ALL, _conversations),
    *(_renamed(name, "prompt", forms=_ALL) for name in ("question", "problem", "query")),
    Convention("prompt from instruction and input", _ALL, _alpaca),
    Convention("messages from prompt", _ALL, _prompt_of_messages),
    Convention("one chat of prompt and completion", _SHOWN, _whole_chat),
    *(
        _renamed(name, "completion", forms=_SHOWN)
        for name in ("response", "output", "answer", "solution")
    ),
    Convention("text alone, learned whole", _SHOWN, _text_alone),
    Convention("answer from reward_model.ground_truth", _PROMPTS, _ground_truth),
    _renamed("ground_truth", "answer", forms=_PROMPTS, unless=()),
    Convention("answer behind ####", _PROMPTS, _behind_hashes),
    _renamed("response", "completion", forms=_COMPARED, unless=_OTHER_KINDS),
    Convention("completion of one message", _COMPARED, _said),
    Convention("score from label", _COMPARED, _labels),
)


def _scored(row: Row, *, where: str) -> list[Row]:
    """A row of several completions with a score each, as one row for each of them."""
    name = next((name for name in ("completions", "responses") if name in row), None)
    if name is None or "chosen" in row or "ranked" in row or "completion" in row:
        return [row]
    said, scores = row[name], row.get("scores")
    if isinstance(said, list) and scores is None and all(isinstance(each, dict) for each in said):
        scores = [_first(each, _SCORES) for each in said]
        said = [_first(each, _TEXTS) for each in said]
    if not isinstance(said, list) or not isinstance(scores, list) or len(said) != len(scores):
        raise ValueError(
            f"{where}: {name!r} needs 'scores', a list with a number for each completion; got "
            f"{shortly(said)} and {shortly(scores)}"
        )
    rest = {key: value for key, value in row.items() if key not in (name, "scores")}
    pairs = zip(said, scores, strict=True)
    return [{**rest, "completion": text, "score": score} for text, score in pairs]


def _first(item: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


_TEXTS = ("response", "completion", "text", "content")
_SCORES = ("overall_score", "score", "rating")


def understood(
    form: Form, source: Any, *, columns: Mapping[str, str] | None = None, name: str = "data"
) -> str:
    """How the rows of a source are understood, in one line with a sample: of its first hundred.

    >>> rows = [{"question": "1+1?", "answer": "One more.\\n#### 2", "level": 1}]
    >>> understood("prompts", rows)
    'data: read as prompts: prompt from question, answer behind ####; the first is {"prompt":
    "1+1?", "answer": "2"}; for rewards: question, level, solution'
    """
    table, told, first, num = open_table(source, name=name), Counter[str](), Row(), 0
    chosen = check_columns(form, columns)
    for number, row in islice(table.rows, _SAMPLE):
        options: dict[str, Any] = {"columns": chosen, "table": table, "told": told}
        made = _canonical(dict(row), form, where=table.where(number), **options)
        first, num = first or made[0], num + 1
    ways = [f"{ours} from {theirs}" for ours, theirs in chosen.items()]
    ways += [said if count == num else f"{said} ({count} of {num})" for said, count in told.items()]
    how = f": {', '.join(ways)}" if ways else ""
    shown = {key: _cut(first[key]) for key in FORMS[form] if key in first}
    line = (
        f"{table.name}: read as {form}{how}; the first is {json.dumps(shown, ensure_ascii=False)}"
    )
    others = [key for key in first if key not in FORMS[form]] if form == "prompts" else []
    return f"{line}; for rewards: {', '.join(others)}" if others else line


def _cut(value: Any) -> Any:
    """A value as a sample shows it."""
    if isinstance(value, list):
        shown = [
            _cut(each.get("content") if isinstance(each, dict) else each) for each in value[:3]
        ]
        return [*shown, "…"] if len(value) > 3 else shown
    if isinstance(value, str):
        return value if len(value) <= 40 else value[:39] + "…"
    return value if isinstance(value, bool | int | float) else shortly(value)
