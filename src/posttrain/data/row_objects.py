"""Rows that are handed over from Python: lists, tables, and ``datasets.Dataset`` objects."""

from __future__ import annotations

import hashlib
import json
import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HANDED_OVER = "rows:"  # what a recipe calls rows that were handed over; a digest follows
# The columns that are looked into; all others are passed on as they are.
LOOKED_AT = (
    "prompt", "messages", "conversations", "question", "problem", "query", "instruction", "input",
    "answer", "completion", "response", "output", "chosen", "rejected", "ranked", "completions",
    "responses", "score", "scores", "label", "margin", "ground_truth",
)  # fmt: skip
_handed: dict[str, tuple[list[dict[str, Any]], bool]] = {}


class Cells(list[dict[str, Any]]):
    """The rows of a table: each has every column, and a null is a cell that is not there."""


def object_rows(
    rows: Any, *, name: str, text: str = "prompt"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a list, a ``Dataset``, a DataFrame or a pyarrow table, numbered from 0.

    One that is a string is the column ``text``.
    """
    for number, row in enumerate(row_list(rows, name=name)):
        given = {text: row} if isinstance(row, str) else row
        yield number, _row(given, where=f"{name}[{number}]")


def hand_over(rows: Any, *, name: str) -> str:
    """A name for rows by which ``open_table`` finds them in this process: of a digest of them."""
    read, columnar = (
        [row for _, row in object_rows(rows, name=name, text="text")],
        is_columnar(rows),
    )
    if not read:
        raise ValueError(f"{name}: holds no rows; give at least one")
    text = json.dumps(read, default=repr, sort_keys=True) + "columnar" * columnar
    key = HANDED_OVER + hashlib.sha256(text.encode()).hexdigest()[:16]
    _handed[key] = read, columnar
    return key


def handed_over(key: str) -> tuple[Iterator[tuple[int, dict[str, Any]]], bool]:
    """The rows of a name that :func:`hand_over` gave, and whether they were those of a table."""
    if key not in _handed:
        raise ValueError(
            f"{key}: rows that were handed over from Python, which no folder can hold; call the "
            "same function with the same rows again (resume=True goes on with a run)"
        )
    rows, columnar = _handed[key]
    return enumerate(dict(row) for row in rows), columnar


def is_columnar(rows: Any) -> bool:
    """Whether rows are those of a table: of pyarrow, of pandas, or a ``datasets.Dataset``."""
    return isinstance(rows, Cells) or hasattr(rows, "column_names") or _is_frame(rows)


def _is_frame(rows: Any) -> bool:
    return hasattr(rows, "to_dict") and hasattr(rows, "columns")


def row_list(rows: Any, *, name: str) -> Iterable[Any]:
    """Rows one by one; a table by column would yield its column names, and is turned."""
    if hasattr(rows, "to_pylist"):  # of pyarrow
        rows = rows.to_pylist()
    elif _is_frame(rows):  # of pandas, where a cell that is not there may be NaN, NaT, NA or None
        rows = Cells(rows.astype(object).where(rows.notna(), None).to_dict("records"))
    if isinstance(rows, Mapping) and hasattr(rows, "column_names"):  # a DatasetDict
        splits = ", ".join(f'["{split}"]' for split in rows)
        raise ValueError(f"{name}: holds the splits of a data set; give one of them: {splits}")
    if isinstance(rows, Mapping) or hasattr(rows, "columns") or not isinstance(rows, Iterable):
        raise ValueError(
            f"{name}: expected a list of rows, got {type(rows).__name__}; of a DataFrame: "
            'df.to_dict("records")'
        )
    return rows


def to_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Rows as a DataFrame of pandas, which is not installed with posttrain."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_pandas: pandas is not installed; run `pip install pandas`, or use the rows "
            "themselves (a run's .metrics() is a pyarrow table, an evaluation's .rows() a list)"
        ) from error
    return pandas.DataFrame([dict(row) for row in rows])


def _row(row: Any, *, where: str) -> dict[str, Any]:
    """A row as if read from a file: what the checks of files look at is JSON, the rest as given."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f'{where}: expected text or a dict like {{"prompt": …}}, got {type(row).__name__}'
        )
    read = dict(row)
    for column in [name for name in LOOKED_AT if name in read]:
        try:
            text = json.dumps(read[column], allow_nan=False, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: {column!r} is nothing that JSON can hold: {reprlib.repr(read[column])}; "
                "turn it into text"
            ) from error
        read[column] = json.loads(text)
    return read


def _plain(value: Any) -> Any:
    """A number or an array of numpy as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return operator.index(value)
