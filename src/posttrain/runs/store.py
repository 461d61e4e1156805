"""Finding rollouts among a million: filters, orders and pages over a folder of step files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.registry import did_you_mean
from posttrain.runs.index import (
    EMPTY,
    UNREADABLE,
    Index,
    in_threads,
    load_index,
    open_step,
    refreshed,
    save_index,
)
from posttrain.runs.rollouts import SCHEMA, rollout_file
from posttrain.types.text import ScoreState

_BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rollouts: all that is given must hold; bounds are inclusive.

    ``state`` is one of a score's states, as the rollouts hold them, or ``"broken"`` for any of
    ``"invalid"``, ``"timeout"`` and ``"crashed"``. ``text`` is looked
    for in prompts and completions, whatever the case; it alone has to read the step files.
    """

    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    group: int | None = None
    state: str | None = None
    stop_reason: str | None = None
    prompt_id: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        known = (*get_args(ScoreState), _BROKEN)
        if self.state is not None and self.state not in known:
            raise ValueError(f"state: {self.state!r} is not one; {did_you_mean(self.state, known)}")


ALL = Filter()


def matching(table: pa.Table, where: Filter) -> np.ndarray:
    """A mask over rows of the index; steps and text are not in them, and not looked at."""
    mask = np.ones(table.num_rows, dtype=bool)
    if where.min_reward is not None:
        mask &= table["reward"].to_numpy() >= where.min_reward
    if where.max_reward is not None:
        mask &= table["reward"].to_numpy() <= where.max_reward
    if where.group is not None:
        mask &= table["group"].to_numpy() == where.group
    for name in ("state", "stop_reason", "prompt_id"):
        word = getattr(where, name)
        if word is not None:
            mask &= _is_word(table[name], word, broken=name == "state")
    return mask


def window_of(
    key: np.ndarray | None, chosen: np.ndarray, *, window: tuple[int, int], descending: bool
) -> np.ndarray:
    """A window of the chosen positions in the order of their keys, without sorting all of them.

    >>> window_of(np.array([3.0, 1.0, 2.0, 1.0]), np.arange(4), window=(1, 3), descending=False)
    array([3, 2])
    """
    start, stop = window
    stop = min(stop, len(chosen))
    if start >= stop:
        return chosen[:0]
    if key is None:
        return chosen[::-1][start:stop] if descending else chosen[start:stop]
    values = -key[chosen] if descending else key[chosen]
    values[np.isnan(values)] = np.inf
    parted = np.partition(values, (start, stop - 1))
    first, last = parted[start], parted[stop - 1]
    num_before = np.count_nonzero(values < first)
    near = np.flatnonzero((values >= first) & (values <= last))  # the window, and ties around it
    order = np.argsort(values[near], kind="stable")[start - num_before : stop - num_before]
    return chosen[near[order]]


def _is_word(column: pa.ChunkedArray, word: str, *, broken: bool) -> np.ndarray:
    """Where a column of coded words has this one; ``broken`` lets that word stand for many."""
    if not column.num_chunks:
        return np.zeros(0, dtype=bool)
    coded = column.chunk(0)
    words = coded.dictionary.to_pylist()
    alike = (lambda w: w not in ("ok", "")) if broken and word == _BROKEN else (lambda w: w == word)
    codes = [code for code, each in enumerate(words) if alike(each)]
    return np.isin(coded.indices.to_numpy(), np.array(codes, dtype=np.int32))


