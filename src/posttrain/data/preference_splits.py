"""Splits preferences into training and test rows that share no prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence

from posttrain.data.preference_sets import Ranked

Key = Callable[[Ranked], Hashable]


def split_by_prompt(
    sets: Sequence[Ranked], *, test_share: float, seed: int, key: Key | None = None
) -> tuple[list[Ranked], list[Ranked]]:
    """Preferences to train on and to test on, in their order; no prompt stands in both parts.

    ``test_share`` is of the prompts; each part has at least one. ``key`` is what makes two prompts
    the same; without, their text or messages, but for white space around them.

    >>> sets = [Ranked(prompt=f"{n}?", completions=("yes", "no")) for n in range(10)]
    >>> train, test = split_by_prompt(sets, test_share=0.2, seed=0)
    >>> len(train), len(test)
    (8, 2)
    """
    if not 0.0 < test_share < 1.0:
        raise ValueError(f"test_share: must be above 0 and below 1, got {test_share}")
    keys = [(key or _asked)(ranked) for ranked in sets]
    prompts = list(dict.fromkeys(keys))
    if len(prompts) < 2:
        raise ValueError(
            f"preferences: there are {len(prompts)} different prompts, and to split takes 2, as "
            "none may stand in both parts; add other prompts, or test on another file"
        )
    num_test = min(max(round(test_share * len(prompts)), 1), len(prompts) - 1)
    test = set(random.Random(seed).sample(prompts, num_test))
    parts: tuple[list[Ranked], list[Ranked]] = ([], [])
    for prompt, ranked in zip(keys, sets, strict=True):
        parts[prompt in test].append(ranked)
    return parts


def check_apart(
    train: Sequence[Ranked], test: Sequence[Ranked], *, where: str, key: Key | None = None
) -> None:
    """Raise where a test prompt is a train prompt too; ``where`` is what the error begins with."""
    learned = {(key or _asked)(ranked) for ranked in train}
    asked: dict[Hashable, Ranked] = {}
    for ranked in test:
        asked.setdefault((key or _asked)(ranked), ranked)
    if shared := [ranked for prompt, ranked in asked.items() if prompt in learned]:
        first = shared[0].prompt or shared[0].messages[-1]["content"]
        raise ValueError(
            f"{where}: {len(shared)} of {len(asked)} test prompts are also train prompts, the "
            f"first is {first!r:.60}; remove them from one side, or the test measures memory"
        )


def _asked(ranked: Ranked) -> Hashable:
    """What makes two prompts the same: their text or messages, but for white space around them."""
    chat = tuple((message["role"], message["content"].strip()) for message in ranked.messages)
    return ranked.prompt.strip(), chat
