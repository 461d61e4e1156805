"""Reading ``metrics.jsonl``: as records, as columns, as a frame, for a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from posttrain.track.jsonl import FILE_NAME
from posttrain.track.printable import printable

Record = dict[str, float]


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a ``metrics.jsonl`` (or of the folder that holds one), in the order logged.

    Each has ``step``, an int, and floats. What stands after the last newline is a record that was
    being written, or was torn by a crash: it is left out. Any other broken line is an error.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path}: no such file; is this the folder of a stage, like RUN/rl?")
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def merge_steps(records: Iterable[Mapping[str, float]]) -> list[Record]:
    """One record for each step, in order; where a metric was logged twice the later value stands.

    >>> merge_steps([{"step": 1, "a": 1.0}, {"step": 0, "a": 0.0}, {"step": 1, "b": 2.0}])
    [{'step': 0, 'a': 0.0}, {'step': 1, 'a': 1.0, 'b': 2.0}]
    """
    merged: dict[float, Record] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def to_columns(records: Iterable[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """One list for each metric, ``step`` first, with None where a record does not have it.

    >>> to_columns([{"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}])
    {'step': [1, 2], 'a': [1.0, None], 'b': [None, 2.0]}
    """
    rows = list(records)
    names = dict.fromkeys(["step", *(name for row in rows for name in row)])
    return {name: [row.get(name) for row in rows] for name in names}


def frame(records: Iterable[Mapping[str, float]]) -> pa.Table:
    """One row for each step, one column for each metric: a pyarrow table.

    ``frame(…).to_pandas()`` makes it a pandas DataFrame, where pandas is installed.

    >>> frame([{"step": 1, "a": 0.5}, {"step": 1, "b": 2.0}]).to_pylist()
    [{'step': 1, 'a': 0.5, 'b': 2.0}]
    """
    columns = to_columns(merge_steps(records))
    types = {name: pa.int64() if name == "step" else pa.float64() for name in columns}
    return pa.table({name: pa.array(column, types[name]) for name, column in columns.items()})


def _record(line: bytes, where: str) -> Record:
    try:
        values = json.loads(line)
        step = int(values.pop("step"))
        return {"step": step, **{name: float(value) for name, value in values.items()}}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f'{where}: expected {{"step": …, "metric": number, …}}, found {line[:80]!r}; '
            "delete the line to read the rest"
        ) from error


def metrics_csv(records: Sequence[Record]) -> str:
    """One row for each step, one column for each metric; empty where it was not logged."""
    columns = to_columns(merge_steps(records))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    # A name may hold anything; a spreadsheet takes a cell that begins like this for a formula.
    names = map(printable, columns)
    table.writerow([f"'{name}" if name.startswith(tuple("=+-@")) else name for name in names])
    table.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()
