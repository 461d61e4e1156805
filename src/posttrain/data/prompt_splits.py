"""Splits demonstrations, and preferences, into training and test rows that share no prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.data.preference_sets import Ranked

Demonstration = Mapping[str, Any]
Row = TypeVar("Row", Demonstration, Ranked)
Parts = tuple[list[Row], list[Row]]


def hold_out(
    rows: Sequence[Row], num_test: int, *, seed: int, key: Callable[[Row], Hashable] | None = None
) -> Parts[Row]:
    """Rows to learn from and at most ``num_test`` held out, both in their order.

    All rows of a prompt are on the same side, so that fewer may be held out: none, where every
    prompt has more rows than were asked for. ``key`` is what makes two prompts the same, unless
    it is :func:`asked`.

    >>> rows = [{"prompt": f"{n % 10}?", "completion": str(n)} for n in range(40)]
    >>> learned, held_out = hold_out(rows, 6, seed=0)
    >>> len(learned), len(held_out), len({row["prompt"] for row in held_out})
    (36, 4, 1)
    """
    keys = [(key or asked)(row) for row in rows]
    counts = Counter(keys)
    order = list(counts)
    random.Random(seed).shuffle(order)
    chosen: set[Hashable] = set()
    room = min(num_test, len(rows) - 1)
    for prompt in order:
        if counts[prompt] <= room:
            chosen.add(prompt)
            room -= counts[prompt]
    return _parted(rows, keys, test=chosen)


def split_by_prompt(
    rows: Sequence[Row],
    *,
    test_share: float,
    seed: int,
    key: Callable[[Row], Hashable] | None = None,
) -> Parts[Row]:
    """Rows to train on and to test on, in their order; no prompt stands in both parts.

    ``test_share`` is of the prompts; each part has at least one. ``key`` is that of
    :func:`hold_out`.

    >>> sets = [Ranked(prompt=f"{n}?", completions=("yes", "no")) for n in range(10)]
    >>> train, test = split_by_prompt(sets, test_share=0.2, seed=0)
    >>> len(train), len(test)
    (8, 2)
    """
    if not 0.0 < test_share < 1.0:
        raise ValueError(f"test_share: must be above 0 and below 1, got {test_share}")
    keys = [(key or asked)(row) for row in rows]
    prompts = list(dict.fromkeys(keys))
    if len(prompts) < 2:
        raise ValueError(
            "preferences: a split takes at least 2 different prompts, because no prompt may be in "
            f"both parts; found {len(prompts)}; add other prompts, or test on another file"
        )
    num_test = min(max(round(test_share * len(prompts)), 1), len(prompts) - 1)
    return _parted(rows, keys, test=set(random.Random(seed).sample(prompts, num_test)))


def _parted(
    rows: Sequence[Row], keys: Sequence[Hashable], *, test: Collection[Hashable]
) -> Parts[Row]:
    parts: Parts[Row] = ([], [])
    for prompt, row in zip(keys, rows, strict=True):
        parts[prompt in test].append(row)
    return parts


def check_apart(
    train: Sequence[Row],
    test: Sequence[Row],
    *,
    where: str,
    key: Callable[[Row], Hashable] | None = None,
) -> None:
    """Raise where a test prompt is a train prompt too; ``where`` is what the error begins with."""
    learned = {(key or asked)(row) for row in train}
    prompts: dict[Hashable, Row] = {}
    for row in test:
        prompts.setdefault((key or asked)(row), row)
    if shared := [row for prompt, row in prompts.items() if prompt in learned]:
        raise ValueError(
            f"{where}: {len(shared)} of {len(prompts)} test prompts are also train prompts, the "
            f"first is {_said(shared[0])!r:.60}; remove them from one side, or the test measures "
            "memory"
        )


def asked(row: Demonstration | Ranked) -> Hashable:
    """What makes two prompts the same, but for white space around what is said.

    Of a demonstration it is what comes before the first answer, or a text without a prompt; of
    preferences text or messages.

    >>> asked({"prompt": "2+3=", "completion": "5"})
    (('user', '2+3='),)
    """
    if isinstance(row, Ranked):
        return row.prompt.strip(), _chat(row.messages)
    if "messages" not in row:
        return (("user", str(row.get("prompt") or row["text"]).strip()),)
    said = _chat(row["messages"])
    return said[: [role for role, _ in said].index("assistant")]


def _chat(messages: Sequence[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"].strip()) for message in messages)


def _said(row: Demonstration | Ranked) -> str:
    if isinstance(row, Ranked):
        return row.prompt or row.messages[-1]["content"]
    return str(row.get("prompt") or row.get("text") or row["messages"][0]["content"])
