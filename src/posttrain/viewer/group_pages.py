"""Groups of rollouts, found by what their members are; and prompts, followed through training.

A group is a prompt of a step with its completions. A filter is one of rollouts: a group is shown
where one of its completions passes, and it is shown whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from posttrain.runs import Filter, Rollouts
from posttrain.runs.store import MAX_PAGE, window_of

GroupOrder = Literal["step", "reward", "spread", "length", "advantage"]
PromptOrder = Literal["best", "mean", "change", "times", "last_step"]
MAX_GROUPS = 50
MAX_SIBLINGS = 64
MAX_TEXT = 1200  # characters of a text in a page of groups; a rollout by itself has all
COLUMNS = (
    *("step", "group", "sample", "prompt_id", "prompt", "completion", "reward", "state", "reason"),
    *("parts", "advantage", "version", "stop_reason", "length", "turns"),
)

_KEPT = ("step", "group", "sample", "state", "version", "stop_reason", "length")


@dataclass(frozen=True)
class Groups:
    """Where each group begins in the table of a store, and what it comes to.

    Means are over the members whose score is known (NaN where none is); ``signal`` is whether their
    rewards differ.
    """

    starts: np.ndarray
    sizes: np.ndarray
    steps: np.ndarray
    reward: np.ndarray
    spread: np.ndarray
    length: np.ndarray
    advantage: np.ndarray

    def with_any(self, positions: np.ndarray, total: int) -> np.ndarray:
        """The groups that hold one of these positions."""
        if len(positions) == total:
            return np.arange(len(self.starts))
        return np.unique(np.searchsorted(self.starts, positions, side="right") - 1)


def groups_of(store: Rollouts) -> Groups:
    """The groups of a store; completions of one prompt stand together in a step."""
    table = store.table
    total = table.num_rows
    steps = store.steps_of(np.arange(total))
    numbers = table["group"].to_numpy()
    new = np.ones(total, dtype=bool)
    new[1:] = (numbers[1:] != numbers[:-1]) | (steps[1:] != steps[:-1])
    starts = np.flatnonzero(new)
    sizes = np.diff(np.append(starts, total))
    ok = _is(table["state"], "ok")
    mean, spread = _moments(table["reward"].to_numpy(), ok, starts=starts)
    length, _ = _moments(table["length"].to_numpy(), np.ones(total, dtype=bool), starts=starts)
    size, _ = _moments(np.abs(table["advantage"].to_numpy()), ok, starts=starts)
    return Groups(
        starts=starts,
        sizes=sizes,
        steps=steps[starts],
        reward=mean,
        spread=spread,
        length=length,
        advantage=size,
    )


def group_page(
    store: Rollouts,
    groups: Groups,
    *,
    where: Filter,
    sort: GroupOrder = "step",
    descending: bool = False,
    offset: int = 0,
    limit: int = 20,
) -> dict[str, Any]:
    """Some groups that a filter finds, each with its members, and how many there are."""
    if sort not in get_args(GroupOrder):
        raise ValueError(f"sort: expected one of {', '.join(get_args(GroupOrder))}, got {sort!r}")
    if not (0 <= limit <= MAX_GROUPS and offset >= 0):
        raise ValueError(f"page: expected an offset of 0 or more, a limit of 0 to {MAX_GROUPS}")
    found = groups.with_any(store.find(where), store.table.num_rows)
    key = None if sort == "step" else getattr(groups, sort).astype(np.float64)
    shown = window_of(key, found, window=(offset, offset + limit), descending=descending)
    return {
        "groups": _described(store, groups, numbers=shown),
        "offset": offset,
        "total": len(found),
        "rollouts": len(store),
        "steps": [int(store.steps[0]), int(store.steps[-1])] if store.steps else [],
        "problems": store.problems,
    }


def members(
    store: Rollouts, *, step: int, group: int, columns: tuple[str, ...] = COLUMNS
) -> list[dict[str, Any]]:
    """All members of one group of a step; none where it has no such group."""
    positions = store.find(Filter(first_step=step, last_step=step, group=group))
    return store.read(positions[:MAX_PAGE], columns)


def prompt_page(
    store: Rollouts,
    numbers: Mapping[str, np.ndarray],
    *,
    sort: PromptOrder = "best",
    descending: bool = False,
    offset: int = 0,
    limit: int = 50,
    unsolved: bool = False,
) -> dict[str, Any]:
    """Prompts by how their answers were rewarded through training: who is never solved?

    ``change`` is the mean of the later half of the answers less that of the earlier half.
    """
    if sort not in get_args(PromptOrder):
        raise ValueError(f"sort: expected one of {', '.join(get_args(PromptOrder))}, got {sort!r}")
    if not (0 <= limit <= 200 and offset >= 0):
        raise ValueError("page: expected an offset of 0 or more, a limit of 0 to 200")
    top = float(np.nanmax(numbers["best"])) if len(numbers["best"]) else 0.0
    chosen = np.flatnonzero(numbers["times"] > 0)
    if unsolved:
        chosen = chosen[~(numbers["best"][chosen] >= top)]
    shown = window_of(numbers[sort], chosen, window=(offset, offset + limit), descending=descending)
    firsts = numbers["position"][shown].astype(np.int64)
    texts = {row["prompt_id"]: row["prompt"] for row in store.read(firsts, ("prompt_id", "prompt"))}
    names = [_prompt_name(store, int(code)) for code in shown]
    rows = [
        {"prompt_id": name, "prompt": texts.get(name, "")[:MAX_TEXT]}
        | {key: clean(numbers[key][code]) for key in get_args(PromptOrder)}
        for name, code in zip(names, shown, strict=True)
    ]
    return {"prompts": rows, "offset": offset, "total": len(chosen), "highest": top}


def prompts_of(store: Rollouts) -> dict[str, np.ndarray]:
    """Numbers of every prompt, by its code in the index."""
    table = store.table
    if not table.num_rows:
        empty = np.zeros(0)
        return dict.fromkeys((*get_args(PromptOrder), "position"), empty)
    coded = table["prompt_id"].chunk(0)
    codes = coded.indices.to_numpy()
    count = len(coded.dictionary)
    ok = _is(table["state"], "ok")
    rewards = table["reward"].to_numpy()
    known, position = codes[ok], np.flatnonzero(ok)
    times = np.bincount(known, minlength=count)
    mean = _share(np.bincount(known, rewards[ok], minlength=count), times)
    best = np.full(count, -np.inf)
    np.maximum.at(best, known, rewards[ok])
    last = np.zeros(count)
    last[codes] = store.steps_of(np.arange(len(codes)))  # positions ascend: the last one stays
    first = np.zeros(count)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    middle = _share(np.bincount(known, position, minlength=count), times)
    late = position > middle[known]
    halves = []
    for half in (late, ~late):
        number = np.bincount(known[half], minlength=count)
        halves.append(_share(np.bincount(known[half], rewards[ok][half], minlength=count), number))
    return {
        "best": np.where(times > 0, best, np.nan),
        "mean": mean,
        "change": halves[0] - halves[1],
        "times": times.astype(np.float64),
        "last_step": last,
        "position": first,
    }


def _described(store: Rollouts, groups: Groups, *, numbers: np.ndarray) -> list[dict[str, Any]]:
    """Groups with their members, read file by file."""
    sizes = np.minimum(groups.sizes[numbers], MAX_SIBLINGS)
    ranges = [
        np.arange(start, start + size)
        for start, size in zip(groups.starts[numbers], sizes, strict=True)
    ]
    positions = np.concatenate([np.zeros(0, dtype=np.int64), *ranges])
    rows: list[dict[str, Any]] = []
    for start in range(0, len(positions), MAX_PAGE):
        rows += store.read(positions[start : start + MAX_PAGE], COLUMNS)
    shown = []
    for number, size in zip(numbers.tolist(), sizes.tolist(), strict=True):
        own, rows = rows[:size], rows[size:]
        shown.append(
            {
                "step": int(groups.steps[number]),
                "group": own[0]["group"],
                "prompt_id": own[0]["prompt_id"],
                "prompt": cut(own[0]["prompt"]),
                "size": int(groups.sizes[number]),
                "reward": clean(groups.reward[number]),
                "spread": clean(groups.spread[number]),
                "length": clean(groups.length[number]),
                "members": [shortened(row) for row in own],
            }
        )
    return shown


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """A member as a page of groups has it: long texts without their middle, no prompt."""
    turns = row["turns"]
    if turns is not None:
        turns = [{**turn, "text": cut(turn["text"], 300)} for turn in turns[:12]]
    kept = {key: row[key] for key in _KEPT}
    numbers = {key: clean(row[key]) for key in ("reward", "advantage")}
    parts = {name: clean(value) for name, value in row["parts"].items()}
    texts = {"completion": cut(row["completion"]), "reason": cut(row["reason"] or "", 300)}
    return {**kept, **texts, **numbers, "parts": parts, "turns": turns}


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """A text; a long one without its middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} more characters … {text[-half:]}"


def clean(value: Any) -> float | None:
    """A number that JSON knows."""
    return float(value) if value is not None and np.isfinite(value) else None


def _moments(
    values: np.ndarray, known: np.ndarray, *, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population deviation of the known values of each group; NaN where none is."""
    if not len(starts):
        return np.zeros(0), np.zeros(0)
    numbers = np.where(known, values, 0.0).astype(np.float64)
    count = np.add.reduceat(known.astype(np.int64), starts)
    mean = _share(np.add.reduceat(numbers, starts), count)
    sizes = np.diff(np.append(starts, len(values)))
    apart = np.where(known, numbers - np.repeat(mean, sizes), 0.0)
    return mean, np.sqrt(_share(np.add.reduceat(apart**2, starts), count))


def _share(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)


def _is(column: Any, word: str) -> np.ndarray:
    if not column.num_chunks:
        return np.zeros(0, dtype=bool)
    coded = column.chunk(0)
    codes = [code for code, each in enumerate(coded.dictionary.to_pylist()) if each == word]
    return np.isin(coded.indices.to_numpy(), np.array(codes, dtype=np.int32))


def _prompt_name(store: Rollouts, code: int) -> str:
    return str(store.table["prompt_id"].chunk(0).dictionary[code].as_py())
