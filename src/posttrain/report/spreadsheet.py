"""The numbers of a stage for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from posttrain.runs.metrics_file import Record, merge_steps, to_columns
from posttrain.track.printable import printable


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
