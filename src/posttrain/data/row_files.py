"""Rows wherever they are: JSONL, JSON, CSV and Parquet files, folders of ``datasets``, objects.

They are read one after another, and a file that is not whole is refused with the place and a way to
fix it. Nothing here runs code of a data set.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.hub_rows import hub_rows, is_hub_id, split_hub_id
from posttrain.data.row_objects import HANDED_OVER, LOOKED_AT, handed_over, is_columnar, object_rows
from posttrain.registry import nearest

MAX_LINE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 8 * 2**30
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
MEND = "fix or remove the line"
_BATCH = 1024  # rows of a Parquet or Arrow file in memory at a time
_BUFFER = 2**20  # bytes of a column that are read at a time: without, a whole row group is
_UTF16 = ("UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8")
_OTHERS = {
    b"\x1f\x8b": ("a gzip archive", "unpack it with gunzip"),
    b"BZh": ("a bzip2 archive", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("an xz archive", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "unpack it with unzstd"),
    b"PK\x03\x04": ("a zip archive or an Excel sheet", "unpack it, or save the sheet as CSV"),
    b"SQLite": ("an SQLite database", "write its rows as CSV"),
    b"\x80\x04": ("a pickle, which may run code", "save the rows as JSONL or Parquet"),
    b"\x80\x05": ("a pickle, which may run code", "save the rows as JSONL or Parquet"),
    b"\x93NUMPY": ("an array of numpy", "save the rows as JSONL or Parquet"),
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}

Row = dict[str, Any]
Numbered = Iterator[tuple[int, Row]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbered rows and their ``name``; ``at`` is what follows it for one of them.

    A file of text cells alone, CSV, is not ``typed``: there a score is text, and so is a chat. In
    one that is ``columnar`` every row has every column, and a null is a cell that is not there.
    """

    name: str
    rows: Iterable[tuple[int, Row]]
    at: str = ": row {}"
    typed: bool = True
    columnar: bool = False

    def where(self, number: int) -> str:
        """The place of a row, as errors begin.

        >>> Table(name="a.jsonl", rows=(), at=":{}").where(3)
        'a.jsonl:3'
        """
        return self.name + self.at.format(number)


def open_table(source: Any, *, name: str = "data") -> Table:
    """The rows of a file, a folder, a hub id ``"owner/name:config:split"``, or of an object.

    ``name`` is what errors call an object: a list of rows, a ``datasets.Dataset``.
    """
    if not isinstance(source, str | Path):
        rows = object_rows(source, name=name)
        return Table(name=name, rows=rows, at="[{}]", columnar=is_columnar(source))
    text, path = str(source), Path(source).expanduser()
    if text.startswith(HANDED_OVER):
        handed, columnar = handed_over(text)
        return Table(name=name, rows=handed, at="[{}]", columnar=columnar)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if is_hub_id(text):
        return Table(name=text, rows=hub_rows(**split_hub_id(text)), columnar=True)
    folder = path.resolve().parent
    near = nearest(path.name, [each.name for each in folder.glob("*") if each.is_file()])
    hint = f"; did you mean {near!r}?" if near else ""
    raise FileNotFoundError(f"{path}: there is no such file (looked in {folder}){hint}")


def _file(path: Path) -> Table:
    with path.open("rb") as opened:
        begins = opened.read(4096)
    size, kind = path.stat().st_size, path.suffix.lower()
    if begins.startswith(b"PAR1") or kind == ".parquet":
        return Table(name=str(path), rows=_guarded(path, _parquet(path)), columnar=True)
    if begins.startswith(b"\xff\xff\xff\xff") or kind == ".arrow":
        return Table(name=str(path), rows=_guarded(path, _arrow([path])), columnar=True)
    for magic, (what, mend) in _OTHERS.items():
        if begins.startswith(magic):
            raise ValueError(f"{path}: is {what}; {mend}")
    if kind in (".csv", ".tsv"):
        return Table(name=str(path), rows=_csv(path), at=":{}", typed=False)
    if size > MAX_FILE_BYTES:
        raise ValueError(
            f"{path}: {size / 2**30:.1f} GiB of text is more than {MAX_FILE_BYTES // 2**30} GiB; "
            "split the file, or write it as Parquet"
        )
    opening = begins.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if kind == ".txt" and opening not in (b"{", b"["):
        raise ValueError(
            f'{path}: is plain text; write JSONL, {{"text": …}} or {{"prompt": …}} on each line, '
            "or give strings from Python: data=[file.read_text()] learns it as one text, "
            "file.read_text().splitlines() line by line"
        )
    if opening == b"[" or _is_one_value(path):
        return Table(name=str(path), rows=_json(path))
    return Table(name=str(path), rows=_jsonl(path), at=":{}")


def _is_one_value(path: Path) -> bool:
    """Whether a file is one JSON object that holds a list, and not one object on each line."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as opened:
        first, more = opened.readline(MAX_LINE_BYTES), opened.read(4096).strip()
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return bool(more)
    held = value.items() if isinstance(value, dict) and not more else ()
    return any(isinstance(each, list) and name not in LOOKED_AT for name, each in held)


def _folder(path: Path) -> Table:
    """A folder that ``datasets`` saved, or one of files of one kind, as the parts of a download."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in path.iterdir() if (each / "state.json").is_file())
        named = ", ".join(str(path / split) for split in splits) or "none"
        raise ValueError(f"{path}: holds the splits of a data set; name one of them: {named}")
    if (path / "state.json").is_file():
        return Table(name=str(path), rows=_guarded(path, _arrow(_saved(path))), columnar=True)
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES)
    parts = {file.name.split("-0")[0] for file in files if "-of-" in file.name}
    if len(parts) == 1 and all("-of-" in file.name for file in files):
        tables = [_file(file) for file in files]
        every = (row for table in tables for _, row in table.rows)
        return Table(
            name=str(path),
            rows=enumerate(every, start=1),
            typed=tables[0].typed,
            columnar=tables[0].columnar,
        )
    known = ", ".join(file.name for file in files[:5]) or "none"
    raise ValueError(f"{path}: is a folder; give the path of a file in it. Known: {known}")


