"""Splits demonstrations into training and held-out rows that share no prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Demonstration = Mapping[str, Any]
Key = Callable[[Demonstration], Hashable]


def hold_out(
    rows: Sequence[Demonstration], num_test: int, *, seed: int, key: Key | None = None
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to learn from and at most ``num_test`` held out, both in their order.

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
    parts: tuple[list[Demonstration], list[Demonstration]] = ([], [])
    for prompt, row in zip(keys, rows, strict=True):
        parts[prompt in chosen].append(row)
    return parts


def check_held_out(
    rows: Sequence[Demonstration],
    held_out: Sequence[Demonstration],
    *,
    where: str,
    key: Key | None = None,
) -> None:
    """Raise where a held-out prompt is learned from; ``where`` is what the error begins with."""
    learned = {(key or asked)(row) for row in rows}
    prompts = {(key or asked)(row): row for row in held_out}
    if shared := [row for prompt, row in prompts.items() if prompt in learned]:
        first = shared[0].get("prompt") or shared[0]["messages"][0]["content"]
        raise ValueError(
            f"{where}: {len(shared)} of {len(prompts)} prompts are also in sft.data, the first is "
            f"{first!r:.60}; remove them from one side, or the held-out loss measures memory"
        )


def asked(row: Demonstration) -> Hashable:
    """What makes two prompts the same: what comes before the first answer, but for white space.

    >>> asked({"prompt": "2+3=", "completion": "5"})
    (('user', '2+3='),)
    """
    if "messages" not in row:
        return (("user", row["prompt"].strip()),)
    said = [(message["role"], message["content"].strip()) for message in row["messages"]]
    answers = [place for place, (role, _) in enumerate(said) if role == "assistant"]
    return tuple(said[: answers[0]])
