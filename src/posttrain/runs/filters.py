"""Which rows of the index a filter lets through, and which of them a page in some order shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

_BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rollouts: all that is given must hold; bounds are inclusive.

    ``state`` is one of a score's states, or ``"broken"`` for all but ``"ok"``. ``text`` is looked
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