def _saved(path: Path) -> list[Path]:
    """The files of a folder that ``Dataset.save_to_disk`` wrote."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: its state.json is damaged ({error}); save it again") from error
    if state.get("_indices_data_files"):
        raise ValueError(f"{path}: was saved with indices; call flatten_indices() and save again")
    files = [path / Path(name).name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path}: {missing[0]} is missing; copy the whole folder again")
    return files


def _guarded(path: Path, rows: Numbered) -> Numbered:
    """The same rows; what a library says of a damaged file names the file."""
    import pyarrow as pa

    number = 0
    try:
        for number, row in rows:
            yield number, row
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        behind = f" behind row {number}" if number else ""
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{path}: damaged or cut short{behind} ({why}); copy it again") from error


def _parquet(path: Path) -> Numbered:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
        _check_names(file.schema_arrow.names, path)
        yield from _batches(file.iter_batches(batch_size=_BATCH))


def _arrow(paths: list[Path]) -> Numbered:
    import pyarrow as pa

    number = 0
    for path in paths:
        with pa.memory_map(str(path)) as mapped:
            try:
                batches: Any = pa.ipc.open_stream(mapped)
            except pa.ArrowInvalid:  # written as a file and not as a stream
                file = pa.ipc.open_file(mapped)
                batches = (file.get_batch(part) for part in range(file.num_record_batches))
            for batch in batches:
                _check_names(batch.schema.names, path)
                for _, row in _batches([batch]):
                    number += 1
                    yield number, row


def _batches(batches: Iterable[Any]) -> Numbered:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH):  # that of an Arrow file may be all of it
            for row in batch.slice(start, _BATCH).to_pylist():
                number += 1
                yield number, row


def _csv(path: Path) -> Numbered:
    csv.field_size_limit(MAX_LINE_BYTES)
    ended = 0  # the line that the row before ended with
    header: list[str] = []
    lines = (text for _, text in _decoded(path))
    try:
        first = next(lines, "")
        mark = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        reader = csv.reader(_with(first, lines), delimiter=mark, strict=True)
        for cells in reader:
            begun, ended = ended + 1, reader.line_num
            if not header:
                header = [cell.strip() for cell in cells]
                _check_names(header, path)
            elif cells and len(cells) != len(header):
                raise ValueError(
                    f"{path}:{begun}: {len(cells)} cells under {len(header)} columns; put cells "
                    f"that hold {mark!r}, quotes or line ends in double quotes"
                )
            elif cells:
                yield begun, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{path}:{ended + 1}: not valid CSV ({error}); is a double quote not closed, or not "
            "doubled inside a cell?"
        ) from error


def _with(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _check_names(names: list[str], path: Path) -> None:
    """Raise where two columns have one name: a row could keep only one of them."""
    if (twice := _twice(names)) is not None:
        raise ValueError(f"{path}: two columns are called {twice!r}; rename one")


def _twice(names: list[str]) -> str | None:
    """A name that is there more than once, the first of them."""
    return next((name for name, number in Counter(names).items() if number > 1), None)


def _json(path: Path) -> Numbered:
    """The objects of one array, or of the one list that an object holds."""
    text = "".join(text for _, text in _decoded(path))
    value = _parse(text, lambda error: f"{path}:{error.lineno}" if error else str(path))
    if isinstance(value, dict):
        lists = [name for name, each in value.items() if isinstance(each, list)]
        if len(lists) != 1:
            named = ", ".join(map(repr, value)) or "nothing"
            raise ValueError(
                f"{path}: one object with {named}; expected a list of rows [{{…}}, …], or an "
                "object that holds one"
            )
        value = value[lists[0]]
    for number, row in enumerate(value, start=1):
        yield number, _object(row, f"{path}: row {number}")


def _jsonl(path: Path) -> Numbered:
    for number, text in _decoded(path):
        if text.strip():
            where = f"{path}:{number}"
            yield number, _object(_parse(text, lambda error, where=where: where), where)  # type: ignore[misc]


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    """The lines as text. Split at newlines alone: U+2028 may stand inside a string."""
    with path.open("rb") as opened:
        read = iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(read, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}:{number}: a line of more than {MAX_LINE_BYTES / 2**20:.0f} MiB; write "
                    "one object per line"
                )
            if b"\0" in line:
                raise ValueError(
                    f"{path}:{number}: NUL bytes, which JSON and CSV have none of: the file is "
                    "damaged, or UTF-16; copy it again, or convert it with iconv -f UTF-16 -t UTF-8"
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start}); convert "
                    "the file, for example with iconv -t UTF-8"
                ) from error


def _parse(text: str, where: Callable[[json.JSONDecodeError | None], str]) -> Any:
    try:
        return json.loads(
            text.rstrip("\r\n"), object_pairs_hook=_distinct, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where(error)}: not valid JSON ({error.msg.removesuffix(' at')} at column "
            f"{error.colno}); {MEND}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where(None)}: not valid JSON ({error}); {MEND}") from error


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object like {{…}}, got {shortly(row)}")
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = _twice([name for name, _ in pairs])
        raise ValueError(f"the key {twice!r} occurs twice; keep one")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or a number")


def shortly(value: Any) -> str:
    """A value of a row in at most 60 characters, as JSON where that can hold it.

    >>> shortly(None), shortly(b"a")
    ('null', "b'a'")
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, TypeError, RecursionError):
        text = repr(value)
    text = text if not isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
