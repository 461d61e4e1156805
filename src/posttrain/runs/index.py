"""The index of a folder of rollouts: the few numbers by which rollouts are found, in one file.

``rollouts/index.arrow`` holds, for every row of every step file, what filters and orders need and
nothing else: some 30 bytes a rollout. It is derived: it names the size and the time of every file
it was made from, so a file that appeared, changed or went is seen, and only such files are read.
Missing, torn or strange, it is made again. The step files are the truth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from posttrain.runs.files import replacing
from posttrain.runs.rollouts import SCHEMA, rollout_file, step_of

FILE_NAME = "index.arrow"
MAX_ROWS = 1_000_000  # of one step; a file that claims more is not one of ours
MAX_BYTES = 2**31  # of one step, unpacked

_CODED = pa.dictionary(pa.int32(), pa.string())
_NUMBERS = {"reward": float("nan"), "advantage": float("nan"), "length": 0, "group": -1}
_WORDS = ("state", "stop_reason", "prompt_id")
_RAW = pa.schema([SCHEMA.field(name) for name in (*_NUMBERS, *_WORDS)])
COLUMNS = pa.schema([(f.name, _CODED if f.name in _WORDS else f.type) for f in _RAW])
_KEY = b"posttrain.rollouts.index"
_LAYOUT = 1

_THREADS = min(8, os.cpu_count() or 1)
Item = TypeVar("Item")
Result = TypeVar("Result")

# What reading bytes that are not Parquet, or not Arrow, can raise.
UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, kw_only=True)
class StepFile:
    """A step file as it was when it was read; ``problem`` says why it could not be."""

    step: int
    size: int
    modified: int
    num_rows: int
    problem: str = ""


@dataclass(frozen=True)
class Index:
    """The files in the order of their steps, and their rows one after the other."""

    files: tuple[StepFile, ...]
    table: pa.Table


EMPTY = Index((), COLUMNS.empty_table())


def load_index(folder: Path) -> Index:
    """The index that is there; the empty one where it is missing, torn or not ours."""
    try:
        with pa.memory_map(str(folder / FILE_NAME)) as source:
            table = pa.ipc.open_file(source).read_all()
        content = json.loads((table.schema.metadata or {})[_KEY])
        files = tuple(StepFile(**entry) for entry in content["files"])
        table = table.replace_schema_metadata(None)
        table.validate(full=True)  # nobody vouches for what is in a run folder
        if content["layout"] != _LAYOUT or not table.schema.equals(COLUMNS):
            return EMPTY
        if sum(file.num_rows for file in files) != table.num_rows:
            return EMPTY
        return Index(files, table)
    except UNREADABLE:
        return EMPTY


def save_index(folder: Path, index: Index) -> None:
    """Write the index; where the folder cannot be written, each reader makes its own."""
    content = {"layout": _LAYOUT, "files": [asdict(file) for file in index.files]}
    table = index.table.replace_schema_metadata({_KEY: json.dumps(content)})
    try:
        for left in folder.glob(f".{FILE_NAME}.*.tmp"):  # what a killed process was writing
            left.unlink()
        with (
            replacing(folder / FILE_NAME) as beside,
            pa.ipc.new_file(str(beside), table.schema) as writer,
        ):
            writer.write_table(table)
    except OSError:
        return


def refreshed(index: Index, folder: Path) -> tuple[Index, int]:
    """The index of what the folder holds now, and how many files were read or dropped for it."""
    found = dict(_stamps(folder)) if folder.is_dir() else {}
    stays = [found.get(file.step) == (file.size, file.modified) for file in index.files]
    kept = [file for file, stay in zip(index.files, stays, strict=True) if stay]
    new = sorted(found.keys() - {file.step for file in kept})
    num_changed = len(new) + len({file.step for file in index.files} - found.keys())
    if not num_changed:
        return index, 0
    read = in_threads(lambda step: _read(folder, step, stamp=found[step]), new)
    kept_rows = np.repeat(np.array(stays, dtype=bool), [file.num_rows for file in index.files])
    pieces = [index.table.filter(pa.array(kept_rows)), _coded([table for _, table in read])]
    table = pa.concat_tables(pieces).unify_dictionaries().combine_chunks()
    files = [*kept, *(file for file, _ in read)]
    steps = np.repeat([file.step for file in files], [file.num_rows for file in files])
    if np.any(steps[1:] < steps[:-1]):  # a step between others was written again
        table = table.take(np.argsort(steps, kind="stable"))
    return Index(tuple(sorted(files, key=lambda file: file.step)), table), num_changed


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``work`` of every item, in order: reading Parquet leaves Python free for the next file."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        return list(pool.map(work, items))


def open_step(path: Path) -> pq.ParquetFile:
    """A step file, unless it claims to be larger than any step is."""
    file = pq.ParquetFile(path)
    groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
    size = sum(group.total_byte_size for group in groups)
    if file.metadata.num_rows > MAX_ROWS or size > MAX_BYTES:
        raise ValueError(f"claims {file.metadata.num_rows:,} rows of {size:,} bytes")
    return file


def _stamps(folder: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            step = step_of(entry.name)
            if step is None:
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:  # a resumed run takes back steps that it does again
                continue
            yield step, (stat.st_size, stat.st_mtime_ns)


def _read(folder: Path, step: int, *, stamp: tuple[int, int]) -> tuple[StepFile, pa.Table]:
    """What the index keeps of one file; of a broken one, why it is."""
    problem = ""
    try:
        with open_step(rollout_file(folder, step)) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise ValueError("does not have the columns of rollouts")
            table = file.read(columns=_RAW.names, use_threads=False).select(_RAW.names)
        table.validate(full=True)
        table = table.replace_schema_metadata(None)
    except UNREADABLE as error:
        problem, table = str(error).partition("\n")[0][:300], _RAW.empty_table()
    size, modified = stamp
    file_read = StepFile(
        step=step, size=size, modified=modified, num_rows=table.num_rows, problem=problem
    )
    return file_read, table


def _coded(tables: list[pa.Table]) -> pa.Table:
    """Rows as the index keeps them: no nulls, and words as numbers of a dictionary."""
    whole = pa.concat_tables([_RAW.empty_table(), *tables]).combine_chunks()
    filled: Mapping[str, Any] = {**_NUMBERS, **dict.fromkeys(_WORDS, "")}
    columns = []
    for name, value in filled.items():
        column = pc.fill_null(whole[name], value)
        columns.append(pc.dictionary_encode(column) if name in _WORDS else column)
    return pa.table(columns, schema=COLUMNS).combine_chunks()