Order = Literal["step", "reward", "advantage", "length"]
MAX_PAGE = 1000
_KEPT_ANSWERS = 4  # a text search reads files: its next page should not do so again
_SAVE_SHARE = 16  # the index is written again when one in so many of its files is new
_NOT_SHOWN = ("prompt_tokens", "completion_tokens", "sampler_logprobs")
SHOWN = tuple(name for name in SCHEMA.names if name not in _NOT_SHOWN)


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some rollouts as dicts, and how many there are beyond them."""

    rows: list[dict[str, Any]]
    offset: int
    total: int


class Rollouts:
    """The rollouts of a stage, found through an index that is kept beside them.

    ``folder`` is the stage's folder, or that of its step files. The index is brought up to date
    when the store is opened and at every :meth:`refresh`. Memory is some 30 bytes a rollout and
    one step file at a time. May be used by several threads.

    >>> store = Rollouts("runs/demo/rl")                                # doctest: +SKIP
    >>> store.page(Filter(max_reward=0.0), sort="length", limit=20)     # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        inner = Path(folder) / "rollouts"
        self.folder = inner if inner.is_dir() else Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{folder}: no such folder; expected a stage's, like RUN/rl")
        self._lock = threading.RLock()
        self._answers: dict[Filter, np.ndarray] = {}
        self.version = 0  # another one whenever what it holds has changed
        self._use(load_index(self.folder))
        self._unsaved = 0
        self.refresh()

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def steps(self) -> list[int]:
        """The steps there are rollouts of, in order."""
        return [file.step for file in self._index.files if not file.problem]

    @property
    def problems(self) -> dict[str, str]:
        """Files that cannot be read, and why; their rollouts are missing from every page."""
        broken = [file for file in self._index.files if file.problem]
        return {rollout_file(Path(), file.step).name: file.problem for file in broken}

    def refresh(self) -> bool:
        """Take up what has changed in the folder; False where nothing has."""
        with self._lock:
            index, num_changed = refreshed(self._index, self.folder)
            if not num_changed:
                return False
            self._use(index)
            self._unsaved += num_changed
            if self._unsaved * _SAVE_SHARE >= len(index.files):
                save_index(self.folder, index)
                self._unsaved = 0
            return True

    @property
    def table(self) -> pa.Table:
        """What the index knows of every rollout, in the order of their steps."""
        return self._index.table

    def steps_of(self, positions: np.ndarray) -> np.ndarray:
        """The steps of the rollouts at these positions of the table."""
        return self._steps[np.searchsorted(self._offsets, positions, side="right") - 1]

    def find(self, where: Filter = ALL) -> np.ndarray:
        """The positions in the table of the rollouts that a filter lets through."""
        return self._select(where)

    def read(self, positions: np.ndarray, columns: Sequence[str] = SHOWN) -> list[dict[str, Any]]:
        """The rollouts at these positions of the table, as :meth:`page` has them."""
        _check("step", limit=len(positions), offset=0, columns=columns)
        with self._lock:
            return self._rows(positions, columns)

    def count(self, where: Filter = ALL) -> int:
        """How many rollouts a filter lets through."""
        return len(self._select(where))

    def page(
        self,
        where: Filter = ALL,
        *,
        sort: Order = "step",
        descending: bool = False,
        offset: int = 0,
        limit: int = 50,
        columns: Sequence[str] = SHOWN,
    ) -> Page:
        """``limit`` rollouts of those a filter lets through, from number ``offset`` on.

        Equal ones stand in the order of their steps; what has no value (NaN) comes last. Without
        ``columns`` a row has every column but the token lists.
        """
        _check(sort, limit=limit, offset=offset, columns=columns)
        ask: dict[str, Any] = {
            "sort": (sort, descending),
            "window": (offset, offset + limit),
            "columns": columns,
        }
        with self._lock:
            try:
                return self._page(where, **ask)
            except ValueError:  # a file changed since it was indexed, or the index was made up
                self._use(EMPTY)
                self.refresh()
            return self._page(where, **ask)

    def _page(
        self,
        where: Filter,
        *,
        sort: tuple[Order, bool],
        window: tuple[int, int],
        columns: Sequence[str],
    ) -> Page:
        chosen = self._select(where)
        wanted = window_of(self._key(sort[0]), chosen, window=window, descending=sort[1])
        return Page(rows=self._rows(wanted, columns), offset=window[0], total=len(chosen))

    def _use(self, index: Index) -> None:
        counts = [file.num_rows for file in index.files]
        self._index = index
        self.version += 1
        self._answers.clear()
        self._steps = np.array([file.step for file in index.files], dtype=np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def _key(self, sort: Order) -> np.ndarray | None:
        """What to order by; None for the order in which rows stand anyway."""
        if sort == "step":
            return None
        return np.asarray(self._index.table[sort].to_numpy(), dtype=np.float64)

    def _select(self, where: Filter) -> np.ndarray:
        """The positions of the rows a filter lets through, in the order of their steps."""
        with self._lock:
            if where not in self._answers:
                if len(self._answers) >= _KEPT_ANSWERS:
                    self._answers.pop(next(iter(self._answers)))
                self._answers[where] = self._find(where)
            return self._answers[where]

    def _find(self, where: Filter) -> np.ndarray:
        if where.text is not None:
            found = self._select(replace(where, text=None))
            return self._containing(where.text, found) if where.text else found
        first = 0 if where.first_step is None else np.searchsorted(self._steps, where.first_step)
        last = len(self._steps)
        if where.last_step is not None:
            last = int(np.searchsorted(self._steps, where.last_step, side="right"))
        start, stop = int(self._offsets[first]), int(self._offsets[max(first, last)])
        mask = matching(self._index.table.slice(start, stop - start), where)
        return np.flatnonzero(mask) + start

    def _containing(self, text: str, positions: np.ndarray) -> np.ndarray:
        """Those of the rows whose prompt or completion contains a text; reads their files."""

        def search(part: tuple[int, np.ndarray]) -> np.ndarray:
            file, rows = part
            table = self._read(file, ["prompt", "completion"], rows=rows)
            hits = [
                pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
                for name in table.column_names
            ]
            return rows[np.asarray(pc.or_(*hits))] + self._offsets[file]

        return np.concatenate([positions[:0], *in_threads(search, self._by_file(positions))])

    def _rows(self, positions: np.ndarray, columns: Sequence[str]) -> list[dict[str, Any]]:
        parts = self._by_file(np.sort(positions))
        tables = in_threads(lambda part: self._read(part[0], columns, rows=part[1]), parts)
        found: dict[int, dict[str, Any]] = {}
        for (file, rows), table in zip(parts, tables, strict=True):
            shown = table.to_pylist()
            found |= zip((rows + self._offsets[file]).tolist(), shown, strict=True)
        for row in found.values():
            if "parts" in row:
                row["parts"] = dict(row["parts"] or ())
        return [found[position] for position in positions.tolist()]

    def _by_file(self, positions: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Sorted positions as rows of the files that hold them."""
        if not len(positions):
            return []
        files = np.searchsorted(self._offsets, positions, side="right") - 1
        numbers, starts = np.unique(files, return_index=True)
        rows = np.split(positions, starts[1:])
        return [(int(n), part - self._offsets[n]) for n, part in zip(numbers, rows, strict=True)]

    def _read(self, file: int, columns: Sequence[str], *, rows: np.ndarray) -> pa.Table:
        known = self._index.files[file]
        path = rollout_file(self.folder, known.step)
        try:
            with open_step(path) as opened:
                if opened.metadata.num_rows != known.num_rows:
                    raise ValueError("it has changed since it was indexed")
                table = opened.read(columns=list(columns), use_threads=False).select(list(columns))
            table = table if len(rows) == table.num_rows else table.take(pa.array(rows))
            table.validate(full=True)  # a text that is not UTF-8 is found here, not by a reader
            return table
        except UNREADABLE as error:
            said = str(error).partition("\n")[0]
            raise ValueError(
                f"{path}: cannot be read ({said}); move it away to see the others"
            ) from error


def _check(sort: str, *, limit: int, offset: int, columns: Sequence[str]) -> None:
    if sort not in get_args(Order):
        raise ValueError(f"sort: expected one of {', '.join(get_args(Order))}, got {sort!r}")
    if not 0 <= limit <= MAX_PAGE or offset < 0:
        raise ValueError(
            f"page: expected an offset of 0 or more and a limit of 0 to {MAX_PAGE}, "
            f"got {offset} and {limit}"
        )
    unknown = [name for name in columns if name not in SCHEMA.names]
    if unknown:
        raise ValueError(f"columns: no {unknown[0]!r}; there are {', '.join(SCHEMA.names)}")
